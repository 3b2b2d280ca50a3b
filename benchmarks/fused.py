"""GPT-2 (124M, random weights) as one compiled module, against NumPy.

    python benchmarks/fused.py [--lengths 16 64] [--rounds 9]

The reference is `tinymlir.reference.forward`, the function that the module was traced
from. It computes the logits of every token, as written; the module only the last row, so
NumPy is also given the benefit of the last row alone. Correctness comes first.
"""
import argparse
import datetime
import platform
import statistics
import subprocess
import sys

import numpy as np
from per_sublayer import GPT2, TOLERANCE, machine, make_params, random_tensors, seconds, warn

from tinymlir.fused import FusedModel
from tinymlir.reference import forward, normalise

COLD = """
import sys, time
import numpy as np
sys.path.insert(0, sys.argv[2])
from per_sublayer import GPT2, make_params, random_tensors
from tinymlir.fused import last_logits
params = make_params(GPT2, random_tensors(GPT2))
ids = np.zeros(int(sys.argv[1]), np.int64)
begin = time.perf_counter()
last_logits.compile(ids, np.array(0), params, heads=GPT2.heads, residuals=False)
print(time.perf_counter() - begin)
"""


def last_row(ids, params):
    """The reference's logits of the last token alone, and every residual."""
    residuals = []
    forward_without_logits(ids, params, residuals)
    return normalise(residuals[-1][-1:], *params.norm) @ params.words.T, residuals


def forward_without_logits(ids, params, residuals):
    """The blocks of the reference; an empty vocabulary makes its logits free."""
    forward(ids, params._replace(words=Words(params.words)), GPT2.heads, residuals)


class Words:
    """The embedding, whose transpose has no columns."""

    def __init__(self, words):
        self.words, self.T = words, words[:0].T

    def __getitem__(self, ids):
        return self.words[ids]


def compare(model, params, ids):
    """The largest difference of any residual, in units of the tolerance."""
    got = {}
    model(ids, got)
    logits, want = last_row(ids, params)
    worst = 0.0
    for name, ours, theirs in zip(got, got.values(), [*want, logits], strict=True):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            sys.exit(f"{name}: expected {theirs.dtype} {theirs.shape}")
        room = TOLERANCE * (1 + np.abs(theirs))
        worst = max(worst, float(np.max(np.abs(ours - theirs) / room)))
    if not worst <= 1:
        sys.exit(f"residuals differ from NumPy's: {worst:.2g} times the tolerance")
    return worst


def cold(length):
    """Milliseconds to compile in a fresh process, importing MLIR included."""
    folder = __file__.rpartition("/")[0] or "."
    done = subprocess.run([sys.executable, "-c", COLD, str(length), folder], check=True,
                          capture_output=True, text=True)
    return 1e3 * float(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    warn()
    params = make_params(GPT2, random_tensors(GPT2))
    model = FusedModel(GPT2, params)
    print(f"{datetime.date.today()}, {machine()}; Python {platform.python_version()}, "
          f"NumPy {np.__version__}\n")
    print("| tokens | cold compile ms | tinymlir ms | NumPy, last row, ms | NumPy, as written, ms "
          f"| last row / tinymlir | worst difference, of {TOLERANCE:g} |\n" + "|---" * 7 + "|")
    for length in args.lengths:
        ids = np.random.default_rng(length).integers(0, GPT2.vocabulary, length)
        worst = compare(model, params, ids)
        model(ids)
        rows = [(seconds(model, ids), seconds(last_row, ids, params),
                 seconds(forward, ids, params, GPT2.heads)) for _ in range(args.rounds)]
        ours, row, whole = (1e3 * statistics.median(c) for c in zip(*rows, strict=True))
        print(f"| {length} | {cold(length):.0f} | {ours:.1f} | {row:.1f} | {whole:.1f} "
              f"| {row / ours:.2f} | {worst:.2g} |", flush=True)


if __name__ == "__main__":
    main()
