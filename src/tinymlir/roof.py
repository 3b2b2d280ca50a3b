# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § Under the roof (1)
"""How fast a machine can read and compute: its roofline (chapter 4)."""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinymlir import threads
from tinymlir.costs import Cost
from tinymlir.errors import ArgumentError


@dataclass(frozen=True)
class Roof:
    """GB/s from memory, GFLOP/s in float64 and in float32, and who says so.

    Raises ArgumentError for a number that is not positive."""

    read: float
    double: float
    single: float
    source: str = "as stated"

    def __post_init__(self) -> None:
        for name in ("read", "double", "single"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ArgumentError(f"{name}: expected a rate above 0, got {value}")

    def peak(self, cost: Cost) -> float:
        """GFLOP/s in the type that a kernel computes."""
        wide = cost.types[-1:] in [("f64",), ("i64",)]
        return self.double if wide else self.single

    def limit(self, cost: Cost) -> str:
        """What the kernel waits for at best: "memory" or "arithmetic"."""
        if cost.bytes != cost.bytes or cost.flops != cost.flops:
            return "?"
        edge = self.peak(cost) / self.read
        return "memory" if cost.intensity < edge else "arithmetic"

    def seconds(self, cost: Cost) -> float:
        """The least time that one run can take."""
        return max(cost.bytes / self.read, cost.flops / self.peak(cost)) * 1e-9


# %% 04_jit.md § Under the roof (2)
ROUNDS, LONG, SIDE = 5, 1 << 24, 768  # tries, numbers in the array, of a matrix


def quickest(function: Callable, *args: np.ndarray) -> float:
    """Seconds of the best of some calls, the first of which compiles."""
    taken = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        function(*args)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def measure() -> Roof:
    """This machine, now, with as many threads as compiled code uses."""
    from tinymlir.jit import jit
    rows = np.ones((64, LONG // 64), np.int64)
    read = rows.nbytes / quickest(jit(lambda x: np.sum(x, axis=-1)), rows)
    multiply, rates = jit(np.matmul), []
    for kind in (np.float64, np.float32):
        square = np.ones((SIDE, SIDE), kind)
        rates.append(2 * SIDE**3 / quickest(multiply, square, square) / 1e9)
    told = f"measured just now, {threads.count()} threads"
    return Roof(read / 1e9, *rates, told)


stated: list[Roof] = []  # the last one holds


def state(roof: Roof) -> None:
    """Use these numbers from now on."""
    stated.append(roof)


def roof() -> Roof:
    """What was stated, else what was measured in this process."""
    if not stated:
        state(measure())
    return stated[-1]
