# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Rows (1)
"""Kernels for reductions: rows and columns (chapter 8)."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, gpu, memref, scf

from tinymlir.expr import rule
from tinymlir.groups import PRODUCTS, Group, Member, number_of
from tinymlir.kernels import (
    KERNELS, WARP, Array, Built, Kernel, Numbers, Place, Scope, below, block_id,
    both, constant, guarded, plus, scaled, split, thread_id)
from tinymlir.lanes import add
from tinymlir.maps import formulas, vector_lanes
from tinymlir.scalars import index


# %% 08_gpu.md § Rows (2)
def start(member: Member) -> ir.Value:
    """The number that a reduction begins with, and that changes nothing."""
    return constant(number_of(list(member.op.operands)[-1]))


def combine(member: Member, x: ir.Value, y: ir.Value) -> ir.Value:
    """Two partial results of a reduction as one: its own operation, once more."""
    if member.op.name in PRODUCTS:
        return add(x, y)
    block = member.op.regions[0].blocks[0]
    (use,) = block.arguments[len(member.reads)].uses
    if use.owner.name != "arith.cmpi":
        return again(use.owner, x, y)
    zero = arith.constant(x.type, 0)  # booleans are bytes in memory
    bits = [arith.cmpi(arith.CmpIPredicate.ne, v, zero) for v in (x, y)]
    (inner,) = use.owner.results[0].uses
    return arith.extui(x.type, again(inner.owner, *bits))


def again(op: ir.Operation, x: ir.Value, y: ir.Value) -> ir.Value:
    """The operation on other numbers; one that was folded away changes nothing."""
    if len(op.operands) != 2:
        return x
    new = op.operation.clone()
    new.operands[0], new.operands[1] = x, y
    return new.results[0]


# %% 08_gpu.md § Rows (3)
def shuffled(x: ir.Value, distance: int) -> ir.Value:
    """x of the thread whose number in the warp differs in this bit."""
    word = ir.IntegerType.get_signless(32)
    narrow = x.type == ir.IntegerType.get_signless(8)
    given = arith.extui(word, x) if narrow else x
    numbers = [arith.constant(word, n) for n in (distance, WARP)]
    other, _ = gpu.shuffle(given, *numbers, gpu.ShuffleMode.XOR)
    return arith.trunci(x.type, other) if narrow else other


def over_warp(member: Member, x: ir.Value, width: int = WARP) -> ir.Value:
    """The total of all threads of a warp, in every one of them."""
    while width > 1:
        width //= 2
        x = combine(member, x, shuffled(x, width))
    return x


def over_block(member: Member, x: ir.Value, warps: int, shared: ir.Value
               ) -> ir.Value:
    """The total of all threads of a block, in every one of them."""
    x = over_warp(member, x)
    lane = arith.remui(thread_id("x"), index(WARP))
    first = arith.cmpi(arith.CmpIPredicate.eq, lane, index(0))
    with guarded(first):
        memref.store(x, shared, [arith.divui(thread_id("x"), index(WARP))])
    gpu.barrier()
    x = memref.load(shared, [arith.remui(lane, index(warps))])
    return over_warp(member, x, warps)


# %% 08_gpu.md § One pass over memory (1)
IN_REGISTERS = 32  # numbers of a row that a thread may hold


@dataclass(frozen=True)
class Layout:
    """How a row is spread: thread t has vectors t, t + threads, and so on."""

    lanes: int
    threads: int
    turns: int
    rows: int  # of a block: more than one if a warp has a row to itself

    @property
    def in_registers(self) -> bool:
        return self.lanes * self.turns <= IN_REGISTERS


def layout(columns: int, lanes: int) -> Layout:
    """As few idle threads as can be, and not many turns."""
    vectors = columns // lanes
    choices = []
    for threads in (32, 64, 128, 256, 512, 1024):
        turns = -(-vectors // threads)
        choices.append((turns > 4, turns * threads - vectors, threads, turns))
    many, _, threads, turns = min(choices)
    if many:
        threads, turns = 1024, -(-vectors // 1024)
    return Layout(lanes, threads, turns, 4 if threads == WARP else 1)


# %% 08_gpu.md § One pass over memory (2)
@dataclass(eq=False)
class Row:
    """A row on its way through a block."""

    scope: Scope
    layout: Layout
    columns: int  # vectors in a row
    inner: Sequence[int]  # extents of the loops along a row
    outer: list[ir.Value]  # where the row is
    first: ir.Value | int = 0  # vector, if this block has only a part of the row
    parts: int = 1

    def numbers(self, turn: int | ir.Value) -> Numbers:
        """This thread's part of the row in one of the turns."""
        n = self.layout.threads
        step = turn * n if isinstance(turn, int) else scaled(turn, n)
        number = plus(thread_id("x"), step, self.first)
        every = n * self.layout.turns * self.parts == self.columns
        whole = isinstance(turn, int) and self.parts == 1
        never_beyond = whole and (turn + 1) * n <= self.columns
        valid = None if every or never_beyond else below(number, self.columns)
        if valid is not None:
            number = arith.select(valid, number, index(self.columns - 1))
        point = split(number, self.inner)[:len(self.inner)]
        if point:
            point[-1] = scaled(point[-1], self.layout.lanes)
        return Numbers(self.scope, [*self.outer, *point], self.layout.lanes, valid)

    def __post_init__(self) -> None:
        turns = range(self.layout.turns) if self.layout.in_registers else ()
        self.kept = [self.numbers(turn) for turn in turns]

    def partial(self, member: Member) -> ir.Value:
        """What this thread contributes to a reduction."""
        total = start(member)
        for numbers in self.kept:
            total = numbers.add_to(total, member)
        if self.kept:
            return total
        loop = scf.ForOp(index(0), index(self.layout.turns), index(1), [total])
        with ir.InsertionPoint(loop.body):
            numbers = self.numbers(loop.induction_variable)
            scf.YieldOp([numbers.add_to(loop.inner_iter_args[0], member)])
        return loop.results[0]

    def write(self, values: Sequence[ir.Value], valid: ir.Value | None) -> None:
        """Store results that have a number for each point of the row."""
        def write_one(numbers: Numbers) -> None:
            for value in values:
                numbers.of(value, self.scope.group.maker(value).writes,
                           self.scope.group.maker(value))
            with guarded(both(valid, numbers.valid)):
                for value in values:
                    numbers.store(value)

        for numbers in self.kept:
            write_one(numbers)
        if not self.kept and values:
            loop = scf.ForOp(index(0), index(self.layout.turns), index(1))
            with ir.InsertionPoint(loop.body):
                write_one(self.numbers(loop.induction_variable))
                scf.YieldOp([])


