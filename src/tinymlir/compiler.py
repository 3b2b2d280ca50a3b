# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § From a graph to a function (1)
"""From a graph to native code (chapter 4)."""
from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy as np

from tinymlir import native, pool, store, threads
from tinymlir.errors import CompileError, DTypeError, UnsupportedError
from tinymlir.expr import supported
from tinymlir.graph import Graph

RULES: list[str] = []  # modules of later chapters with more rules for MLIR
IN_PLACE = True  # this target can write to arguments that were donated

mlir_lock = threading.RLock()
atexit.register(mlir_lock.acquire)  # Python may end; nobody may be inside MLIR then


@functools.cache
def context() -> Any:
    """The MLIR context of this process. Importing MLIR waits until here."""
    from mlir import ir
    shared = ir.Context()
    shared.enable_multithreading(False)  # one thread is quicker for small modules
    return shared


def begin(graph: Graph) -> Any:
    """The work record of a graph, before its first step; in the context."""
    from tinymlir import passes
    from tinymlir.builder import build
    for name in RULES:
        import_module(name)
    place = {id(x): i for i, x in enumerate(graph.arguments)}
    return passes.Work(
        build(graph), native.host().vector_bits, threads.count() > 1,
        tuple(place[id(graph.inputs[i])] for i in graph.in_place.values()))


def lower(graph: Graph, keep: bool = False) -> tuple[str, Any]:
    """LLVM's text for a graph, and the work record of its stages."""
    with mlir_lock, context():
        from tinymlir import passes
        work = passes.run_stages(begin(graph), passes.CPU, keep)
        return passes.to_llvm(work.module), work


# %% 04_jit.md § From a graph to a function (2)
def compiled_library(fields: tuple) -> bytes:
    """The object file of one of the matrix products of chapter 3."""
    with mlir_lock, context():
        from tinymlir import passes
        from tinymlir.library import library
        from tinymlir.schedule import Kernel
        module = library(Kernel(*fields))
        passes.run_pipeline(module, passes.LOWER_LIBRARY)
        text = passes.to_llvm(module)
    return native.generate(text)


def library_code(fields: tuple) -> native.Code:
    """A matrix product, from disk or compiled now."""
    key = store.key_of(repr(fields))
    kept = store.read(key)
    if kept is None:
        kept = [], compiled_library(fields)
        store.write(key, *kept)
    return native.Code(kept[1], threads.symbols() | pool.symbols())


# %% 04_jit.md § From a graph to a function (3)
def packed(count: int) -> str:
    """LLVM's text of a function that takes the addresses as one array."""
    lines, names = [], [f"%a{i}" for i in range(count)]
    for i, name in enumerate(names):
        lines += [f"  %p{i} = getelementptr ptr, ptr %all, i64 {i}",
                  f"  {name} = load ptr, ptr %p{i}"]
    given = ", ".join(f"ptr {name}" for name in names)
    return "\n".join(["define void @packed(ptr %all) {", *lines,
                      f"  call void @main({given})", "  ret void", "}"])


# %% 04_jit.md § From a graph to a function (4)
def check_arguments(text: str, count: int) -> None:
    """Raise CompileError unless LLVM's @main takes so many addresses."""
    head = re.search(r"^define void @main\((.*)\)", text, re.MULTILINE)
    found = len(re.findall(r"\bptr\b", head[1])) if head else None
    if found != count:
        raise CompileError(f"the code takes {found} addresses instead of {count}")


# %% 04_jit.md § From a graph to a function (5)
products: dict[str, Future] = {}
products_lock = threading.Lock()


@functools.cache
def workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="tinymlir")


if hasattr(os, "register_at_fork"):  # a forked process has no such threads
    os.register_at_fork(after_in_child=workers.cache_clear)


def product(symbol: str, fields: tuple) -> Future:
    """A product that is being made, or has been; the first who asks starts it."""
    with products_lock:
        if symbol not in products:
            products[symbol] = workers().submit(library_code, fields)
        return products[symbol]


# %% 04_jit.md § From a graph to a function (6)
def compiled_graph(graph: Graph) -> tuple[list[Any], bytes]:
    """The kernels that a graph calls, and its object file."""
    text, work = lower(graph)
    count = len(graph.arguments) + len(graph.returned)
    check_arguments(text, count)
    text += packed(count)
    kernels = sorted((k.symbol, tuple(vars(k).values())) for k in work.kernels)
    for symbol, fields in kernels:
        product(symbol, fields)  # under way while this thread goes on
    return kernels, native.generate(text)


