# Tangled from notebooks/10_cache.md: edit the chapter, not this file.

# %% 10_cache.md § On a GPU (1)
"""UPDATE and ATTEND as GPU kernels (chapter 10)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from mlir import ir
from mlir.dialects import arith, gpu, math, memref, scf

from tinymlir.arrays import Builder, View, tensor_type
from tinymlir.errors import CompileError
from tinymlir.expr import Expr, Op, rule
from tinymlir.gpu import OWN
from tinymlir.groups import Linear, dense, linear, shape_of
from tinymlir.kernels import (
    WARP, Built, Kernel, Place, at, below, block_id, guarded, load, load_lanes,
    plus, product_of, split, store_lanes, thread_id)
from tinymlir.lanes import widen
from tinymlir.maps import each_point, vector_lanes
from tinymlir.routines import RULES, Walker
from tinymlir.rows import shuffled
from tinymlir.scalars import index, stored


def view_of(b: Builder, node: Expr) -> View:
    """A node as it lies, if every element's place is a plain formula."""
    view = b.view(node)
    try:
        for expr in view.map.results:
            linear(expr, view.map.n_dims)
    except CompileError:  # a division, say: then a copy
        dense_ = b.dense(node)
        return View(dense_, ir.AffineMap.get_identity(len(node.shape)))
    return view


def unknown(b: Builder, node: Expr, part: Expr, others: Sequence[ir.Value],
            **attributes: ir.Attribute) -> ir.Value:
    """An operation that MLIR does not know; `part` comes first, with its map."""
    b.module.context.allow_unregistered_dialects = True
    view = view_of(b, part)
    attributes["map"] = ir.AffineMapAttr.get(view.map)
    attributes["extents"] = ir.DenseI64ArrayAttr.get(part.shape)
    kind = tensor_type(node.shape, node.dtype)
    operands = [view.tensor, *others]
    return ir.Operation.create(
        f"tinymlir.{node.op}", [kind], operands, attributes).result


@rule(OWN, Op.UPDATE)
def _(b: Builder, node: Expr) -> ir.Value:
    buffer, position, rows = node.operands
    return unknown(b, node, rows, [b.dense(position), b.dense(buffer)])


@rule(OWN, Op.ATTEND)
def _(b: Builder, node: Expr) -> ir.Value:
    q, position, keys, values, scale = node.operands
    divisor = ir.FloatAttr.get(stored(scale.dtype), float(scale.attrs["value"]))
    return unknown(b, node, q, [b.dense(x) for x in (position, keys, values)],
                   scale=divisor)


# %% 10_cache.md § On a GPU (2)
def start_of(op: ir.Operation, w: Walker) -> tuple[Linear, list[int]]:
    """Where the elements of an operation's first operand are; its extents."""
    map_ = ir.AffineMapAttr(op.attributes["map"]).value
    formula = w.place(op.operands[0]).address(map_)
    return formula, list(op.attributes["extents"])


def position_in(kernel: Kernel, where: Place, last: int) -> ir.Value:
    """The position as an index from 0 to `last`."""
    value = memref.load(kernel.pointers[id(where.array)], [index(where.offset)])
    number = arith.index_cast(ir.IndexType.get(), value)
    return arith.minsi(arith.maxsi(number, index(0)), index(last))


@rule(RULES, f"tinymlir.{Op.UPDATE}")
def update_rows(w: Walker, op: ir.Operation) -> None:
    """Rows in a buffer: in place, or in a copy of it."""
    rows, position, whole = op.operands
    source, where = w.place(rows), w.place(position)
    target = w.changed(whole, op.results[0])
    read, extents = start_of(op, w)
    last = shape_of(whole)[0] - extents[0]
    write = Linear(target.offset, target.strides)
    kind = target.array.element
    flat = len(extents) == 1  # then a vector may start anywhere
    lanes = 1 if flat else vector_lanes(extents, [(read, kind), (write, kind)])

    def body(kernel: Kernel, point: list[ir.Value]) -> None:
        first, *rest = point
        given = kernel.pointers[id(source.array)]
        numbers = load_lanes(given, read, point, lanes)
        there = [plus(first, position_in(kernel, where, last)), *rest]
        store_lanes(numbers, kernel.pointers[id(target.array)], write, there)

    arrays = list(dict.fromkeys((source.array, where.array, target.array)))
    w.run(each_point(arrays, extents, lanes, body), "update")