# %% 08_gpu.md § One pass over memory (3)
@rule(KERNELS, "row")
def row_kernel(group: Group, places: dict[ir.Value, Place], arrays: Sequence[Array]
               ) -> Built:
    """A block a row, or a warp a row if rows are short; memory is read once."""
    inner, outer = group.extents[group.rows:], group.extents[:group.rows]
    lanes = vector_lanes(inner, formulas(group, places))
    inner = [*inner[:-1], inner[-1] // lanes] if inner else []
    lay = layout(math.prod(inner) * lanes, lanes)
    reductions = [m for m in group.members if m.is_reduction]
    warps = lay.threads // WARP
    shared = [(warps, str(start_type(m))) for m in reductions] if warps > 1 else []
    kernel = Kernel(arrays, (lay.threads, lay.rows, 1), shared)
    rows = math.prod(outer)
    with kernel.body:
        number = plus(scaled(block_id("x"), lay.rows),
                      thread_id("y") if lay.rows > 1 else 0)
        valid = below(number, rows) if rows % lay.rows else None
        if valid is not None:
            number = arith.select(valid, number, index(rows - 1))
        scope, where = Scope(group, places, kernel), split(number, outer)
        row = Row(scope, lay, math.prod(inner), inner, where[:len(outer)])
        reduce_all(row, warps)
        write_all(row, valid)
    return Built(kernel, (-(-rows // lay.rows), 1, 1))


def start_type(member: Member) -> ir.Type:
    return number_of(list(member.op.operands)[-1]).type


# %% 08_gpu.md § One pass over memory (4)
def reduce_all(row: Row, warps: int) -> None:
    """Every member that has one number for a row, in order."""
    scope, shared = row.scope, iter(row.scope.kernel.shared)
    single = single_numbers(scope, row.outer)
    for member in scope.group.members:
        if member.is_reduction:
            part = row.partial(member)
            total = (over_block(member, part, warps, next(shared)) if warps > 1
                     else over_warp(member, part))
            scope.rows[member.result] = total
        elif is_of_row(member, scope.group):
            (scope.rows[member.result],) = single.run(member)


def single_numbers(scope: Scope, row: Sequence[ir.Value]) -> Numbers:
    """The numbers that a row has one of."""
    inner = len(scope.group.extents) - len(row)
    return Numbers(scope, [*row, *(index(0) for _ in range(inner))], 1)


def is_of_row(member: Member, group: Group) -> bool:
    """Does the member have one number for a row?"""
    free = [i for i, n in zip(member.order[group.rows:], group.extents[group.rows:])
            if n > 1]
    return bool(free) and all(i is None for i in free)


def write_all(row: Row, valid: ir.Value | None) -> None:
    scope = row.scope
    wanted = [m.result for m in scope.group.members if m.result in scope.places]
    row.write([v for v in wanted if v not in scope.rows], valid)
    single = single_numbers(scope, row.outer)
    first = arith.cmpi(arith.CmpIPredicate.eq, thread_id("x"), index(0))
    rows = [v for v in wanted if v in scope.rows]
    if rows:
        with guarded(both(valid, first)):
            for value in rows:
                single.store(value)