def load_code(graph: Graph) -> tuple[native.Code, list[native.Code]]:
    """The code of a graph, and the products that must stay alive with it."""
    key = store.key_of(f"{threads.count() > 1} {store.fingerprint(graph)}")
    found = store.read(key)
    kernels, code = found or compiled_graph(graph)
    loaded = {symbol: product(symbol, tuple_of(fields)).result()
              for symbol, fields in kernels}
    if not found:
        store.write(key, kernels, code)
        give_back()
    symbols = {symbol: lib.address(symbol) for symbol, lib in loaded.items()}
    symbols |= threads.symbols() | pool.symbols()
    return native.Code(code, symbols), list(loaded.values())


def give_back() -> None:
    """Memory that the compilers took goes back to the system, where that can be."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim:
            trim(0)


def tuple_of(value: Any) -> Any:
    """Lists as tuples, all the way down: JSON has no tuples."""
    many = isinstance(value, (list, tuple))
    return tuple(map(tuple_of, value)) if many else value


def texts(graph: Graph) -> Mapping[str, str]:
    """Stage name -> text, in order. Compiles once more, printing as it goes."""
    low, work = lower(graph, keep=True)
    assembly = native.generate(low, native.ASSEMBLY).decode()
    return {"graph": str(graph), **work.texts, "llvm": low, "asm": assembly}


# %% 04_jit.md § Memory (1)
def ready(array: Any, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Is it an array of this kind that native code can read where it lies?"""
    return (type(array) is np.ndarray and array.shape == shape
            and array.dtype == dtype and array.flags.c_contiguous
            and array.flags.aligned)


def take(array: Any, path: str) -> np.ndarray:
    """The array as plain memory. Raises DTypeError or UnsupportedError."""
    if isinstance(array, np.ndarray) and type(array) not in (np.ndarray, np.memmap):
        raise UnsupportedError(f"{path} is a {type(array).__name__}, a subclass of "
                               f"ndarray with rules of its own; pass np.asarray(x)")
    try:
        dtype = supported(array.dtype)
    except DTypeError as error:
        raise DTypeError(f"{path}: {error}") from None
    if ready(array, array.shape, dtype):
        return array
    plain = np.asarray(array, dtype, order="C")
    return plain if plain.flags.aligned else plain.copy()


# %% 04_jit.md § Memory (2)
def merged(kept: Sequence[Any], rest: Iterable[Any]) -> list[Any]:
    """The arrays that are kept, and the others in the places of None."""
    others = iter(rest)
    return [next(others) if array is None else array for array in kept]


class Native:
    """A compiled graph on this processor."""

    def __init__(self, graph: Graph) -> None:
        self.code, self.libraries = load_code(graph)
        self.captured = [node.attrs["value"] for node in graph.arrays]
        self.in_place = graph.in_place
        self.types = [None if i in self.in_place else (x.shape, x.dtype)
                      for i, x in enumerate(graph.results)]
        slots = itertools.count()  # arrays without elements have no slot
        self.given = [next(slots) if x.size else None
                      for x in (*graph.inputs, *graph.arrays)]
        self.made = [next(slots) if x.size and kind else None
                     for x, kind in zip(graph.results, self.types)]
        self.pointers = ctypes.c_void_p * next(slots)
        kind = ctypes.CFUNCTYPE(None, self.pointers)
        self.function = kind(self.code.address("packed"))
        self.unbound = self.pack([None] * len(graph.inputs))

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on plain arrays of the right types; the results are fresh arrays."""
        return self.run(*self.unbound, arrays)

    def bind(self, arrays: Sequence[np.ndarray | None]) -> Callable[..., list]:
        """A function of the arrays that are None here; the others are kept."""
        return functools.partial(self.run, *self.pack(arrays))

    def pack(self, arrays: Sequence[np.ndarray | None]) -> tuple:
        """The arrays, a template of addresses, and the slots that are open."""
        template = self.pointers()
        for slot, array in zip(self.given, (*arrays, *self.captured)):
            if slot is not None and array is not None:
                template[slot] = array.ctypes.data
        open_ = [slot for slot, array in zip(self.given, arrays) if array is None]
        return arrays, template, [*open_, *self.made]

    def run(self, kept: Sequence[Any], template: Any, slots: Sequence[int | None],
            arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Fill the slots with the arrays and new results, and call."""
        made = [kind and np.empty(*kind) for kind in self.types]
        pointers = self.pointers.from_buffer_copy(template)
        for slot, array in zip(slots, (*arrays, *made)):
            if slot is not None:
                pointers[slot] = array.ctypes.data
        self.function(pointers)
        if self.in_place:
            whole = merged(kept, arrays)
            for result, i in self.in_place.items():
                made[result] = whole[i]
        return made


load = Native
