# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § One row (1)
"""Products of one row with a matrix (chapter 3)."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from mlir import ir
from mlir.dialects import arith, memref, scf, vector

from tinymlir.blank import opposite
from tinymlir.flow import either, loop_over, stretches
from tinymlir.lanes import add, multiply_add, widen, window, zeros
from tinymlir.scalars import index
from tinymlir.schedule import Part, Types

ABREAST = 4  # rows of B at a time, and vectors of each
GROUPS, LEAST = 8, 64  # of rows: at most so many, of at least so many rows
WIDE = 4096  # columns of a stripe: a group of very long rows is cut


def cut(depth: ir.Value, columns: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(rows of B in a group, groups, stripes)."""
    size = arith.ceildivui(depth, index(GROUPS * ABREAST))
    size = arith.maxui(arith.muli(size, index(ABREAST)), index(LEAST))
    return (size, arith.ceildivui(depth, size),
            arith.ceildivui(columns, index(WIDE)))


def row(t: Types, a: ir.Value, b: ir.Value, sums: ir.Value, fresh: ir.Value,
        part: Part) -> None:
    """sums[g, j] += A[0, k] * B[k, j] for the k of group g: a part of all stripes
    of all groups."""
    depth, columns = memref.dim(a, index(1)), memref.dim(b, index(1))
    size, _, stripes = cut(depth, columns)
    with loop_over(*part, index(1)) as piece:
        group, stripe = arith.divui(piece, stripes), arith.remui(piece, stripes)
        top, left = arith.muli(group, size), arith.muli(stripe, index(WIDE))
        rows = arith.minui(arith.subi(depth, top), size)
        width = arith.minui(arith.subi(columns, left), index(WIDE))
        add_group(t, window(a, index(0), top, index(1), rows),
                  window(b, top, left, rows, width),
                  window(sums, group, left, index(1), width), fresh)


# %% 03_passes.md § One row (2)
def add_group(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value
              ) -> None:
    """C[0, j] += A[0, k] * B[k, j] for all k and j."""
    depth, number = memref.dim(a, index(1)), t.vector.element_type
    width = memref.dim(c, index(1))
    border = next_border(t, b, index(0), index(0), width)
    either(fresh, lambda: clear(t, c), lambda: None)
    for start, stop, count in stretches(index(0), depth, (ABREAST, 1)):
        with loop_over(start, stop, index(count)) as k:
            places = [arith.addi(k, index(i)) for i in range(count)]
            numbers = (widen(memref.load(a, [index(0), k]), number) for k in places)
            factors = [vector.broadcast(t.vector, x) for x in numbers]
            lines = [window(b, k, index(0), index(1), width) for k in places]
            add_rows(t, list(zip(factors, lines)), c, border)


def clear(t: Types, c: ir.Value) -> None:
    """Zeros in the row."""
    zero = vector.extract(zeros(t.vector), [], [0])
    with loop_over(index(0), memref.dim(c, index(1)), index(1)) as j:
        memref.store(zero, c, [index(0), j])


def add_rows(t: Types, lines: list[tuple[ir.Value, ir.Value]], c: ir.Value,
             border: ir.Value) -> None:
    """Add a few rows to C, each multiplied by its factor."""
    lanes, width = t.kernel.lanes, memref.dim(c, index(1))

    def add_vectors(columns: list[ir.Value], load: Callable, store: Callable
                    ) -> None:
        new = [load(t.vector, c, [index(0), j]) for j in columns]
        for factor, line in lines:
            row = (widen(load(t.vector_b, line, [index(0), j]), t.vector)
                   for j in columns)
            new = [multiply_add(factor, x, y) for x, y in zip(row, new)]
        for x, j in zip(new, columns):
            store(x, c, [index(0), j])

    def edge(first: ir.Value, last: ir.Value) -> None:
        with loop_over(first, last, index(lanes)) as j:
            mask = vector.create_mask(t.mask, [arith.subi(last, j)])
            add_vectors([j], masked(mask), lambda x, m, at:
                        vector.maskedstore(m, at, mask, x))

    middle, end, wide = next(stretches(border, width, [ABREAST * lanes]))
    edge(index(0), border)
    with loop_over(middle, end, index(wide)) as j:
        add_vectors([arith.addi(j, index(v)) for v in range(0, wide, lanes)],
                    vector.load, vector.store)
    edge(end, width)


