"""Every matrix product of GPT-2 (124M) by itself, against what the machine can do.

    python benchmarks/roofline.py [--rows 1 8 16 64 256 1024] [--threads N] [--save]

A product of M rows with K x N weights does 2MKN operations and reads 4KN bytes of weights,
which come from memory, since 40 matrices take turns. Checked against NumPy first. The
ceilings are those of NumPy's BLAS and of a read of a long array, in the same run.
"""
import argparse
import datetime
import statistics
import sys
import time

import forward as common  # sets the threads first
import numpy as np
from per_sublayer import machine, warn
from record import record, rounded

from tinymlir.jit import jit

SHAPES = {"qkv": (768, 2304), "out": (768, 768), "up": (768, 3072), "down": (3072, 768)}
COPIES = 24


def product(x, weight):
    return x @ weight


def measure(rows, shape, kind, rounds):
    """(operations per byte of weights, GFLOP/s, GB/s of weights) of one product."""
    dice = np.random.default_rng(rows)
    x = dice.standard_normal((rows, shape[0])).astype(kind)
    weights = [dice.standard_normal(shape, np.float32) for _ in range(COPIES)]
    compiled = jit(product).compile(x, weights[0])
    if not np.allclose(compiled(x, weights[0]), x @ weights[0], rtol=1e-3, atol=1e-2):
        sys.exit(f"a product of {rows} rows with {shape} is wrong")
    time.sleep(common.REST)
    times = [statistics.fmean(common.seconds(compiled, x, w) for w in weights)
             for _ in range(rounds)]
    once, work = statistics.median(times), 2 * rows * shape[0] * shape[1]
    size = weights[0].nbytes
    return work / size, work / once / 1e9, size / once / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     parents=[common.THREADS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 256, 1024])
    parser.add_argument("--save", action="store_true", help="into results.json")
    args = parser.parse_args()
    warn()
    ceilings = [rounded(x) for x in common.probe()]
    print(f"{datetime.date.today()}, {machine()}; {common.asked} threads; ceilings: "
          "{} GB/s, {} GFLOP/s in float64, {} in float32\n".format(*ceilings))
    print("| activations | rows | product | operations/byte | GFLOP/s | GB/s |")
    print("|---" * 6 + "|")
    found = []
    for kind in ("float64", "float32"):
        for rows in args.rows:
            for name, shape in SHAPES.items():
                figures = [rounded(x) for x in measure(rows, shape, kind, 3)]
                found.append([kind, rows, name, *figures])
                print("|", " | ".join(map(str, found[-1])), "|", flush=True)
    if args.save:
        record(f"roofline, {common.asked} threads", found, ceilings=ceilings)


if __name__ == "__main__":
    main()
