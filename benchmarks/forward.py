"""GPT-2 (124M, random weights), the next token's logits: tinymlir and other engines.

    python benchmarks/forward.py [--lengths 16 64 256 1024] [--rounds 7] [--threads N]

One process, the same weights, in turns, every result checked before a time is taken.
Two tables. *Faithful*: NumPy's types, most of it float64, against the NumPy program.
*float32*: against NumPy in float32 and every engine that is installed (`pip install -e
".[bench]"`). A probe of the machine comes first: how fast it reads, and how fast it
multiplies. Times are medians in milliseconds. Not here: other models, batches.
"""
import argparse
import datetime
import os
import statistics
import sys
import time

THREADS = argparse.ArgumentParser(add_help=False)
THREADS.add_argument("--threads", type=int, default=os.cpu_count())
asked = THREADS.parse_known_args()[0].threads
os.environ["TINYMLIR_THREADS"] = str(asked)  # before anything starts a thread
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(asked)

import numpy as np  # noqa: E402
import peers  # noqa: E402
from per_sublayer import GPT2, machine, make_params, random_tensors, warn  # noqa: E402
from record import record, rounded  # noqa: E402

from tinymlir.fused import compiled as fused  # noqa: E402
from tinymlir.fused import padded  # noqa: E402
from tinymlir.model import PLAIN, Model  # noqa: E402
from tinymlir.ops import merge_heads, split_heads  # noqa: E402
from tinymlir.reference import forward  # noqa: E402

REST = 0.25  # seconds between two engines: their idle threads have gone to sleep


def probe():
    """(GB/s read, GFLOP/s in float64, in float32) with all threads of NumPy's BLAS."""
    from concurrent.futures import ThreadPoolExecutor
    x = np.ones(100 << 20, np.float32)
    parts = np.array_split(x, asked)
    with ThreadPoolExecutor(asked) as pool:
        read = min(seconds(lambda: list(pool.map(np.max, parts))) for _ in range(7))
    rates = [x.nbytes / read / 1e9]
    for kind in (np.float64, np.float32):
        a = np.ones((1536, 1536), kind)
        rates.append(2 * 1536**3 / min(seconds(lambda a=a: a @ a) for _ in range(7)) / 1e9)
    return rates


def seconds(function, *args):
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


# ---------------------------------------------------------------- NumPy in float32

def numpy32(params, heads):
    """The forward pass that somebody who wants speed writes in NumPy."""
    root = np.float32(np.sqrt(2 / np.pi))

    def norm(x, gain, bias):
        x = x - x.mean(-1, keepdims=True)
        return gain * x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-5)) + bias

    def block(x, b):
        n, width = x.shape
        y = norm(x, *b.norm_1) @ b.qkv.weight + b.qkv.bias
        q, k, v = (split_heads(z, heads) for z in np.split(y, 3, -1))
        scores = q @ k.transpose(0, 2, 1) * np.float32(q.shape[-1]**-0.5)
        scores += np.triu(np.full((n, n), -np.inf, np.float32), 1)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        x = x + merge_heads(scores @ v) @ b.out.weight + b.out.bias
        y = norm(x, *b.norm_2) @ b.up.weight + b.up.bias
        y = 0.5 * y * (1 + np.tanh(root * (y + np.float32(0.044715) * (y * y * y))))
        return x + y @ b.down.weight + b.down.bias

    def run(ids):
        x = params.words[ids] + params.positions[:len(ids)]
        for b in params.blocks:
            x = block(x, b)
        return norm(x[-1:], *params.norm)[0] @ params.words.T

    return run


# ---------------------------------------------------------------- the two tables

def one_function(params, dtype):
    run = fused("cpu", dtype, "float32")
    return lambda ids: run(padded(ids, GPT2.context), np.array(len(ids) - 1), params,
                           heads=GPT2.heads, residuals=False)[0]


def faithful(params):
    """Engine -> function, with NumPy's types. The first one is the reference."""
    plain, ours = Model(GPT2, params, PLAIN), Model(GPT2, params)
    whole = one_function(params, None)
    return {"NumPy": lambda ids: plain(ids)[0],
            "NumPy, whole": lambda ids: forward(ids, params, GPT2.heads, [])[-1],
            "tinymlir": lambda ids: ours(ids)[0], "tinymlir --fused": whole}


def single(params):
    return {"NumPy": numpy32(params, GPT2.heads),
            "tinymlir --fused": one_function(params, "float32"),
            **peers.engines(params, GPT2.heads, asked)}


def check(engines, ids, reference):
    want = reference(ids)
    for name, run in engines.items():
        got = run(ids)
        if not np.allclose(got, want, rtol=1e-3, atol=1e-3):
            sys.exit(f"{name} differs from NumPy by {np.max(np.abs(got - want)):.2g}")


def measure(engines, ids, rounds):
    """Median milliseconds of each engine, in turns."""
    times = {name: [] for name in engines}
    for _ in range(rounds):
        for name, run in engines.items():
            time.sleep(REST)
            run(ids)  # wakes its threads
            times[name].append(seconds(run, ids))
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def table(title, engines, lengths, rounds, reference, base):
    """Print a table; returns {length: {engine: milliseconds}}."""
    print(f"\n{title}: milliseconds, and how many times as fast as {base}\n")
    print("| tokens |", " | ".join(engines), "|")
    print("|---|" + "---|" * len(engines))
    all_found = {}
    for n in lengths:
        ids = np.random.default_rng(n).integers(0, GPT2.vocabulary, n)
        check(engines, ids, reference)
        found = measure(engines, ids, rounds if n < 1024 else 1)
        cells = (f"{t:.1f} ({found[base] / t:.2f}x)" for t in found.values())
        print(f"| {n} |", " | ".join(cells), "|", flush=True)
        all_found[n] = {name: rounded(t) for name, t in found.items()}
    return all_found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], parents=[THREADS])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="into results.json")
    args = parser.parse_args()
    warn()
    print(f"{datetime.date.today()}, {machine()}, NumPy {np.__version__}")
    read, double, float_ = probe()
    print(f"{asked} threads; reads {read:.1f} GB/s; multiplies {double:.0f} GFLOP/s in "
          f"float64, {float_:.0f} in float32 (NumPy's BLAS)")
    params = make_params(GPT2, random_tensors(GPT2))
    reference = faithful(params)["NumPy"]
    found = {}
    for title, engines in (("NumPy's types", faithful), ("float32", single)):
        found[title] = table(title, engines(params), args.lengths, args.rounds, reference,
                             "NumPy")
    if args.save:
        record(f"forward, {asked} threads", found,
               ceilings=[rounded(x) for x in (read, double, float_)])


if __name__ == "__main__":
    main()