# %% 03_passes.md § One row (3)
def next_border(t: Types, b: ir.Value, line: ir.Value, column: ir.Value,
                stop: ir.Value) -> ir.Value:
    """The first column whose number begins a vector in memory; at most `stop`."""
    size, lanes = int(t.kernel.types[1][1:]) // 8, index(t.kernel.lanes)
    _, offset, _, _, step, _ = memref.extract_strided_metadata(b)
    start = memref.extract_aligned_pointer_as_index(b)
    place = arith.addi(offset, arith.addi(arith.muli(line, step), column))
    place = arith.addi(arith.divui(start, index(size)), place)
    left = arith.remui(arith.subi(index(0), place), lanes)
    return arith.minui(arith.addi(column, left), stop)


def masked(mask: ir.Value) -> Callable:
    """vector.load, with zeros where the mask is not set."""
    return lambda kind, m, at: vector.maskedload(kind, m, at, mask, zeros(kind))


# %% 03_passes.md § One row (4)
SUMS = 4  # vectors of sums, for one row of B
LONG = 256  # numbers in a row that is worth the trouble


def dots(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value,
         part: Part) -> None:
    """C[0, j] += dot(A[0], B[j]), with B as it is stored, for a part of the j."""
    depth = memref.dim(a, index(1))
    short = arith.cmpi(arith.CmpIPredicate.ult, depth, index(LONG))
    with loop_over(*part, index(1)) as j:
        border = next_border(t, b, j, index(0), depth)
        new = total(dot(t, a, b, j, arith.select(short, index(0), border)))
        sum_ = add(memref.load(c, [index(0), j]), new)
        memref.store(arith.select(fresh, new, sum_), c, [index(0), j])


def dot(t: Types, a: ir.Value, b: ir.Value, line: ir.Value, border: ir.Value
        ) -> list[ir.Value]:
    """Vectors whose lanes add up to dot(A[0], B[line])."""
    lanes, depth = t.kernel.lanes, memref.dim(a, index(1))

    def products(k: ir.Value, sums: Sequence[ir.Value], count: int = 1,
                 load: Callable = vector.load) -> list[ir.Value]:
        """Add to the first sums, which then become the last ones."""
        new = []
        for v, old in enumerate(sums[:count]):
            at = arith.addi(k, index(v * lanes))
            x = widen(load(t.vector_a, a, [index(0), at]), t.vector)
            y = widen(load(t.vector_b, b, [line, at]), t.vector)
            new.append(multiply_add(x, y, old))
        return [*sums[count:], *new]

    outside = vector.create_mask(t.mask, [arith.subi(index(lanes), border)])
    sums = products(arith.subi(border, index(lanes)), [zeros(t.vector)] * SUMS,
                    load=masked(opposite(outside)))
    for start, stop, step in stretches(border, depth, (SUMS * lanes, lanes)):
        loop = scf.ForOp(start, stop, index(step), sums)
        with ir.InsertionPoint(loop.body):
            k, old = loop.induction_variable, list(loop.inner_iter_args)
            scf.YieldOp(products(k, old, step // lanes))
        sums = list(loop.results)
    inside = vector.create_mask(t.mask, [arith.subi(depth, stop)])
    return products(stop, sums, load=masked(inside))


def total(sums: list[ir.Value]) -> ir.Value:
    """The sum of all lanes of all vectors: halves first."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [add(x, y) for x, y in zip(sums[:half], sums[half:])]
    x, n = sums[0], ir.VectorType(sums[0].type).shape[0]
    for half in (n >> i for i in range(1, n.bit_length())):
        x = add(x, vector.shuffle(x, x, [i ^ half for i in range(n)]))
    return vector.extract(x, [], [0])
