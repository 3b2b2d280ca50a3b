# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Why a matrix product needs a schedule (1)
"""`if` and `for` of the scf dialect, for code that builds kernels (chapter 3)."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mlir import ir
from mlir.dialects import arith, scf

from tinymlir.scalars import index

Build = Callable[[], list[ir.Value] | None]


def either(condition: ir.Value, then: Build, otherwise: Build,
           kinds: Sequence[ir.Type] = ()) -> list[ir.Value]:
    """Build `then() if condition else otherwise()`, with results of these kinds."""
    choice = scf.IfOp(condition, list(kinds), has_else=True)
    for block, build in ((choice.then_block, then), (choice.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.YieldOp(build() or [])
    return list(choice.results)


class loop_over:
    """`with loop_over(start, stop, step) as i:` builds an scf.for."""

    def __init__(self, start: ir.Value, stop: ir.Value, step: ir.Value) -> None:
        self.op = scf.ForOp(start, stop, step)
        self.at = ir.InsertionPoint(self.op.body)

    def __enter__(self) -> ir.Value:
        self.at.__enter__()
        return self.op.induction_variable

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            scf.YieldOp([])
        self.at.__exit__(*error)


def stretches(start: ir.Value, stop: ir.Value, sizes: Sequence[int]
              ) -> Iterator[tuple[ir.Value, ir.Value, int]]:
    """For each size, falling: a start, a stop, and that size as the step between.
    Each takes as many whole steps as fit, the next one what is left."""
    for size in sizes:
        whole = arith.divui(arith.subi(stop, start), index(size))
        middle = arith.addi(start, arith.muli(whole, index(size)))
        yield start, middle, size
        start = middle
