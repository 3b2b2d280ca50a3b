# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Why a matrix product needs a schedule (1)
"""How a matrix product is computed (chapter 3)."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, memref, scf, vector

from tinymlir.scalars import index

VECTORS = 2  # vectors in a row of the register tile


# %% 03_passes.md § Why a matrix product needs a schedule (2)
TILE_ROWS = {512: (8, 4, 2, 1), 256: (4, 2, 1), 128: (8, 4, 2, 1)}


@dataclass(frozen=True)
class Kernel:
    """One of the compiled products: element types, the order of B, vector width."""

    kind: str  # "matmul", or "dots" for one row of A and B stored as B.T
    types: tuple[str, str, str]  # of A, B and C, such as ("f64", "f32", "f64")
    columns: bool  # is B stored as B.T, as in a @ b.T? Then it is passed as stored
    bits: int  # of a vector register
    depth: int = 256  # rows of B in a panel, see `panel_depth`
    parallel: bool = False  # on several threads, if the matrices are large

    @property
    def symbol(self) -> str:
        order = "columns" if self.columns else "rows"
        threads = "threads" if self.parallel else "thread"
        return "_".join([self.kind, *self.types, order, str(self.depth), threads])

    @property
    def lanes(self) -> int:
        return self.bits // int(self.types[2][1:])


# %% 03_passes.md § The innermost loop (1)
def matrix(element: str, strides: str) -> ir.MemRefType:
    """A matrix of unknown size, such as strides="?, 1"."""
    return ir.MemRefType(ir.Type.parse(
        f"memref<?x?x{element}, strided<[{strides}], offset: ?>>"))


def widen(x: ir.Value, to: ir.Type) -> ir.Value:
    """The same numbers in a wider type (floats and integers)."""
    if x.type == to:
        return x
    kind = ir.VectorType(to).element_type if isinstance(to, ir.VectorType) else to
    return (arith.extsi if isinstance(kind, ir.IntegerType) else arith.extf)(to, x)


def multiply_add(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c on vectors: one rounding for floats."""
    if isinstance(ir.VectorType(c.type).element_type, ir.IntegerType):
        return arith.addi(arith.muli(a, b), c)
    return vector.fma(a, b, c)


def zeros(kind: ir.VectorType) -> ir.Value:
    number = kind.element_type
    zero = (ir.IntegerAttr if isinstance(number, ir.IntegerType) else ir.FloatAttr)
    splat = ir.DenseElementsAttr.get_splat(kind, zero.get(number, 0))
    return arith.constant(kind, splat)


# %% 03_passes.md § The innermost loop (2)
@dataclass
class Types:
    """The MLIR types of a kernel."""

    kernel: Kernel

    def __post_init__(self) -> None:
        a, b, c = self.kernel.types
        self.a, self.c = matrix(a, "?, ?"), matrix(c, "?, 1")
        self.b = matrix(b, "?, 1")
        if self.kernel.kind == "dots":
            self.a = matrix(a, "?, 1")
        lanes = self.kernel.lanes
        self.vector = ir.VectorType.get([lanes], ir.Type.parse(c))
        self.vector_a = ir.VectorType.get([lanes], ir.Type.parse(a))
        self.vector_b = ir.VectorType.get([lanes], ir.Type.parse(b))
        self.mask = ir.VectorType.get([lanes], ir.IntegerType.get_signless(1))
        self.panel = ir.MemRefType(ir.Type.parse(
            f"memref<{self.kernel.depth}x{lanes * VECTORS}x{c}>"))


def columns_of(t: Types, j: ir.Value, width: ir.Value) -> Iterator[tuple]:
    """For each vector of a tile: offset in the tile, column in C, mask."""
    for v in range(VECTORS):
        offset = index(v * t.kernel.lanes)
        left = arith.subi(width, offset)
        yield offset, arith.addi(j, offset), vector.create_mask(t.mask, [left])


# %% 03_passes.md § The innermost loop (3)
def tile(t: Types, rows: int, args: list[ir.Value]) -> None:
    """C[i:i+rows, j:j+width] += A[i:i+rows, k:k+depth] @ panel."""
    a, panel, c, i, j, k, depth, width, fresh = args
    lines = [arith.addi(i, index(r)) for r in range(rows)]
    cols = list(columns_of(t, j, width))
    start = [old_or_zero(t, c, line, col, mask, arith.andi(fresh, is_zero(k)))
             for line in lines for _, col, mask in cols]
    if rows == TILE_ROWS[t.kernel.bits][0]:
        fetch_below(t, c, lines, j)
    loop = scf.ForOp(index(0), depth, index(1), start)
    with ir.InsertionPoint(loop.body):
        at = loop.induction_variable
        b = [vector.load(t.vector, panel, [at, offset]) for offset, _, _ in cols]
        here, sums = arith.addi(k, at), iter(loop.inner_iter_args)
        new = []
        for line in lines:
            x = widen(memref.load(a, [line, here]), t.vector.element_type)
            spread = vector.broadcast(t.vector, x)
            new += [multiply_add(spread, value, next(sums)) for value in b]
        scf.YieldOp(new)
    done = iter(loop.results)
    for line in lines:
        for _, col, mask in cols:
            vector.maskedstore(c, [line, col], mask, next(done))