# %% 10_cache.md § On a GPU (3)
ROWS = 256  # that a block looks at together: one for each thread
AHEAD = 8  # rows of the values that a thread loads before it adds them up
WARPS = ROWS // WARP


def wider(*kinds: ir.Type) -> ir.Type:
    """The type that holds all of these floats."""
    return max(kinds, key=lambda kind: kind.width)


def of_block(x: ir.Value, combine: Callable, shared: ir.Value) -> ir.Value:
    """One number of all threads of a block, in every one of them."""
    for distance in (16, 8, 4, 2, 1):
        x = combine(x, shuffled(x, distance))
    lane = arith.remui(thread_id("x"), index(WARP))
    with guarded(arith.cmpi(arith.CmpIPredicate.eq, lane, index(0))):
        memref.store(x, shared, [arith.divui(thread_id("x"), index(WARP))])
    gpu.barrier()
    found = [memref.load(shared, [index(i)]) for i in range(WARPS)]
    for other in found[1:]:
        found[0] = combine(found[0], other)
    return found[0]


def summed(count: ir.Value, first: ir.Value, step: int, starts: Sequence[ir.Value],
           body: Callable[..., list[ir.Value]]) -> list[ir.Value]:
    """A loop that adds up: `body` gets the number and the sums so far."""
    loop = scf.ForOp(first, count, index(step), list(starts))
    with ir.InsertionPoint(loop.body):
        scf.YieldOp(body(loop.induction_variable, *loop.inner_iter_args))
    return list(loop.results)


