# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Why a matrix product needs a schedule (1)
"""How a matrix product is computed (chapter 3)."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, memref, scf, vector

from tinymlir.flow import Build, either, loop_over, stretches
from tinymlir.scalars import index

VECTORS = 2  # vectors in a row of the register tile


# %% 03_passes.md § Why a matrix product needs a schedule (2)
TILE_ROWS = {512: (8, 4, 2, 1), 256: (4, 2, 1), 128: (8, 4, 2, 1)}


@dataclass(frozen=True)
class Kernel:
    """One of the compiled products: element types, the order of B, vector width."""

    kind: str  # "matmul", or for one row of A "row", or "dots" with B as B.T
    types: tuple[str, str, str]  # of A, B and C, such as ("f64", "f32", "f64")
    columns: bool  # is B stored as B.T, as in a @ b.T? Then it is passed as stored
    bits: int  # of a vector register
    parallel: bool = False  # on several threads, if the matrices are large

    @property
    def symbol(self) -> str:
        order = "columns" if self.columns else "rows"
        threads = "threads" if self.parallel else "thread"
        return "_".join([self.kind, *self.types, order, threads])

    @property
    def lanes(self) -> int:
        return self.bits // int(self.types[2][1:])


# %% 03_passes.md § The innermost loop (1)
from tinymlir.lanes import add, matrix, multiply_add, widen, zeros


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
        wide, number = VECTORS * lanes, self.vector.element_type
        self.panel = ir.MemRefType.get([DEEP, wide], number)
        any_number = ir.ShapedType.get_dynamic_size()
        self.sums = ir.MemRefType.get([any_number, wide], number)
        self.note = ir.MemRefType.get([], ir.IntegerType.get_signless(8))


# %% 03_passes.md § The innermost loop (2)
@dataclass
class Product:
    """A product under way: three matrices, and what it needs for itself."""

    t: Types
    a: ir.Value
    b: ir.Value
    c: ir.Value
    fresh: ir.Value  # does C hold nothing yet?
    panel: ir.Value
    sums: ir.Value
    note: ir.Value  # about the panel, see below


@dataclass
class Panel:
    """A piece of B: `depth` rows from k, `width` columns from j."""

    block: Block  # where in the product it is, see below
    k: ir.Value
    j: ir.Value
    depth: ir.Value
    width: ir.Value
    first: ir.Value  # is it the first one for its columns,
    last: ir.Value  # or the last?
    row: ir.Value  # of `sums`, at which row 0 of A would be kept
    next: tuple[ir.Value, ir.Value]  # k and j of a panel that comes soon
    whole: ir.Value  # is it as wide as a tile?

    def columns(self, t: Types) -> Iterator[tuple]:
        """For each vector of a tile: offset in the tile, column in C, mask."""
        for offset in range(0, VECTORS * t.kernel.lanes, t.kernel.lanes):
            left = arith.subi(self.width, index(offset))
            mask = vector.create_mask(t.mask, [left])
            yield index(offset), arith.addi(self.j, index(offset)), mask

    def kept(self, t: Types, lines: list[ir.Value]) -> list[list[ir.Value]]:
        """Where in `sums` the vectors of these rows of C are kept."""
        first = arith.addi(self.row, lines[0])
        return [[arith.addi(first, index(r)), index(v * t.kernel.lanes)]
                for r in range(len(lines)) for v in range(VECTORS)]


# %% 03_passes.md § The innermost loop (3)
Read = Callable[[ir.Value], list[ir.Value]]  # a row of the panel, as vectors


def tile(p: Product, here: Panel, rows: int, i: ir.Value, read: Read) -> None:
    """C[i:i+rows, j:j+width] += A[i:i+rows, k:k+depth] @ the panel."""
    lines = [arith.addi(i, index(r)) for r in range(rows)]
    loop = scf.ForOp(index(0), here.depth, index(1), begun(p, here, lines))
    with ir.InsertionPoint(loop.body):
        at = loop.induction_variable
        k, b, sums = arith.addi(here.k, at), read(at), iter(loop.inner_iter_args)
        if not p.t.kernel.columns:
            fetch_next(p, here, rows, i, at)
        new = []
        for line in lines:
            x = widen(memref.load(p.a, [line, k]), p.t.vector.element_type)
            spread = vector.broadcast(p.t.vector, x)
            new += [multiply_add(spread, value, next(sums)) for value in b]
        scf.YieldOp(new)
    leave(p, here, lines, list(loop.results))


# %% 03_passes.md § The innermost loop (4)
def begun(p: Product, here: Panel, lines: list[ir.Value]) -> list[ir.Value]:
    """The sums so far: from C, zeros, or what `leave` has kept."""
    t, none = p.t, zeros(p.t.vector)
    places = here.kept(t, lines)

    def old() -> list[ir.Value]:
        return [vector.maskedload(t.vector, p.c, [line, column], mask, none)
                for line in lines for _, column, mask in here.columns(t)]

    def fresh() -> list[ir.Value]:
        return [none] * len(places)

    def kept() -> list[ir.Value]:
        return [vector.load(t.vector, p.sums, place) for place in places]

    kinds = [t.vector] * len(places)
    return either(here.first, lambda: either(p.fresh, fresh, old, kinds), kept,
                  kinds)


def leave(p: Product, here: Panel, lines: list[ir.Value], done: list[ir.Value]
          ) -> None:
    """Put the sums into C if they are complete, else where `begun` finds them."""
    places = [(line, column, mask) for line in lines
              for _, column, mask in here.columns(p.t)]

    def keep() -> None:
        for place, x in zip(here.kept(p.t, lines), done):
            vector.store(x, p.sums, place)

    def whole() -> None:
        for (line, column, _), x in zip(places, done):
            vector.store(x, p.c, [line, column])

    def edge() -> None:
        for (line, column, mask), x in zip(places, done):
            vector.maskedstore(p.c, [line, column], mask, x)

    either(here.last, lambda: either(here.whole, whole, edge), keep)


# %% 03_passes.md § The panel (1)
LINE = 64  # bytes that come from memory together


def from_matrix(p: Product, here: Panel) -> Read:
    """Read B where it lies, and leave a panel for the tiles that follow."""
    def read(at: ir.Value) -> list[ir.Value]:
        found = []
        for offset, column, _ in here.columns(p.t):
            x = vector.load(p.t.vector_b, p.b, [arith.addi(here.k, at), column])
            found.append(widen(x, p.t.vector))
            vector.store(found[-1], p.panel, [at, offset])
        return found

    return read


def from_panel(p: Product, here: Panel) -> Read:
    """Read the panel that was made before."""
    return lambda at: [vector.load(p.t.vector, p.panel, [at, offset])
                       for offset, _, _ in here.columns(p.t)]


# %% 03_passes.md § The panel (2)
def pack_edge(p: Product, here: Panel) -> None:
    """Copy a panel that is narrower than a tile."""
    none = zeros(p.t.vector_b)
    with loop_over(index(0), here.depth, index(1)) as at:
        for offset, column, mask in here.columns(p.t):
            place = [arith.addi(here.k, at), column]
            x = vector.maskedload(p.t.vector_b, p.b, place, mask, none)
            vector.store(widen(x, p.t.vector), p.panel, [at, offset])


# %% 03_passes.md § The panel (3)
SHIFT = 16  # shares are counted in parts of 65,536


def fetch_next(p: Product, here: Panel, rows: int, i: ir.Value, at: ir.Value
               ) -> None:
    """Ask for one row of the next panel, in proportion to the work that is done."""
    done = arith.muli(arith.subi(i, here.block.top), here.depth)
    done = arith.addi(done, arith.muli(at, index(rows)))
    line = arith.shrui(arith.muli(done, here.block.share), index(SHIFT))
    many = LINE * 8 // int(p.t.kernel.types[1][1:])  # numbers in a line
    k, j = here.next
    wide = VECTORS * p.t.kernel.lanes
    for last in range(min(many, wide) - 1, wide, many):
        place = [arith.addi(k, line), arith.addi(j, index(last))]
        memref.prefetch(p.b, place, False, 3, True)  # to read; to level 1


# %% 03_passes.md § The panel (4)
from tinymlir.squares import turned


def pack_columns(p: Product, here: Panel) -> None:
    """Copy a panel of B that is stored as B.T: square by square, turned over.

    What lies beyond the edge is the last column again: any number does, but not
    what happens to be in memory, since some numbers are slow to multiply."""
    t, j = p.t, here.j
    lanes, last = t.kernel.lanes, arith.addi(j, arith.subi(here.width, index(1)))
    none = zeros(t.vector_b)
    with loop_over(index(0), index(VECTORS * lanes), index(lanes)) as column:
        first = arith.addi(j, column)
        lines = [arith.minui(arith.addi(first, index(i)), last)
                 for i in range(lanes)]
        with loop_over(index(0), here.depth, index(lanes)) as at:
            mask = vector.create_mask(t.mask, [arith.subi(here.depth, at)])
            k = arith.addi(here.k, at)
            square = [vector.maskedload(t.vector_b, p.b, [line, k], mask, none)
                      for line in lines]
            for i, x in enumerate(turned(square)):
                vector.store(widen(x, t.vector), p.panel,
                             [arith.addi(at, index(i)), column])


# %% 03_passes.md § Zeros (1)
from tinymlir.blank import forget, known_finite, only_zeros, truth


def adds_nothing(p: Product, here: Panel, lines: list[ir.Value]) -> ir.Value:
    """Are these lines of A blank, and is 0 times the panel 0?"""
    t = p.t
    blank = only_zeros(p.a, t.vector_a, lines, here.k, here.depth)
    return either(blank,
                  lambda: [known_finite(p.note, p.panel, t.vector, here.depth)],
                  lambda: [truth(False)], [blank.type])[0]


# %% 03_passes.md § The loops around it (1)
ROWS = 256  # rows of A that stay in the second level of cache
PANELS = 8  # with so many rows; of fewer rows, more of them
SHALLOW, DEEP = 32, 128  # rows of B in a panel, for few rows of A and for more
EQUAL, ULE, ULT = (getattr(arith.CmpIPredicate, x) for x in ("eq", "ule", "ult"))


@dataclass
class Block:
    """Rows of A from `top`, columns of B from `left` to `right`, and all k."""

    t: Types
    top: ir.Value
    rows: ir.Value
    depths: ir.Value  # how many k there are

    def __post_init__(self) -> None:
        self.wide = index(VECTORS * self.t.kernel.lanes)
        few = arith.cmpi(ULE, self.rows, index(SHALLOW))
        self.depth = arith.select(few, index(SHALLOW), index(DEEP))
        self.ahead = arith.select(few, arith.addi(self.wide, self.wide), self.wide)
        panels = arith.divui(index(ROWS * PANELS), self.rows)
        self.columns = arith.muli(panels, self.wide)
        self.share = arith.divui(index(1 << SHIFT), self.rows)

    def panel(self, k: ir.Value, j: ir.Value, left: ir.Value, right: ir.Value
              ) -> Panel:
        """The panel at row k and column j of B, in a block of these columns."""
        below, wide = arith.addi(k, self.depth), self.wide
        number = arith.divui(arith.subi(j, left), wide)
        last = arith.cmpi(ULE, self.depths, below)
        return Panel(
            block=self, k=k, j=j,
            depth=arith.minui(arith.subi(self.depths, k), self.depth),
            width=arith.minui(arith.subi(right, j), wide),
            first=arith.cmpi(ULT, k, self.depth), last=last,
            row=arith.subi(arith.muli(number, self.rows), self.top),
            next=self.following(k, j, last, left, right),
            whole=arith.cmpi(ULE, arith.addi(j, wide), right))

    def following(self, k: ir.Value, j: ir.Value, last: ir.Value, left: ir.Value,
                  right: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The panel to fetch: to the right, else below, else in the next block."""
        column = arith.addi(j, self.ahead)
        step = arith.subi(column, left)
        inside = arith.cmpi(ULT, column, right)
        panels = arith.ceildivui(arith.subi(right, left), self.wide)
        back = arith.addi(left, arith.remui(step, arith.muli(panels, self.wide)))
        under = arith.select(last, index(0), arith.addi(k, self.depth))
        same = arith.ori(inside, last)
        return arith.select(inside, k, under), arith.select(same, column, back)


