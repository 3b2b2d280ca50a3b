"""GPT-2 (124M, random weights), one compiled function a sublayer, against NumPy.

    python benchmarks/per_sublayer.py [--lengths 16 64] [--rounds 9]

Both sides run the same Python functions on the same arrays in the same process, in turns.
Correctness comes first: no time is taken of a residual that differs from NumPy's.
NumPy is measured twice, with all threads of its BLAS and with one, and the ratio is to
the better of them. Not here: PyTorch, other models.
"""
import argparse
import contextlib
import datetime
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tinymlir.checkpoint import PAIRS, Block, Config, Params, tensor_shapes
from tinymlir.model import COMPILED, PLAIN, Model
from tinymlir.ops import LayerNorm

os.environ["TINYMLIR_CACHE"] = "off"  # compiling is measured, so it has to happen
GPT2 = Config(blocks=12, width=768, heads=12, context=1024, vocabulary=50257, end=50256)
TOLERANCE = 3e-4
MISLEADING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


# ---------------------------------------------------------------- random weights

def random_tensors(config, seed=0):
    """Every tensor of the file format, normal with standard deviation 0.02."""
    dice = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config):
        tensors[name] = dice.standard_normal(shape, np.float32) * np.float32(0.02)
        if re.search(r"ln_\w\.weight", name):
            tensors[name] += 1
    return tensors


def make_params(config, t):
    """The tensors as a model takes them."""
    blocks = tuple(Block(*(kind(t[f"h.{i}.{name}.weight"], t[f"h.{i}.{name}.bias"])
                           for name, kind, _ in PAIRS)) for i in range(config.blocks))
    return Params(t["wte.weight"], t["wpe.weight"], blocks,
                  LayerNorm(t["ln_f.weight"], t["ln_f.bias"]))


def write_checkpoint(folder, config, tensors):
    """The three files, with a tokenizer that knows bytes and many tokens that never occur."""
    import json

    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "n_layer": config.blocks, "n_embd": config.width,
        "n_head": config.heads, "n_positions": config.context,
        "vocab_size": config.vocabulary, "eos_token_id": config.end}))
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<{i}>" for i in range(config.vocabulary - len(names))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


# ---------------------------------------------------------------- measuring

def seconds(function, *args):
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin


def check(compiled, plain, ids):
    """The largest difference of any residual, in units of the tolerance; at most 1."""
    got, want = {}, {}
    compiled(ids, got)
    plain(ids, want)
    worst = 0.0
    for name in want:
        if got[name].dtype != want[name].dtype:
            sys.exit(f"{name}: expected {want[name].dtype}, got {got[name].dtype}")
        room = TOLERANCE * (1 + np.abs(want[name]))
        worst = max(worst, float(np.max(np.abs(got[name] - want[name]) / room)))
    if not worst <= 1:
        sys.exit(f"residuals differ from NumPy's: {worst:.2g} times the tolerance")
    return worst


def one_thread():
    """A context in which NumPy's BLAS keeps to one thread, if threadpoolctl is there."""
    with contextlib.suppress(ImportError):
        from threadpoolctl import threadpool_limits
        return threadpool_limits(1)
    return contextlib.nullcontext()


def forward(compiled, plain, length, rounds):
    """Of a row of the table: the three medians in ms, and the worst difference."""
    ids = np.random.default_rng(length).integers(0, GPT2.vocabulary, length)
    worst = check(compiled, plain, ids)
    rows = []
    for _ in range(rounds):
        times = [seconds(compiled, ids), seconds(plain, ids)]
        with one_thread():
            rows.append([*times, seconds(plain, ids)])
    return *(1e3 * statistics.median(column) for column in zip(*rows, strict=True)), worst


def compile_cost(compiled, length, rounds=5):
    """Milliseconds that the first call with a new length takes longer than the next ones."""
    ids = np.random.default_rng(length).integers(0, GPT2.vocabulary, length)
    first = seconds(compiled, ids)
    return 1e3 * (first - statistics.median(seconds(compiled, ids) for _ in range(rounds)))


GENERATE = """
import resource, sys
from tinymlir import generate, load_model
generate(*load_model(sys.argv[1]), "Alan Turing theorized that computers", 10)
unit = 1 if sys.platform == "darwin" else 1024
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
"""
IMPORT = """
import time
begin = time.perf_counter()
import tinymlir
print(time.perf_counter() - begin)
"""


def child(code, *args):
    """A number that a fresh Python prints last."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], check=True,
                          capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def peak_memory(tensors):
    """GB that a process needs at most to load the checkpoint and add ten tokens."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), GPT2, tensors)
        return child(GENERATE, folder) / 1e9


def import_time(rounds=7):
    return 1e3 * statistics.median(child(IMPORT) for _ in range(rounds))


# ---------------------------------------------------------------- the report

def machine():
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*: (.*)", info.read_text())
        name = found[1] if found else name
    return f"{name}, {os.cpu_count()} cores"


def warn():
    for name in MISLEADING:
        if name in os.environ:
            print(f"note: {name} is set, which slows NumPy down; unset it", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new", type=int, default=33, help="a length not yet compiled")
    parser.add_argument("--forward-only", action="store_true")
    args = parser.parse_args()
    warn()
    tensors = random_tensors(GPT2)
    params = make_params(GPT2, tensors)
    compiled, plain = Model(GPT2, params, COMPILED), Model(GPT2, params, PLAIN)
    print(f"{datetime.date.today()}, {machine()}; Python {platform.python_version()}, "
          f"NumPy {np.__version__}\n")
    print("| tokens | tinymlir ms | NumPy ms | NumPy, 1 thread, ms | best NumPy / tinymlir "
          f"| worst difference, of {TOLERANCE:g} |\n|---|---|---|---|---|---|")
    for length in args.lengths:
        ours, threads, single, worst = forward(compiled, plain, length, args.rounds)
        print(f"| {length} | {ours:.1f} | {threads:.1f} | {single:.1f} "
              f"| {min(threads, single) / ours:.2f} | {worst:.2g} |", flush=True)
    if args.forward_only:
        return
    print(f"\ncompiling for a new length ({args.new}): {compile_cost(compiled, args.new):.0f} ms")
    print(f"peak memory of generate: {peak_memory(tensors):.2f} GB")
    print(f"import tinymlir: {import_time():.0f} ms")


if __name__ == "__main__":
    main()
