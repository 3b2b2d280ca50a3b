# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § The kernel (1)
"""Kernels for matrix products: tiles in shared memory and registers (chapter 8)."""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, gpu, scf, vector

from tinymlir.expr import rule
from tinymlir.factors import Factor, Fetch, Tile, choose
from tinymlir.groups import Group, Linear
from tinymlir.kernels import (
    KERNELS, UNROLL, Array, Built, Kernel, Numbers, Place, Scope, below, block_id,
    both, guarded, load, plus, scaled, split, thread_id)
from tinymlir.lanes import multiply_add, zeros
from tinymlir.plan import BYTES
from tinymlir.scalars import index


# %% 08_gpu.md § The kernel (2)
@dataclass(eq=False)
class Product:
    """A matrix product with its tile sizes, as a kernel is built for it."""

    group: Group
    places: dict[ir.Value, Place]
    tile: Tile

    def __post_init__(self) -> None:
        member = self.group.product
        *stack, self.m, self.n = self.group.extents
        self.stack = stack
        order = member.order
        (k,) = [i for i, r in enumerate(member.reduced) if r]
        self.k, t = member.extents[k], self.tile
        self.element = str(ir.RankedTensorType(member.result.type).element_type)
        factors = []
        for (value, map_), loop, across, width in zip(
                member.reads, order[-2:], (self.m, self.n), (t.rows, t.columns)):
            place = self.places[value]
            whole = place.address(map_)
            steps = tuple(whole.steps[i] for i in (*order[:-2], loop, k))
            formula = Linear(whole.offset, steps)
            factors.append(Factor(place.array, formula, across, self.k, width,
                                  t.depth, t.depth * t.slices))
        self.a, self.b = factors

    @property
    def lanes(self) -> int:
        return 16 // BYTES[self.element]

    @property
    def pitches(self) -> tuple[int, int]:
        """From one k to the next in shared memory; a gap spreads the banks."""
        gap = self.lanes
        return (self.tile.rows + gap * self.a.along_k,
                self.tile.columns + gap * self.b.along_k)

    @property
    def blocks(self) -> list[int]:
        t = self.tile
        return [*self.stack, -(-self.n // t.columns), -(-self.m // t.rows)]


# %% 08_gpu.md § The kernel (3)
@rule(KERNELS, "product")
def product_kernel(group: Group, places: dict[ir.Value, Place],
                   arrays: Sequence[Array]) -> Built:
    """C = A @ B and what follows, a tile of C for each block."""
    extents = group.extents
    nbytes = BYTES[str(ir.RankedTensorType(group.product.result.type).element_type)]
    tile = choose(extents[-2], extents[-1], math.prod(extents[:-2]), nbytes)
    p = Product(group, places, tile)
    sizes = [2 * tile.slices * tile.depth * pitch for pitch in p.pitches]
    kernel = Kernel(arrays, (tile.threads, tile.slices, 1),
                    [(size, p.element) for size in sizes])
    with kernel.body:
        *stack, column, row = split(block_id("x"), p.blocks)
        i0, j0 = scaled(row, tile.rows), scaled(column, tile.columns)
        sums = Pipeline(p, kernel, stack, (i0, j0)).run()
        if tile.slices > 1:
            sums = add_slices(p, kernel, sums)
        write_tile(p, kernel, [*stack, i0, j0], sums)
    return Built(kernel, (math.prod(p.blocks), 1, 1))


# %% 08_gpu.md § The kernel (4)
FULLY = "#llvm.loop_annotation<unroll = <full = true>>"


@dataclass(eq=False)
class Pipeline:
    """While a tile is multiplied, the next one is on its way."""

    p: Product
    kernel: Kernel
    stack: list[ir.Value]
    first: tuple[ir.Value, ir.Value]

    def __post_init__(self) -> None:
        kind, p = ir.Type.parse(self.p.element), self.p
        self.vector = ir.VectorType.get([p.lanes], kind)
        self.fetches = [
            Fetch(f, p.tile.threads, self.kernel.pointers[id(f.array)], self.stack,
                  first, kind, thread_id("x"))
            for f, first in zip((p.a, p.b), self.first)]
        self.tx, self.ty = position(p.tile)
        self.slice = thread_id("y") if p.tile.slices > 1 else index(0)

    def fetch(self, step: ir.Value) -> list[list[list[ir.Value]]]:
        """This slice's tiles of A and B in a step: on their way into registers."""
        number = plus(scaled(step, self.p.tile.slices), self.slice)
        return [f.load(scaled(number, self.p.tile.depth)) for f in self.fetches]

    def board(self, half: ir.Value, pitch: int) -> ir.Value:
        """Where this slice's half of the shared memory starts."""
        several = self.p.tile.slices > 1
        number = plus(scaled(self.slice, 2), half) if several else half
        return scaled(number, self.p.tile.depth * pitch)

    def save(self, loaded: list[list[list[ir.Value]]], half: ir.Value) -> None:
        for f, numbers, board, pitch in zip(
                self.fetches, loaded, self.kernel.shared, self.p.pitches):
            f.save(numbers, board, self.board(half, pitch), pitch)

    def start(self) -> list[ir.Value]:
        """Zeros: for each row of this thread, vectors of its columns."""
        groups = self.p.tile.thread_columns // self.p.lanes
        return [zeros(self.vector)] * (self.p.tile.thread_rows * groups)

    def run(self) -> list[ir.Value]:
        """The sums of this thread."""
        t = self.p.tile
        steps = -(-self.p.k // (t.depth * t.slices))
        self.save(self.fetch(index(0)), index(0))
        gpu.barrier()
        loop = scf.ForOp(index(0), index(steps), index(1), self.start())
        with ir.InsertionPoint(loop.body):
            step = loop.induction_variable
            half = arith.remui(step, index(2))
            coming = self.fetch(plus(step, 1))
            sums = self.multiply(half, list(loop.inner_iter_args))
            self.save(coming, arith.subi(index(1), half))
            gpu.barrier()
            scf.YieldOp(sums)
        return list(loop.results)

    def multiply(self, half: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        """One tile of A times one of B: outer products, k after k."""
        p, t, (board_a, board_b) = self.p, self.p.tile, self.kernel.shared
        groups = range(t.thread_columns // p.lanes)
        starts = [self.board(half, pitch) for pitch in p.pitches]
        row = scaled(self.ty, t.thread_rows)
        loop = scf.ForOp(index(0), index(t.depth), index(1), sums)
        loop.operation.attributes[UNROLL] = ir.Attribute.parse(FULLY)
        with ir.InsertionPoint(loop.body):
            at_a, at_b = (plus(start, scaled(loop.induction_variable, pitch))
                          for start, pitch in zip(starts, p.pitches))
            a = shared_numbers(board_a, plus(at_a, row), t.thread_rows, p.lanes)
            columns = [plus(at_b, column_of(p, self.tx, g)) for g in groups]
            b = [shared_vector(board_b, column, self.vector) for column in columns]
            spread = [vector.broadcast(self.vector, x) for x in a]
            pairs = [(x, y) for x in spread for y in b]
            scf.YieldOp([multiply_add(x, y, s)
                         for (x, y), s in zip(pairs, loop.inner_iter_args)])
        return list(loop.results)


# %% 08_gpu.md § The kernel (5)
def position(t: Tile) -> tuple[ir.Value, ir.Value]:
    """This thread's place in the block: along columns, along rows."""
    across = index(t.columns // t.thread_columns)
    thread = thread_id("x")
    return arith.remui(thread, across), arith.divui(thread, across)


def column_of(p: Product, tx: ir.Value, group: int) -> ir.Value:
    stride = p.tile.columns // (p.tile.thread_columns // p.lanes)
    return plus(scaled(tx, p.lanes), group * stride)


def shared_vector(board: ir.Value, where: ir.Value, kind: ir.VectorType
                  ) -> ir.Value:
    return vector.load(kind, board, [where], alignment=16)


def shared_numbers(board: ir.Value, where: ir.Value, count: int, lanes: int
                   ) -> list[ir.Value]:
    """Neighbours in shared memory, 16 bytes at a time where they fill them."""
    width = min(lanes, count)
    parts = [load(board, plus(where, i), width) for i in range(0, count, width)]
    return [x for part in parts for x in part]


# %% 08_gpu.md § The kernel (6)
def add_slices(p: Product, kernel: Kernel, sums: Sequence[ir.Value]
               ) -> list[ir.Value]:
    """The sums of all slices, exchanged through shared memory."""
    t, board = p.tile, kernel.shared[1]
    width = t.threads * p.lanes
    place = scaled(thread_id("x"), p.lanes)
    mine = plus(scaled(thread_id("y"), width), place)
    totals = []
    for value in sums:
        vector.store(value, board, [mine], alignment=16)
        gpu.barrier()
        kind = ir.VectorType(value.type)
        parts = [shared_vector(board, plus(place, i * width), kind)
                 for i in range(t.slices)]
        totals.append(functools.reduce(add, parts))
        gpu.barrier()
    return totals


def add(x: ir.Value, y: ir.Value) -> ir.Value:
    whole = isinstance(ir.VectorType(x.type).element_type, ir.IntegerType)
    return (arith.addi if whole else arith.addf)(x, y)


def keeper(p: Product, n: int) -> ir.Value | None:
    """Is this thread's slice the one that finishes the n-th sum?"""
    if p.tile.slices == 1:
        return None
    mine = index(n % p.tile.slices)
    return arith.cmpi(arith.CmpIPredicate.eq, thread_id("y"), mine)


# %% 08_gpu.md § What follows a product (1)
def write_tile(p: Product, kernel: Kernel, origin: list[ir.Value],
               sums: Sequence[ir.Value]) -> None:
    """What follows the product, on the sums in registers; then to memory."""
    *stack, i0, j0 = origin
    tx, ty = position(p.tile)
    groups = p.tile.thread_columns // p.lanes
    for n, total in enumerate(sums):
        row, group = divmod(n, groups)
        i = plus(i0, scaled(ty, p.tile.thread_rows), row)
        j = plus(j0, column_of(p, tx, group))
        numbers = [vector.extract(total, [], [e]) for e in range(p.lanes)]
        with guarded(keeper(p, n)):
            write_piece(p, kernel, [*stack, i, j], numbers)


def write_piece(p: Product, kernel: Kernel, point: Sequence[ir.Value],
                numbers: Sequence[ir.Value]) -> None:
    """Neighbours of C that are inside of it."""
    *stack, i, j = point
    inside = below(i, p.m) if p.m % p.tile.rows else None
    width = len(numbers) if p.n % len(numbers) == 0 else 1
    for e in range(0, len(numbers), width):
        column = plus(j, e)
        beyond = below(column, p.n) if p.n % p.tile.columns else None
        with guarded(both(inside, beyond)):
            write(p, kernel, [*stack, i, column], numbers[e:e + width])


def write(p: Product, kernel: Kernel, point: list[ir.Value], sums: list[ir.Value]
          ) -> None:
    scope = Scope(p.group, p.places, kernel)
    numbers = Numbers(scope, point, len(sums))
    numbers.known[p.group.product.result] = sums
    for member in p.group.members:
        if member.result in p.places:
            numbers.store(member.result)
