# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § From a graph to a function (1)
"""From a graph to native code (chapter 4)."""
from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

from tinymlir import native, store
from tinymlir.graph import Graph

mlir_lock, library_lock = threading.RLock(), threading.RLock()


@functools.lru_cache(maxsize=None)
def context() -> Any:
    """The MLIR context of this process. Importing MLIR waits until here."""
    from mlir import ir
    shared = ir.Context()
    shared.enable_multithreading(False)  # one thread is quicker for small modules
    return shared


def lower(graph: Graph, keep: bool = False) -> tuple[str, Any]:
    """LLVM's text for a graph, and the work record of its stages."""
    with mlir_lock, context():
        from tinymlir import passes
        from tinymlir.builder import build
        work = passes.Work(build(graph), native.host().vector_bits)
        passes.run_stages(work, passes.CPU, keep)
        return passes.to_llvm(work.module), work


# %% 04_jit.md § From a graph to a function (2)
def compiled_library(fields: tuple) -> bytes:
    """The object file of one of the matrix products of chapter 3."""
    with mlir_lock, context():
        from tinymlir import passes
        from tinymlir.schedule import Kernel, library
        module = library(Kernel(*fields))
        passes.run_pipeline(module, passes.LOWER_LIBRARY)
        text = passes.to_llvm(module)
    return native.generate(text)


@functools.lru_cache(maxsize=None)
def library_code(symbol: str, fields: tuple) -> native.Code:
    """A matrix product, from disk or compiled the first time it is needed."""
    key = store.key_of(repr(fields))
    kept = store.read(key)
    if kept is None:
        kept = [], compiled_library(fields)
        store.write(key, *kept)
    return native.Code(kept[1])


def compiled_graph(graph: Graph) -> tuple[list[Any], bytes]:
    """The kernels that a graph calls, and its object file."""
    text, work = lower(graph)
    kernels = sorted((k.symbol, tuple(vars(k).values())) for k in work.kernels)
    return kernels, native.generate(text)


# %% 04_jit.md § From a graph to a function (3)
def load(graph: Graph) -> tuple[native.Code, list[native.Code]]:
    """The code of a graph, and the products that must stay alive with it."""
    key = store.key_of(store.fingerprint(graph))
    kept = store.read(key)
    if kept is None:
        kept = compiled_graph(graph)
        store.write(key, *kept)
    kernels, code = kept
    with library_lock:
        loaded = {symbol: library_code(symbol, tuple_of(fields))
                  for symbol, fields in kernels}
    symbols = {symbol: library.address(symbol) for symbol, library in loaded.items()}
    return native.Code(code, symbols), list(loaded.values())


def tuple_of(value: Any) -> Any:
    """Lists as tuples, all the way down: JSON has no tuples."""
    return tuple(map(tuple_of, value)) if isinstance(value, (list, tuple)) else value


def texts(graph: Graph) -> Mapping[str, str]:
    """Stage name -> text, in order. Compiles once more, printing as it goes."""
    low, work = lower(graph, keep=True)
    assembly = native.generate(low, native.ASSEMBLY).decode()
    return {"graph": str(graph), **work.texts, "llvm": low, "asm": assembly}
