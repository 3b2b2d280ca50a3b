# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Bands (1)
"""Stacks of matrices that are computed band by band (chapter 3)."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from mlir import ir
from mlir.dialects import arith, memref

from tinymlir.calls import PRODUCTS, find
from tinymlir.loops import HARMLESS, inside, parallel, root
from tinymlir.scalars import index
from tinymlir.flow import loop_over

STEPS = ("linalg.generic", "linalg.fill", *PRODUCTS)
CUT = (0, 1)  # the loops that are cut: matrices of a stack, rows of a matrix
Touch = tuple[ir.Value, bool, tuple]  # buffer, written?, its dimension of each loop


@dataclass
class Step:
    """An operation on buffers, and what it touches."""

    op: ir.Operation

    def __post_init__(self) -> None:
        *self.inputs, self.output = self.op.operands

    def maps(self) -> list[list[int | None]]:
        """For each operand the loop of each dimension; None: no plain loop."""
        if self.op.name == "linalg.fill":
            return [[], list(range(ir.MemRefType(self.output.type).rank))]
        return [[e.position if isinstance(e, ir.AffineDimExpr) else None
                 for e in a.value.results]
                for a in self.op.attributes["indexing_maps"]]

    def touches(self) -> list[Touch]:
        return [(value, value == self.output,
                 tuple(m.index(d) if d in m else None for d in CUT))
                for value, m in zip(self.op.operands, self.maps())
                if isinstance(value.type, ir.MemRefType)]

    @property
    def suits(self) -> bool:
        """Does it fill a stack of matrices, one element for each turn?"""
        if self.op.name not in STEPS or len(self.op.results):
            return False
        counts = any(x.name == "linalg.index" for x in inside(self.op))
        kind = ir.MemRefType(self.output.type)
        least = 3 if self.op.name in PRODUCTS else 2
        once = all(m.count(d) <= 1 for m in self.maps() for d in CUT)
        return (once and not counts and kind.rank >= least and kind.has_static_shape
                and self.maps()[-1][:2] == list(CUT))


# %% 03_passes.md § Bands (2)
@dataclass
class Band:
    """Neighbouring steps that can go in lockstep."""

    steps: list[Step] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, int]:
        """(matrices in the stack, rows of a matrix)."""
        return tuple(ir.MemRefType(self.steps[0].output.type).shape[:2])

    def takes(self, new: Step) -> bool:
        """May this step join? If each turn only meets what the same turn wrote."""
        if not self.steps:
            return True
        if tuple(ir.MemRefType(new.output.type).shape[:2]) != self.size:
            return False
        old = [x for step in self.steps for x in step.touches()]
        return not any(root(a) == root(b) and (wrote or wrote_too)
                       and (a != b or at != at_too)
                       for a, wrote, at in new.touches()
                       for b, wrote_too, at_too in old)

    def trimmed(self) -> Band:
        """From the zeros of the first product to the last product."""
        at = [i for i, x in enumerate(self.steps) if x.op.name in PRODUCTS]
        if not at:
            return Band()
        first = at[0]
        while first and self.steps[first - 1].op.name == "linalg.fill":
            first -= 1
        return Band(self.steps[first:at[-1] + 1])

    def own(self) -> list[ir.Value]:
        """Buffers that nobody else looks at: they need to hold one band only."""
        ops = {step.op for step in self.steps}
        return [x for x in dict.fromkeys(step.output for step in self.steps)
                if not isinstance(x.owner, ir.Block)
                and x.owner.name == "memref.alloc"
                and all(use.owner in ops or use.owner.name == "memref.dealloc"
                        for use in x.uses)]


def bands(block: ir.Block) -> Iterator[Band]:
    """The runs of steps in a block."""
    open_ = Band()
    for op in (x.operation for x in block):
        step = Step(op) if op.name in STEPS else None
        if step and step.suits and open_.takes(step):
            open_.steps.append(step)
        elif not op.name.startswith(HARMLESS):
            yield open_
            open_ = Band([step] if step and step.suits else [])
    yield open_


# %% 03_passes.md § Bands (3)
LARGE = 1 << 20  # bytes between the products: less stays in a cache anyway
HOLDS = 3 << 18  # bytes of a band: most of a second-level cache
SHARES = 16  # at least so many for the threads to share, if there are so many bands


def bytes_of(buffer: ir.Value) -> int:
    kind = ir.MemRefType(buffer.type)
    return prod(kind.shape) * int(str(kind.element_type)[1:]) // 8


def rows_of(band: Band, own: list[ir.Value]) -> int:
    """How many rows a band has; 0 if the matrices are better left whole."""
    products = sum(step.op.name in PRODUCTS for step in band.steps)
    total = sum(map(bytes_of, own))
    if products < 2 or total < LARGE:
        return 0
    stack, rows = band.size
    most = HOLDS * stack * rows // total
    return min(rows, 1 << max(3, most.bit_length() - 1))


# %% 03_passes.md § Bands (4)
@dataclass
class Cutter:
    """Views of a band of rows; made once each, so that equal ones are the same."""

    stack: ir.Value  # which matrix
    first: ir.Value  # its first row in the band
    count: int | ir.Value  # rows in the band
    rows: int  # most of them
    local: dict[ir.Value, ir.Value] = field(default_factory=dict)
    made: dict[tuple, ir.Value] = field(default_factory=dict)

    def allocate(self, buffer: ir.Value) -> None:
        """A buffer for one band takes the place of one for all of them."""
        kind = ir.MemRefType(buffer.type)
        shape = [1, self.rows, *kind.shape[2:]]
        self.local[buffer] = memref.alloc(
            ir.MemRefType.get(shape, kind.element_type), [], [], alignment=64)

    def view(self, buffer: ir.Value, loops: list[int | None]) -> ir.Value:
        key = buffer, tuple(loops)
        if key not in self.made:
            self.made[key] = self.new_view(buffer, loops)
        return self.made[key]

    def new_view(self, buffer: ir.Value, loops: list[int | None]) -> ir.Value:
        kind = ir.MemRefType(buffer.type)
        zeros = buffer in self.local
        starts = {0: index(0) if zeros else self.stack,
                  1: index(0) if zeros else self.first}
        counts = {0: 1, 1: self.count}
        source = self.local.get(buffer, buffer)
        offsets = [starts.get(d, 0) for d in loops]
        sizes = [counts.get(d, n) for d, n in zip(loops, kind.shape)]
        return subview(source, offsets, sizes)


# %% 03_passes.md § Bands (5)
def subview(source: ir.Value, offsets: list, sizes: list) -> ir.Value:
    """A part of a buffer; offsets and sizes are numbers or values."""
    kind, unknown = ir.MemRefType(source.type), ir.ShapedType.get_dynamic_size()
    strides, _ = kind.get_strides_and_offset()
    anywhere = ir.ShapedType.get_dynamic_stride_or_offset()
    shape = [x if isinstance(x, int) else unknown for x in sizes]
    layout = ir.StridedLayoutAttr.get(anywhere, strides)
    starts = [x if isinstance(x, int) else anywhere for x in offsets]
    return memref.SubViewOp(
        ir.MemRefType.get(shape, kind.element_type, layout), source,
        [x for x in offsets if not isinstance(x, int)],
        [x for x in sizes if not isinstance(x, int)], [], starts, shape,
        [1] * len(shape)).result


def copy_steps(band: Band, own: list[ir.Value], cutter: Cutter) -> None:
    """The steps on one band, with buffers for what nobody else looks at."""
    for buffer in own:
        cutter.allocate(buffer)
    for step in band.steps:
        views = [cutter.view(x, m) if isinstance(x.type, ir.MemRefType) else x
                 for x, m in zip(step.op.operands, step.maps())]
        copy = step.op.clone()
        for i, view in enumerate(views):
            copy.operands[i] = view
    for buffer in cutter.local.values():
        memref.dealloc(buffer)


def cut(band: Band, rows: int, own: list[ir.Value]) -> None:
    """The steps of a band as loops over bands, in the place of the last step."""
    last, (stack, total) = band.steps[-1].op, band.size
    share = rows * -(-total // (rows * min(total, -(-SHARES // stack))))
    with ir.InsertionPoint(last), ir.Location.unknown():
        upper, step = (index(stack), index(total)), (index(1), index(share))
        _, (which, start), end = parallel((index(0), index(0)), upper, step)
    with ir.InsertionPoint(end), ir.Location.unknown():
        stop = arith.minui(arith.addi(start, step[1]), upper[1])
        with loop_over(start, stop, index(rows)) as first:
            left = arith.subi(upper[1], first)
            count = rows if total % rows == 0 else arith.minui(index(rows), left)
            copy_steps(band, own, Cutter(which, first, count, rows))
    freed = [use.owner for buffer in own for use in buffer.uses
             if use.owner.name == "memref.dealloc"]
    for op in (*(x.op for x in band.steps), *freed, *(x.owner for x in own)):
        op.erase()


def cut_bands(module: ir.Module) -> None:
    """Compute stacks of matrices band by band, where that saves memory traffic."""
    for function in find(module, "func.func"):
        for block in function.regions[0]:
            for band in [x.trimmed() for x in bands(block)]:
                own = band.own()
                rows = rows_of(band, own)
                if rows:
                    cut(band, rows, own)
