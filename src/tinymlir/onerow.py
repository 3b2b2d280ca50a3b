# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § One row (1)
"""Products of one row with a matrix (chapter 3)."""
from __future__ import annotations

from collections.abc import Callable, Iterable

from mlir import ir
from mlir.dialects import arith, memref, scf, vector

from tinymlir.flow import loop_over, stretches
from tinymlir.lanes import add, multiply_add, widen, zeros
from tinymlir.scalars import index
from tinymlir.schedule import Part, Types

ABREAST = 4  # rows of B at a time


def row(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value,
        part: Part) -> None:
    """C[0, j] += A[0, k] * B[k, j] for all k, and for a part of the j."""
    depth = memref.dim(a, index(1))
    for start, stop, count in stretches(index(0), depth, (ABREAST, 1)):
        with loop_over(start, stop, index(count)) as k:
            lines = [arith.addi(k, index(i)) for i in range(count)]
            zero = arith.cmpi(arith.CmpIPredicate.eq, k, index(0))
            add_rows(t, a, b, c, arith.andi(fresh, zero), lines, part)


def add_rows(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value,
             lines: list[ir.Value], part: Part) -> None:
    """Add a few rows of B to C, each multiplied by its number in A."""
    number, lanes = t.vector.element_type, t.kernel.lanes
    numbers = (widen(memref.load(a, [index(0), k]), number) for k in lines)
    factors = [vector.broadcast(t.vector, x) for x in numbers]

    def add_vectors(places: list[ir.Value], load: Callable, store: Callable
                    ) -> None:
        old = (load(t.vector, c, [index(0), j]) for j in places)
        sums = [arith.select(fresh, zeros(t.vector), x) for x in old]
        for factor, line in zip(factors, lines):
            row = (widen(load(t.vector_b, b, [line, j]), t.vector) for j in places)
            sums = [multiply_add(factor, x, y) for x, y in zip(row, sums)]
        for x, j in zip(sums, places):
            store(x, c, [index(0), j])

    first, middle, wide = next(stretches(*part, [ABREAST * lanes]))
    with loop_over(first, middle, index(wide)) as j:
        places = [arith.addi(j, index(v)) for v in range(0, wide, lanes)]
        add_vectors(places, vector.load, vector.store)
    with loop_over(middle, part[1], index(lanes)) as j:
        mask = vector.create_mask(t.mask, [arith.subi(part[1], j)])
        add_vectors([j], masked(mask),
                    lambda x, m, at: vector.maskedstore(m, at, mask, x))


def masked(mask: ir.Value) -> Callable:
    """vector.load, with zeros where the mask is not set."""
    return lambda kind, m, at: vector.maskedload(kind, m, at, mask, zeros(kind))


# %% 03_passes.md § One row (2)
def dots(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value,
         part: Part) -> None:
    """C[0, j] += dot(A[0], B[j]), with B as it is stored, for a part of the j."""
    for start, stop, count in stretches(*part, (ABREAST, 1)):
        with loop_over(start, stop, index(count)) as j:
            lines = [arith.addi(j, index(i)) for i in range(count)]
            for line, sums in zip(lines, dot(t, a, b, lines)):
                kind = ir.Attribute.parse("#vector.kind<add>")
                new = vector.reduction(t.vector.element_type, kind, sums)
                sum_ = add(memref.load(c, [index(0), line]), new)
                memref.store(arith.select(fresh, new, sum_), c, [index(0), line])


def dot(t: Types, a: ir.Value, b: ir.Value, lines: list[ir.Value]
        ) -> list[ir.Value]:
    """For each line a vector whose lanes add up to dot(A[0], B[line])."""
    depth = memref.dim(a, index(1))
    start, whole, lanes = next(stretches(index(0), depth, [t.kernel.lanes]))

    def add_products(k: ir.Value, load: Callable, sums: Iterable[ir.Value]
                     ) -> list[ir.Value]:
        x = widen(load(t.vector_a, a, [index(0), k]), t.vector)
        found = [widen(load(t.vector_b, b, [line, k]), t.vector) for line in lines]
        return [multiply_add(x, y, total) for y, total in zip(found, sums)]

    loop = scf.ForOp(start, whole, index(lanes), [zeros(t.vector)] * len(lines))
    with ir.InsertionPoint(loop.body):
        k = loop.induction_variable
        for line in lines:
            ahead = arith.addi(line, index(ABREAST))
            memref.prefetch(b, [ahead, k], False, 3, True)  # to read; to level 1
        scf.YieldOp(add_products(k, vector.load, loop.inner_iter_args))
    mask = vector.create_mask(t.mask, [arith.subi(depth, whole)])
    return add_products(whole, masked(mask), loop.results)
