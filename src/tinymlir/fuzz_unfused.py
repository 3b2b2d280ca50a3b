# Tangled from notebooks/90_fuzz.md: edit the chapter, not this file.

# %% 90_fuzz.md § Without fusion (1)
"""A target of `jit` that fuses nothing (appendix on fuzzing)."""
from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tinymlir import compiler, passes, store
from tinymlir.calls import find
from tinymlir.compiler import take
from tinymlir.graph import Graph
from tinymlir.loops import sequential

__all__ = ["load", "take", "texts"]
one_at_a_time = threading.RLock()


def one_thread(work: passes.Work) -> None:
    """Loops over a stack of matrices run one after the other."""
    for op in find(work.module, "scf.parallel"):
        sequential(op, keep=0)


def stages() -> tuple[passes.Stage, ...]:
    """The stages of chapter 3 without fusion: a loop nest for each operation."""
    known = {stage.name: stage for stage in passes.CPU}
    plain = (passes.products, "func.func(convert-linalg-to-loops),canonicalize,cse",
             one_thread, passes.functions)
    return (known["linalg"], known["bufferized"], passes.Stage("scheduled", plain),
            known["lowered"])


@contextmanager
def in_force() -> Iterator[None]:
    with (one_at_a_time, mock.patch.object(passes, "CPU", stages()),
          mock.patch.object(store, "folder", lambda: None)):
        yield


def load(graph: Graph) -> Any:
    """The compiled graph."""
    with in_force():
        return compiler.load(graph)


def texts(graph: Graph) -> Mapping[str, str]:
    """Stage name -> text, in order."""
    with in_force():
        return compiler.texts(graph)
