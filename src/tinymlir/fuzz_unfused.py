# Tangled from notebooks/90_fuzz.md: edit the chapter, not this file.

# %% 90_fuzz.md § Without fusion (1)
"""A target of `jit` that fuses nothing (appendix on fuzzing)."""
from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tinymlir import native
from tinymlir.compiler import Native, context, mlir_lock, packed, product, take
from tinymlir.graph import Graph

__all__ = ["load", "take", "texts"]


def lower(graph: Graph, keep: bool = False) -> tuple[str, Any]:
    """LLVM's text for a graph, and the work record, without the steps of fusion."""
    with mlir_lock, context():
        from tinymlir import passes
        from tinymlir.builder import build
        stages = tuple(replace(s, steps=() if s.name == "fused" else s.steps)
                       for s in passes.CPU)
        work = passes.Work(build(graph), native.host().vector_bits)
        passes.run_stages(work, stages, keep)
        return passes.to_llvm(work.module), work


class Unfused(Native):
    """A compiled graph whose operations are loops of their own."""

    def __init__(self, graph: Graph) -> None:
        text, work = lower(graph)
        count = len(graph.arguments) + len(graph.returned)
        self.libraries = {k.symbol: product(k.symbol, tuple(vars(k).values()))
                          for k in work.kernels}
        symbols = {name: lib.result().address(name)
                   for name, lib in self.libraries.items()}
        self.code = native.Code(native.generate(text + packed(count)), symbols)
        self.captured = [node.attrs["value"] for node in graph.arrays]
        self.types = [(node.shape, node.dtype) for node in graph.results]
        self.pointers = ctypes.c_void_p * count
        kind = ctypes.CFUNCTYPE(None, self.pointers)
        self.function = kind(self.code.address("packed"))


load = Unfused


def texts(graph: Graph) -> Mapping[str, str]:
    """Stage name -> text, in order."""
    low, work = lower(graph, keep=True)
    return {"graph": str(graph), **work.texts, "llvm": low}
