# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Columns (1)
"""Kernels that reduce columns, and what is too long for a block (chapter 8)."""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, gpu, memref, scf

from tinymlir.expr import rule
from tinymlir.groups import Group, parts_of
from tinymlir.kernels import (
    KERNELS, WARP, Array, Built, Kernel, Numbers, Place, Scope, below, block_id,
    guarded, plus, scaled, split, thread_id)
from tinymlir.maps import THREADS, formulas, vector_lanes
from tinymlir.rows import (
    Layout, Row, combine, is_of_row, over_block, over_warp, single_numbers, start,
    start_type)
from tinymlir.scalars import index


# %% 08_gpu.md § Columns (2)
@dataclass(eq=False)
class Column:
    """Thirty-two columns on their way through a block."""

    scope: Scope
    tall: int  # warps, that share the rows
    number: ir.Value  # of the column

    def __post_init__(self) -> None:
        group = self.scope.group
        outer, self.inner = group.extents[:group.rows], group.extents[group.rows:]
        columns = math.prod(outer)
        self.valid = below(self.number, columns)
        self.number = arith.select(self.valid, self.number, index(columns - 1))
        self.point = split(self.number, outer)[:len(outer)]

    def partial(self, first: ir.Value, last: ir.Value) -> None:
        """What this thread adds up of its column goes to shared memory."""
        member, ty = self.scope.group.reduction, thread_id("y")
        loop = scf.ForOp(plus(first, ty), last, index(self.tall), [start(member)])
        with ir.InsertionPoint(loop.body):
            here = split(loop.induction_variable, self.inner)[:len(self.inner)]
            numbers = Numbers(self.scope, [*self.point, *here], 1)
            scf.YieldOp([numbers.add_to(loop.inner_iter_args[0], member)])
        mine = plus(scaled(ty, WARP), thread_id("x"))
        memref.store(loop.results[0], self.scope.kernel.shared[0], [mine])
        gpu.barrier()

    def total(self) -> ir.Value:
        """The sum of what the threads of a column found."""
        member, (shared, *_) = self.scope.group.reduction, self.scope.kernel.shared
        found = [memref.load(shared, [plus(thread_id("x"), i * WARP)])
                 for i in range(self.tall)]
        return functools.reduce(functools.partial(combine, member), found)

    @property
    def mine(self) -> ir.Value:
        """Is this the thread that writes the total?"""
        top = arith.cmpi(arith.CmpIPredicate.eq, thread_id("y"), index(0))
        return arith.andi(self.valid, top)