# %% 10_cache.md § On a GPU (4)
@dataclass(eq=False)
class Attention:
    """What there is to know about one ATTEND."""

    query: Linear  # where the queries are, by head, number and column
    extents: Sequence[int]  # of the queries: heads, queries, columns
    places: Sequence[Place]  # queries, position, keys, values, result
    context: int  # rows of the buffers
    scale: ir.FloatAttr
    kernel: Kernel = field(init=False)

    def __post_init__(self) -> None:
        q, _, keys, _, result = (
            element_type(p.array.element) for p in self.places)
        self.dot = wider(q, keys)  # NumPy's promotions, step by step
        self.wide, self.kind = wider(self.dot, self.scale.type), result
        heads, _, size = self.extents
        self.row = Linear(0, (heads * size, size, 1))  # a buffer: row, head, column
        self.parts = max(ROWS // size, 1)  # threads that share a column
        self.columns = -(-size // ROWS)  # of a thread

    def pointer(self, number: int) -> ir.Value:
        return self.kernel.pointers[id(self.places[number].array)]


def element_type(name: str) -> ir.Type:
    return ir.Type.parse(name)


# %% 10_cache.md § On a GPU (5)
def score(a: Attention, block: Sequence[ir.Value], row: ir.Value) -> ir.Value:
    """The block's query times a row of the keys, divided by the scale."""
    size, (head, query) = a.extents[2], block
    q, _, keys, *_ = (place.array.element for place in a.places)
    lanes = vector_lanes([size], [(a.query, q), (a.row, keys)])

    def add(d: ir.Value, total: ir.Value) -> list[ir.Value]:
        x = load_lanes(a.pointer(0), a.query, [head, query, d], lanes)
        y = load_lanes(a.pointer(2), a.row, [row, head, d], lanes)
        for one, other in zip(x, y):
            total = product_of(one, other, total)
        return [total]

    zero = arith.constant(a.dot, 0.0)
    (made,) = summed(index(size), index(0), lanes, [zero], add)
    return arith.divf(widen(made, a.wide), arith.constant(a.wide, a.scale.value))


def columns(a: Attention) -> list[ir.Value]:
    """The columns of the values that a thread adds up."""
    size, thread = a.extents[2], thread_id("x")
    if a.columns == 1:
        return [arith.remui(thread, index(size))]
    return [arith.minsi(plus(thread, i * ROWS), index(size - 1))
            for i in range(a.columns)]


def first_of(a: Attention) -> ir.Value:
    """The first row that a thread adds up; the next is `parts` further on."""
    part = arith.divui(thread_id("x"), index(a.extents[2]))
    return arith.select(below(part, a.parts), part, index(ROWS))  # or none at all


# %% 10_cache.md § On a GPU (6)
def one_row(a: Attention, head: ir.Value, start: ir.Value, row: ir.Value,
            count: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
    """The weight of a row and a thread's values in it; zeros if there is none."""
    there = arith.cmpi(arith.CmpIPredicate.ult, row, count)
    row = arith.select(there, row, index(0))
    weight = memref.load(a.kernel.shared[1], [row])
    found = []
    for d in columns(a):
        (x,) = load(a.pointer(3), at(a.row, [plus(start, row), head, d]), 1)
        found.append(arith.select(there, x, arith.constant(x.type, 0.0)))
    return arith.select(there, weight, arith.constant(a.wide, 0.0)), found


def turn(a: Attention, block: Sequence[ir.Value], seen: ir.Value, start: ir.Value,
         largest: ir.Value, total: ir.Value, *sums: ir.Value) -> list[ir.Value]:
    """ROWS rows more: the largest score, the sum of the weights, and the sums."""
    few, weights, _ = a.kernel.shared
    row = plus(start, thread_id("x"))
    here = arith.cmpi(arith.CmpIPredicate.ult, row, seen)
    mine = score(a, block, arith.select(here, row, index(0)))
    mine = arith.select(here, mine, arith.constant(a.wide, -np.inf))
    new = arith.maximumf(largest, of_block(mine, arith.maximumf, few))
    weight = math.exp(arith.subf(mine, new))
    weight = arith.select(here, weight, arith.constant(a.wide, 0.0))
    fade = math.exp(arith.subf(largest, new))
    memref.store(weight, weights, [thread_id("x")])
    gpu.barrier()
    faded = [arith.mulf(x, widen(fade, a.kind)) for x in sums]
    count = arith.minsi(arith.subi(seen, start), index(ROWS))

    def add(row: ir.Value, *sums: ir.Value) -> list[ir.Value]:
        found = [one_row(a, block[0], start, plus(row, i * a.parts), count)
                 for i in range(AHEAD)]
        for weight, values in found:
            sums = [product_of(weight, x, old) for x, old in zip(values, sums)]
        return list(sums)

    added = summed(count, first_of(a), a.parts * AHEAD, faded, add)
    gpu.barrier()
    return [new, arith.addf(arith.mulf(total, fade), weight), *added]


# %% 10_cache.md § On a GPU (7)
def finish(a: Attention, block: Sequence[ir.Value], total: ir.Value,
           sums: Sequence[ir.Value]) -> None:
    """Add up what the threads of a column have, divide, and write."""
    few, _, partial = a.kernel.shared
    thread, size = thread_id("x"), a.extents[2]
    total = widen(of_block(total, arith.addf, few), a.kind)
    out = Linear(0, dense(a.extents))
    for i, (d, mine) in enumerate(zip(columns(a), sums)):
        memref.store(mine, partial, [thread])
        gpu.barrier()
        with guarded(below(thread, min(size - i * ROWS, ROWS))):
            found = memref.load(partial, [thread])
            for j in range(1, a.parts):
                other = memref.load(partial, [plus(thread, j * size)])
                found = arith.addf(found, other)
            store_lanes([arith.divf(found, total)], a.pointer(4), out, [*block, d])
        gpu.barrier()


def attention_kernel(a: Attention) -> Built:
    """A block for each head and query."""
    heads, n, _ = a.extents
    shared = (WARPS, str(a.wide)), (ROWS, str(a.wide)), (ROWS, str(a.kind))
    arrays = list(dict.fromkeys(p.array for p in a.places))
    a.kernel = Kernel(arrays, (ROWS, 1, 1), shared)
    with a.kernel.body:
        block = split(block_id("x"), [heads, n])
        position = position_in(a.kernel, a.places[1], a.context - n)
        seen = plus(position, block[1], 1)
        begin = [arith.constant(a.wide, -np.inf), arith.constant(a.wide, 0.0)]
        begin += [arith.constant(a.kind, 0.0)] * a.columns
        _, total, *sums = summed(seen, index(0), ROWS, begin, lambda start, *rest: (
            turn(a, block, seen, start, *rest)))
        finish(a, block, total, sums)
    return Built(a.kernel, (heads * n, 1, 1))


@rule(RULES, f"tinymlir.{Op.ATTEND}")
def attend_to_rows(w: Walker, op: ir.Operation) -> None:
    q, position, keys, values = op.operands
    query, extents = start_of(op, w)
    places = [w.place(q), w.place(position), w.dense(keys), w.dense(values),
              w.fresh(op.results[0])]
    scale = ir.FloatAttr(op.attributes["scale"])
    a = Attention(query, extents, places, shape_of(keys)[0], scale)
    w.run(attention_kernel(a), "attend")