# %% 03_passes.md § The loops around it (2)
Part = tuple[ir.Value, ir.Value]  # the first column, and the one after the last


def matmul(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value,
           part: Part) -> None:
    """C += A @ B by panels of B and tiles of C, for a part of the columns."""
    rows, depths = memref.dim(a, index(0)), memref.dim(a, index(1))
    sums = keep_sums(t, rows, depths, part)
    panel = memref.alloca(t.panel, [], [], alignment=LINE)
    p = Product(t, a, b, c, fresh, panel, sums, memref.alloca(t.note, [], []))
    with loop_over(index(0), rows, index(ROWS)) as top:
        span = arith.minui(arith.subi(rows, top), index(ROWS))
        block = Block(t, top, span, depths)
        with loop_over(*part, block.columns) as left:
            right = arith.minui(arith.addi(left, block.columns), part[1])
            with (loop_over(index(0), depths, block.depth) as k,
                  loop_over(left, right, block.wide) as j):
                for_each_tile(p, block.panel(k, j, left, right))
    memref.dealloc(sums)


def keep_sums(t: Types, rows: ir.Value, depths: ir.Value, part: Part) -> ir.Value:
    """The buffer of sums: not larger than this product needs."""
    wide = index(VECTORS * t.kernel.lanes)
    panels = arith.ceildivui(arith.subi(part[1], part[0]), wide)
    tall = arith.muli(arith.minui(rows, index(ROWS)), panels)
    several = arith.cmpi(ULT, index(SHALLOW), depths)  # one panel needs no sums
    need = arith.select(several, arith.minui(tall, index(ROWS * PANELS)), index(0))
    return memref.alloc(t.sums, [need], [], alignment=LINE)