# %% 08_gpu.md § Columns (3)
@rule(KERNELS, "column")
def column_kernel(group: Group, places: dict[ir.Value, Place],
                  arrays: Sequence[Array]) -> Built:
    """A reduction along outer loops: 32 neighbouring columns for a block."""
    columns = math.prod(group.extents[:group.rows])
    depth = math.prod(group.extents[group.rows:])
    tall = 32 if depth >= 256 else 8
    shared = [(tall * WARP, str(start_type(group.reduction)))]
    kernel = Kernel(arrays, (WARP, tall, 1), shared)
    with kernel.body:
        number = plus(scaled(block_id("x"), WARP), thread_id("x"))
        column = Column(Scope(group, places, kernel), tall, number)
        column.partial(index(0), index(depth))
        with guarded(column.mine):
            finish(column.scope, column.total(), column.point)
    return Built(kernel, (-(-columns // WARP), 1, 1))


def finish(scope: Scope, total: ir.Value, point: list[ir.Value]) -> None:
    """Compute what follows of a total, and store it."""
    group = scope.group
    scope.rows[group.reduction.result] = total
    single = single_numbers(scope, point)
    for member in group.members:
        if is_of_row(member, group) and member is not group.reduction:
            (scope.rows[member.result],) = single.run(member)
    for value in scope.rows:
        if value in scope.places:
            single.store(value)


# %% 08_gpu.md § Totals of many blocks (1)
@rule(KERNELS, "parts of a row")
def row_parts(group: Group, places: dict[ir.Value, Place], arrays: Sequence[Array]
              ) -> Built:
    """A block for each part of a row; its total goes to the last of the arrays."""
    inner, outer = group.extents[group.rows:], group.extents[:group.rows]
    lanes = vector_lanes(inner, formulas(group, places))
    inner = [*inner[:-1], inner[-1] // lanes]
    vectors, parts = math.prod(inner), parts_of(group)
    lay = Layout(lanes, THREADS, -(-vectors // (THREADS * parts)), 1)
    warps = THREADS // WARP
    shared = [(warps, str(start_type(group.reduction)))]
    kernel = Kernel(arrays, (THREADS, 1, 1), shared)
    with kernel.body:
        *where, part = split(block_id("x"), [*outer, parts])
        scope = Scope(group, places, kernel)
        first = scaled(part, THREADS * lay.turns)
        row = Row(scope, lay, vectors, inner, where, first, parts)
        mine = row.partial(group.reduction)
        total = over_block(group.reduction, mine, warps, kernel.shared[0])
        row.write([m.result for m in group.members if m.result in places
                   and not m.is_reduction and not is_of_row(m, group)], None)
        lead = arith.cmpi(arith.CmpIPredicate.eq, thread_id("x"), index(0))
        with guarded(lead):
            memref.store(total, kernel.pointers[id(arrays[-1])], [block_id("x")])
    return Built(kernel, (math.prod(outer) * parts, 1, 1))


# %% 08_gpu.md § Totals of many blocks (2)
@rule(KERNELS, "parts of a column")
def column_parts(group: Group, places: dict[ir.Value, Place],
                 arrays: Sequence[Array]) -> Built:
    """A block for each part of 32 columns; the totals go to the last array."""
    columns = math.prod(group.extents[:group.rows])
    depth, parts = math.prod(group.extents[group.rows:]), parts_of(group)
    tall, share = 8, -(-depth // parts)
    shared = [(tall * WARP, str(start_type(group.reduction)))]
    kernel = Kernel(arrays, (WARP, tall, 1), shared)
    with kernel.body:
        block, part = split(block_id("x"), [-(-columns // WARP), parts])
        number = plus(scaled(block, WARP), thread_id("x"))
        column = Column(Scope(group, places, kernel), tall, number)
        first = scaled(part, share)
        column.partial(first, arith.minui(plus(first, share), index(depth)))
        with guarded(column.mine):
            place = plus(scaled(column.number, parts), part)
            memref.store(column.total(), kernel.pointers[id(arrays[-1])], [place])
    return Built(kernel, (-(-columns // WARP) * parts, 1, 1))


@rule(KERNELS, "total")
def total_kernel(group: Group, places: dict[ir.Value, Place],
                 arrays: Sequence[Array]) -> Built:
    """A warp for each result: the total of all parts, and what follows of it."""
    outer, parts, lines = group.extents[:group.rows], parts_of(group), 4
    rows, member = math.prod(outer), group.reduction
    kernel = Kernel(arrays, (WARP, lines, 1))
    with kernel.body:
        number = plus(scaled(block_id("x"), lines), thread_id("y"))
        valid = below(number, rows)
        number = arith.select(valid, number, index(rows - 1))
        first = plus(scaled(number, parts), thread_id("x"))
        pointer = kernel.pointers[id(arrays[-1])]
        found = [memref.load(pointer, [plus(first, i)])
                 for i in range(0, parts, WARP)]
        total = functools.reduce(functools.partial(combine, member), found)
        total = over_warp(member, total)
        lead = arith.cmpi(arith.CmpIPredicate.eq, thread_id("x"), index(0))
        with guarded(arith.andi(valid, lead)):
            scope = Scope(group, places, kernel)
            finish(scope, total, split(number, outer)[:len(outer)])
    return Built(kernel, (-(-rows // lines), 1, 1))
