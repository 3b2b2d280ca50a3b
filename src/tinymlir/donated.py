# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § Arguments that are given away (1)
"""Arguments that may be overwritten (chapter 4)."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from tinymlir.errors import ArgumentError
from tinymlir.graph import Graph


def span(array: Any) -> tuple[int, int]:
    """Where the memory of an array begins and ends, here or on a device."""
    here = isinstance(array, np.ndarray)
    start = array.ctypes.data if here else array.address
    return start, start + array.nbytes


def writeable(array: Any) -> bool:
    return (array.flags if isinstance(array, np.ndarray) else array).writeable


def check_donated(graph: Graph, arrays: Sequence[np.ndarray | None]) -> None:
    """Raise ArgumentError if a donated array must not be overwritten."""
    if not graph.donated:
        return
    given = [(i, a) for i, a in enumerate(arrays) if a is not None and a.size]
    reach = {True: (0, ""), False: (0, "")}  # donated? -> how far they go
    for (start, stop), i in sorted((span(array), i) for i, array in given):
        name, mine = graph.names[i], i in graph.donated
        if mine and not writeable(arrays[i]):
            raise ArgumentError(f"{name} is donated, but cannot be written to")
        for theirs in (True, False):
            end, other = reach[theirs]
            if (mine or theirs) and start < end:
                raise ArgumentError(f"{name} and {other} share memory, and one of "
                                    f"them is donated; pass a copy")
        reach[mine] = max(reach[mine], (stop, name))


def check_rest(donated: Sequence[tuple[int, int]], arrays: Sequence[np.ndarray]
               ) -> None:
    """The same for what comes later, given where the donated arrays are."""
    for start, stop in map(span, arrays):
        before = bisect_left(donated, (stop, 0))
        if before and donated[before - 1][1] > start:
            raise ArgumentError("an argument lies in the memory of a donated one; "
                                "pass a copy")