def for_each_tile(p: Product, here: Panel) -> None:
    """The highest tiles, then smaller ones for the rows that are left."""
    top = here.block.top
    end = arith.addi(top, here.block.rows)
    forget(p.note)
    if p.t.kernel.columns:
        pack_columns(p, here)
    else:
        either(here.whole, lambda: None, lambda: pack_edge(p, here))
    for first, last, height in stretches(top, end, TILE_ROWS[p.t.kernel.bits]):
        with loop_over(first, last, index(height)) as i:
            one_tile(p, here, height, i)


def one_tile(p: Product, here: Panel, rows: int, i: ir.Value) -> None:
    """A tile, which reads B itself if no panel was made."""
    def at(reader: Callable[[Product, Panel], Read]) -> Build:
        return lambda: tile(p, here, rows, i, reader(p, here))

    if p.t.kernel.columns:
        return at(from_panel)()
    first = arith.cmpi(EQUAL, i, here.block.top)
    either(arith.andi(first, here.whole), at(from_matrix),
           lambda: unless_blank(p, here, rows, i, at(from_panel)))


def unless_blank(p: Product, here: Panel, rows: int, i: ir.Value, build: Build
                 ) -> None:
    """Build a tile that is skipped if it adds nothing, unless it is a small one."""
    integers = isinstance(p.t.vector.element_type, ir.IntegerType)
    if integers or rows < TILE_ROWS[p.t.kernel.bits][0]:
        return build()
    lines = [arith.addi(i, index(r)) for r in range(rows)]

    def pass_on() -> None:
        zero = zeros(p.t.vector)  # added, since -0.0 + 0.0 is 0.0
        leave(p, here, lines, [add(x, zero) for x in begun(p, here, lines)])

    either(adds_nothing(p, here, lines), pass_on, build)