# %% 03_passes.md § The innermost loop (4)
def is_zero(k: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, k, index(0))


def old_or_zero(t: Types, c: ir.Value, line: ir.Value, col: ir.Value,
                mask: ir.Value, fresh: ir.Value) -> ir.Value:
    """A vector of C, or zeros if C is fresh."""
    old = vector.maskedload(t.vector, c, [line, col], mask, zeros(t.vector))
    return arith.select(fresh, zeros(t.vector), old)


LINE = 64  # bytes that come from memory together


def fetch_below(t: Types, c: ir.Value, lines: list[ir.Value], j: ir.Value) -> None:
    """Ask for the part of C that the next tile adds to."""
    size = int(t.kernel.types[2][1:]) // 8
    for line in lines:
        below = arith.addi(line, index(len(lines)))
        for first in range(0, VECTORS * t.kernel.lanes, LINE // size):
            column = arith.addi(j, index(first))
            memref.prefetch(c, [below, column], False, 3, True)  # to level 1


# %% 03_passes.md § The panel (1)
def pack_rows(t: Types, b: ir.Value, panel: ir.Value, j: ir.Value, k: ir.Value,
              depth: ir.Value, width: ir.Value) -> None:
    """Copy a panel of B that is stored row by row: whole vectors."""
    cols = list(columns_of(t, j, width))
    with loop_over(index(0), depth, index(1)) as at:
        line = arith.addi(k, at)
        fetch_ahead(t, b, line, j)
        for offset, col, mask in cols:
            x = vector.maskedload(t.vector_b, b, [line, col], mask,
                                  zeros(t.vector_b))
            vector.store(widen(x, t.vector), panel, [at, offset])


def pack_columns(t: Types, b: ir.Value, panel: ir.Value, j: ir.Value, k: ir.Value,
                 depth: ir.Value, width: ir.Value) -> None:
    """Copy a panel of B that is stored as B.T: square by square, turned over.

    What lies beyond the edge is the last column again: any number does, but not
    what happens to be in memory, since some numbers are slow to multiply."""
    lanes, last = t.kernel.lanes, arith.addi(j, arith.subi(width, index(1)))
    none = zeros(t.vector_b)
    with loop_over(index(0), index(VECTORS * lanes), index(lanes)) as column:
        first = arith.addi(j, column)
        lines = [arith.minui(arith.addi(first, index(i)), last)
                 for i in range(lanes)]
        with loop_over(index(0), depth, index(lanes)) as at:
            mask = vector.create_mask(t.mask, [arith.subi(depth, at)])
            here = arith.addi(k, at)
            square = [vector.maskedload(t.vector_b, b, [line, here], mask, none)
                      for line in lines]
            for i, x in enumerate(turned(square)):
                vector.store(widen(x, t.vector), panel,
                             [arith.addi(at, index(i)), column])


def turned(rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of a square of numbers: swap two corners, then the corners of
    each quarter, and so on."""
    rows, n = list(rows), len(rows)
    for half in (n >> i for i in range(1, n.bit_length())):
        for i in (i for i in range(n) if not i & half):
            pair = rows[i], rows[i + half]
            left = [x + n - half if x & half else x for x in range(n)]
            right = [x + n if x & half else x + half for x in range(n)]
            rows[i] = vector.shuffle(*pair, left)
            rows[i + half] = vector.shuffle(*pair, right)
    return rows


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


# %% 03_passes.md § The panel (2)
def fetch_ahead(t: Types, b: ir.Value, line: ir.Value, j: ir.Value) -> None:
    """Ask for what a later panel copies of B when this one copies `line`."""
    deep = t.kernel.depth == DEEP
    size = int(t.kernel.types[1][1:]) // 8
    wide = VECTORS * t.kernel.lanes
    rows, columns = (0, 2 * wide) if deep else (t.kernel.depth, 0)
    row = arith.addi(line, index(rows))
    for first in range(0, wide, LINE // size):
        column = arith.addi(j, index(columns + first))
        memref.prefetch(b, [row, column], False, 2, True)  # to read; to level 2


# %% 03_passes.md § The loops around it (1)
ROWS = 256  # rows of A that stay in the second level of cache
Part = tuple[ir.Value, ir.Value]  # the first column, and the one after the last


def matmul(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value,
           part: Part) -> None:
    """C += A @ B by panels of B and tiles of C, for a part of the columns."""
    rows, depths = memref.dim(a, index(0)), memref.dim(a, index(1))
    wide, most = index(VECTORS * t.kernel.lanes), index(t.kernel.depth)
    panel = memref.alloca(t.panel, [], [], alignment=LINE)
    pack = pack_columns if t.kernel.columns else pack_rows
    with loop_over(index(0), rows, index(ROWS)) as i:
        end = arith.minui(arith.addi(i, index(ROWS)), rows)
        with loop_over(index(0), depths, most) as k:
            depth = arith.minui(arith.subi(depths, k), most)
            with loop_over(*part, wide) as j:
                width = arith.minui(arith.subi(part[1], j), wide)
                pack(t, b, panel, j, k, depth, width)
                for_each_tile(t, i, end, [a, panel, c, j, k, depth, width, fresh])


def for_each_tile(t: Types, done: ir.Value, rows: ir.Value, args: list[ir.Value]
                  ) -> None:
    """Tiles of 8 rows, then of 4, 2 and 1 for the rows that are left."""
    a, panel, c, *rest = args
    for height in TILE_ROWS[t.kernel.bits]:
        step = index(height)
        left = arith.subi(rows, done)
        end = arith.addi(done, arith.muli(arith.divui(left, step), step))
        with loop_over(done, end, step) as i:
            tile(t, height, [a, panel, c, i, *rest])
        done = end


# %% 03_passes.md § Few rows (1)
SHALLOW, MIDDLE, DEEP = 16, 32, 256


def panel_depth(rows: int) -> int:
    """The depth of a panel for a product with so many rows of A."""
    if rows > 32:
        return DEEP
    return SHALLOW if rows <= 8 else MIDDLE


# %% 03_passes.md § One row of dots (1)
ABREAST = 4


def dots(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value,
         part: Part) -> None:
    """C[0, j] += dot(A[0], B[j]), with B as it is stored, for a part of the j."""
    first, last = part
    whole = arith.divui(arith.subi(last, first), index(ABREAST))
    middle = arith.addi(first, arith.muli(whole, index(ABREAST)))
    for start, stop, count in ((first, middle, ABREAST), (middle, last, 1)):
        with loop_over(start, stop, index(count)) as j:
            lines = [arith.addi(j, index(i)) for i in range(count)]
            for line, sums in zip(lines, dot(t, a, b, lines)):
                kind = ir.Attribute.parse("#vector.kind<add>")
                new = vector.reduction(t.vector.element_type, kind, sums)
                sum_ = add(memref.load(c, [index(0), line]), new)
                memref.store(arith.select(fresh, new, sum_), c, [index(0), line])


def add(x: ir.Value, y: ir.Value) -> ir.Value:
    """The sum of two numbers, or of two vectors."""
    many = isinstance(x.type, ir.VectorType)
    kind = ir.VectorType(x.type).element_type if many else x.type
    return (arith.addi if isinstance(kind, ir.IntegerType) else arith.addf)(x, y)


def dot(t: Types, a: ir.Value, b: ir.Value, lines: list[ir.Value]
        ) -> list[ir.Value]:
    """For each line a vector whose lanes add up to dot(A[0], B[line])."""
    depth, step = memref.dim(a, index(1)), index(t.kernel.lanes)
    loop = scf.ForOp(index(0), depth, step, [zeros(t.vector)] * len(lines))
    with ir.InsertionPoint(loop.body):
        k = loop.induction_variable
        mask = vector.create_mask(t.mask, [arith.subi(depth, k)])

        def load(kind: ir.VectorType, m: ir.Value, line: ir.Value) -> ir.Value:
            x = vector.maskedload(kind, m, [line, k], mask, zeros(kind))
            return widen(x, t.vector)

        x = load(t.vector_a, a, index(0))
        for line in lines:
            ahead = arith.addi(line, index(ABREAST))
            memref.prefetch(b, [ahead, k], False, 3, True)  # to read; to level 1
        scf.YieldOp([multiply_add(x, load(t.vector_b, b, line), total)
                     for line, total in zip(lines, loop.inner_iter_args)])
    return list(loop.results)
