# Tangled from notebooks/02_builder.md: edit the chapter, not this file.

# %% 02_builder.md § Arrays (1)
"""From the expression graph to linalg on tensors (chapter 2)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from mlir import ir
from mlir.dialects import arith, func, linalg, tensor

from tinymlir.expr import ELEMENTWISE, REDUCTIONS, Expr, Op, rule
from tinymlir.graph import Graph
from tinymlir.scalars import (
    SCALAR, convert, from_memory, is_number, like, number, scalar, stored, to_memory)

MLIR: dict[Op, Callable[..., Any]] = {}


def tensor_type(shape: Sequence[int], dtype: np.dtype) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(shape, stored(dtype))


def empty(shape: Sequence[int], dtype: np.dtype) -> ir.Value:
    """A tensor whose contents do not matter yet."""
    return tensor.empty(list(shape), stored(dtype))


def filled(value: Any, shape: Sequence[int], dtype: np.dtype) -> ir.Value:
    """A tensor full of one number."""
    number_ = to_memory(number(value, dtype))
    return linalg.fill(number_, outs=[empty(shape, dtype)])


# %% 02_builder.md § One operation for everything (1)
def dims(n: int) -> list[ir.AffineExpr]:
    return [ir.AffineDimExpr.get(i) for i in range(n)]


def zero() -> ir.AffineExpr:
    return ir.AffineConstantExpr.get(0)


def affine_map(n: int, exprs: Sequence[ir.AffineExpr]) -> ir.AffineMap:
    return ir.AffineMap.get(n, 0, list(exprs))


def generic(inputs: Sequence[tuple[ir.Value, ir.AffineMap]], init: ir.Value,
            out_map: ir.AffineMap, kinds: Sequence[str],
            body: Callable[..., ir.Value]) -> ir.Value:
    """linalg.generic; `body` gets one number per input and the old output."""
    maps = [*(m for _, m in inputs), out_map]
    values = [value for value, _ in inputs]
    op = linalg.GenericOp([init.type], values, [init], maps, kinds)
    block = op.regions[0].blocks.append(
        *(ir.RankedTensorType(v.type).element_type for v in (*values, init)))
    with ir.InsertionPoint(block):
        numbers = [from_memory(x) for x in block.arguments]
        linalg.YieldOp([to_memory(body(*numbers))])
    return op.result


# %% 02_builder.md § Views are maps (1)
@dataclass(frozen=True)
class View:
    """Where the numbers of a node are: a tensor, read through a map."""

    tensor: ir.Value
    map: ir.AffineMap

    def through(self, n: int, exprs: Sequence[ir.AffineExpr]) -> View:
        """The view seen from n new dimensions, each old one given as a formula."""
        inner = affine_map(n, exprs)
        return View(self.tensor, affine_map(n, [e.compose(inner)
                                                for e in self.map.results]))


# %% 02_builder.md § Views are maps (2)
class Builder:
    """Builds one function; holds a View for every node that has been built."""

    def __init__(self) -> None:
        self.views: dict[int, View] = {}

    def view(self, node: Expr) -> View:
        """The view of a node; a constant number becomes a 0-d tensor here."""
        if is_number(node) and id(node) not in self.views:
            fill = filled(node.attrs["value"], (), node.dtype)
            self.views[id(node)] = View(fill, ir.AffineMap.get_identity(0))
        return self.views[id(node)]

    def dense(self, node: Expr) -> ir.Value:
        """The node as a tensor in its own order; copies if it is a view."""
        view = self.view(node)
        n = len(node.shape)
        identity = ir.AffineMap.get_identity(n)
        if view.map == identity:
            return view.tensor
        init = empty(node.shape, node.dtype)
        if view.map.is_permutation:
            stored = list(view.map.results)
            order = [stored.index(d) for d in dims(n)]
            op = linalg.transpose(view.tensor, outs=[init], permutation=order)
            value = op.result[0]
        else:
            value = generic([(view.tensor, view.map)], init, identity,
                            ["parallel"] * n, lambda x, _: x)
        self.views[id(node)] = View(value, identity)
        return value

    def add(self, node: Expr) -> None:
        """Build one node by its rule in the table."""
        rule_ = MLIR[node.op] if not_empty(node) else nothing
        result = rule_(self, node)
        if not isinstance(result, View):
            result = View(result, ir.AffineMap.get_identity(len(node.shape)))
        self.views[id(node)] = result


# %% 02_builder.md § Views are maps (3)
def not_empty(node: Expr) -> bool:
    """Are there elements to compute, and elements to compute them from?"""
    some = any if node.op is Op.CONCATENATE else all
    return bool(node.size) and some(x.size for x in node.operands)


def nothing(_: Builder, node: Expr) -> ir.Value:
    """What comes of no elements: none, or zeros."""
    return filled(0, node.shape, node.dtype)


# %% 02_builder.md § Elementwise nodes (1)
def aligned(view: View, shape: Sequence[int], out: Sequence[int]) -> View:
    """The view as seen from the output's index space: NumPy's broadcasting."""
    n, offset = len(out), len(out) - len(shape)
    d = dims(n)
    exprs = [zero() if length == 1 and out[i + offset] != 1 else d[i + offset]
             for i, length in enumerate(shape)]
    return view.through(n, exprs)


# %% 02_builder.md § Elementwise nodes (2)
@rule(MLIR, *ELEMENTWISE)
def elementwise(b: Builder, node: Expr) -> ir.Value:
    """One linalg.generic over the shape of the result."""
    n = len(node.shape)
    arrays = [x for x in node.operands if not is_number(x)]
    views = [aligned(b.view(x), x.shape, node.shape) for x in arrays]

    def body(*numbers: ir.Value) -> ir.Value:
        given = iter(numbers)
        values = [number(x.attrs["value"], x.dtype) if is_number(x) else next(given)
                  for x in node.operands]
        return scalar(node, values)

    return generic([(v.tensor, v.map) for v in views], empty(node.shape, node.dtype),
                   ir.AffineMap.get_identity(n), ["parallel"] * n, body)


# %% 02_builder.md § Reductions (1)
COMBINE = {Op.SUM: Op.ADD, Op.MAX: Op.MAXIMUM, Op.MIN: Op.MINIMUM}


def neutral(op: Op, dtype: np.dtype) -> Any:
    """The value that changes nothing: 0, or the far end of the dtype."""
    if op is Op.SUM:
        return 0
    if dtype.kind == "i":
        return np.iinfo(dtype).min if op is Op.MAX else np.iinfo(dtype).max
    low, high = {"f": (-np.inf, np.inf), "b": (0, 1)}[dtype.kind]
    return low if op is Op.MAX else high


def accumulator(op: Op, dtype: np.dtype) -> np.dtype:
    return np.dtype("float64") if op is Op.SUM and dtype.kind == "f" else dtype


def combiner(op: Op, dtype: np.dtype) -> Callable[..., ir.Value]:
    """How two partial results become one; a sum may be taken in any order."""
    if op is Op.SUM and dtype.kind == "f":
        return partial(arith.addf, fastmath=arith.FastMathFlags.reassoc)
    return SCALAR[COMBINE[op], dtype.kind]


# %% 02_builder.md § Reductions (2)
@rule(MLIR, *REDUCTIONS)
def reduction(b: Builder, node: Expr) -> View:
    """linalg.generic with reduction iterators; keepdims is a view."""
    (x,), axes = node.operands, node.attrs["axis"]
    n, wide = len(x.shape), accumulator(node.op, node.dtype)
    kept = [i for i in range(n) if i not in axes]
    shape = [x.shape[i] for i in kept]
    init = filled(neutral(node.op, wide), shape, wide)
    combine = combiner(node.op, wide)
    view, d = b.view(x), dims(n)
    total = generic(
        [(view.tensor, view.map)], init, affine_map(n, [d[i] for i in kept]),
        ["reduction" if i in axes else "parallel" for i in range(n)],
        lambda v, old: combine(old, convert(v, x.dtype, wide)))
    if wide != node.dtype:
        total = cast(total, shape, wide, node.dtype)
    exprs = [e for i, e in enumerate(dims(len(node.shape))) if i not in axes]
    exprs = exprs if node.attrs["keepdims"] else dims(len(shape))
    return View(total, affine_map(len(node.shape), exprs))


def cast(value: ir.Value, shape: Sequence[int], old: np.dtype, new: np.dtype) -> ir.Value:
    """A whole tensor in another dtype."""
    identity = ir.AffineMap.get_identity(len(shape))
    return generic([(value, identity)], empty(shape, new), identity,
                   ["parallel"] * len(shape), lambda v, _: convert(v, old, new))


# %% 02_builder.md § Matrix products (1)
@rule(MLIR, Op.MATMUL)
def matmul(b: Builder, node: Expr) -> ir.Value:
    """linalg.matmul or linalg.batch_matmul."""
    n = len(node.shape) + 1
    *batch, i, j, k = dims(n)
    left, right = node.operands
    init = filled(0, node.shape, node.dtype)
    (a, a_map), (c, c_map) = (
        operand(b, x, node.dtype, n, [*batch, *last])
        for x, last in ((left, (i, k)), (right, (k, j))))
    named = linalg.batch_matmul if batch else linalg.matmul
    maps = [a_map, c_map, affine_map(n, [*batch, i, j])]
    return named(a, c, outs=[init], indexing_maps=maps)


def operand(b: Builder, x: Expr, dtype: np.dtype, n: int,
            exprs: list[ir.AffineExpr]) -> tuple[ir.Value, ir.AffineMap]:
    """A factor and its indexing map: read as stored if that is a plain matrix."""
    d, view = dims(len(x.shape)), b.view(x)
    plain = [*d[:-2], d[-2], d[-1]], [*d[:-2], d[-1], d[-2]]
    if list(view.map.results) not in plain:
        b.dense(x)
        view = b.view(x)
    value = view.tensor
    if x.dtype != dtype and dtype.kind != "f" or x.dtype.kind != dtype.kind:
        shape = ir.RankedTensorType(value.type).shape
        value = cast(value, shape, x.dtype, dtype)
    return value, view.through(n, exprs).map


# %% 02_builder.md § Views and copies (1)
@rule(MLIR, Op.TRANSPOSE)
def transpose(b: Builder, node: Expr) -> View:
    d, axes = dims(len(node.shape)), node.attrs["axes"]
    return b.view(node.operands[0]).through(
        len(d), [d[axes.index(i)] for i in range(len(d))])


@rule(MLIR, Op.BROADCAST)
def broadcast(b: Builder, node: Expr) -> View:
    (x,) = node.operands
    return aligned(b.view(x), x.shape, node.shape)


@rule(MLIR, Op.RESHAPE)
def reshape(b: Builder, node: Expr) -> View | ir.Value:
    """Unit axes change the map, a split axis is expand_shape, the rest reshapes."""
    (x,), new = node.operands, node.shape
    d = [e for e, length in zip(dims(len(new)), new) if length != 1]
    if [n for n in x.shape if n != 1] == [n for n in new if n != 1]:
        given = iter(d)
        exprs = [zero() if length == 1 else next(given) for length in x.shape]
        return b.view(x).through(len(new), exprs)
    value, result = b.dense(x), tensor_type(new, x.dtype)
    if (groups := splits(x.shape, new)) is not None:
        return tensor.expand_shape(result, value, groups, [], list(new))
    index = ir.IndexType.get()
    attr = ir.DenseElementsAttr.get(np.array(new, np.int64), type=index)
    return tensor.reshape(result, value, arith.constant(attr.type, attr))


# %% 02_builder.md § Views and copies (2)
def splits(old: Sequence[int], new: Sequence[int]) -> list[list[int]] | None:
    """Which new axes each old axis splits into; None if it is not a split."""
    if 0 in old or not old:
        return None
    groups, at = [], 0
    for length in old:
        group, size = [], 1
        while at < len(new) and (size < length or not group):
            group.append(at)
            size *= new[at]
            at += 1
        if size != length:
            return None
        groups.append(group)
    rest = list(range(at, len(new)))
    if any(new[i] != 1 for i in rest):
        return None
    groups[-1] += rest
    return groups


# %% 02_builder.md § Views and copies (3)
@rule(MLIR, Op.SLICE)
def slice_(b: Builder, node: Expr) -> ir.Value:
    (x,), slices = node.operands, node.attrs["slices"]
    source, result = b.dense(x), tensor_type(node.shape, node.dtype)
    starts, steps = [s.start for s in slices], [s.step for s in slices]
    if min(steps, default=1) > 0:
        return tensor.extract_slice(
            result, source, [], [], [], starts, list(node.shape), steps)
    n = len(node.shape)

    def body(_: ir.Value) -> ir.Value:
        at = [arith.addi(index(start), arith.muli(here(i), index(step)))
              for i, (start, step) in enumerate(zip(starts, steps))]
        return tensor.extract(source, at)

    return generic([], empty(node.shape, node.dtype), ir.AffineMap.get_identity(n),
                   ["parallel"] * n, body)


def here(i: int) -> ir.Value:
    """The i-th coordinate of the point a generic body is at."""
    return linalg.IndexOp(i).result


def index(value: int) -> ir.Value:
    return arith.constant(ir.IndexType.get(), value)


# %% 02_builder.md § Views and copies (4)
@rule(MLIR, Op.CONCATENATE)
def concatenate(b: Builder, node: Expr) -> ir.Value:
    """Each part is inserted at its offset."""
    value, axis, at = empty(node.shape, node.dtype), node.attrs["axis"], 0
    for x in (x for x in node.operands if x.size):
        offsets = [at if i == axis else 0 for i in range(len(x.shape))]
        value = tensor.insert_slice(b.dense(x), value, [], [], [], offsets,
                                    list(x.shape), [1] * len(x.shape))
        at += x.shape[axis]
    return value


@rule(MLIR, Op.TRIU, Op.TRIL)
def triangle(b: Builder, node: Expr) -> ir.Value:
    """Keep the elements on one side of the k-th diagonal."""
    (x,), n = node.operands, len(node.shape)
    view = b.view(x)
    keep = (arith.CmpIPredicate.sge if node.op is Op.TRIU
            else arith.CmpIPredicate.sle)

    def body(v: ir.Value, _: ir.Value) -> ir.Value:
        diagonal = arith.subi(here(n - 1), here(n - 2))
        inside = arith.cmpi(keep, diagonal, index(node.attrs["k"]))
        return arith.select(inside, v, like(v, 0))

    return generic([(view.tensor, view.map)], empty(node.shape, node.dtype),
                   ir.AffineMap.get_identity(n), ["parallel"] * n, body)


# %% 02_builder.md § Gathering rows (1)
@rule(MLIR, Op.GATHER)
def gather(b: Builder, node: Expr) -> ir.Value:
    """Rows of the first operand; negative indices count from the end."""
    x, rows = node.operands
    source, view, n = b.dense(x), b.view(rows), len(node.shape)
    lead = len(rows.shape)
    where = view.through(n, dims(n)[:lead])

    def body(row: ir.Value, _: ir.Value) -> ir.Value:
        at = arith.index_cast(ir.IndexType.get(), row)
        wrapped = arith.addi(at, index(x.shape[0]))
        at = arith.select(arith.cmpi(arith.CmpIPredicate.slt, at, index(0)), wrapped, at)
        at = arith.minsi(arith.maxsi(at, index(0)), index(x.shape[0] - 1))
        return tensor.extract(source, [at, *(here(i) for i in range(lead, n))])

    return generic([(where.tensor, where.map)], empty(node.shape, node.dtype),
                   ir.AffineMap.get_identity(n), ["parallel"] * n, body)


# %% 02_builder.md § The function (1)
READ_ONLY = {"llvm.noalias": ir.UnitAttr.get,
             "bufferization.writable": lambda: ir.BoolAttr.get(False)}


def build(graph: Graph, name: str = "main") -> ir.Module:
    """A verified module with one function; call it inside an MLIR context."""
    with ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            build_function(graph, name)
    module.operation.verify()
    return module


# %% 02_builder.md § The function (2)
def build_function(graph: Graph, name: str) -> func.FuncOp:
    """The function of a graph, at the current insertion point."""
    params, outputs = graph.arguments, graph.returned
    types = [[tensor_type(x.shape, x.dtype) for x in xs] for xs in (params, outputs)]
    function = func.FuncOp(name, ir.FunctionType.get(*types))
    marks = ir.DictAttr.get({key: make() for key, make in READ_ONLY.items()})
    function.arg_attrs = ir.ArrayAttr.get([marks] * len(params))
    block = function.add_entry_block()
    builder = Builder()
    with ir.InsertionPoint(block):
        for node, value in zip(params, block.arguments):
            identity = ir.AffineMap.get_identity(len(node.shape))
            builder.views[id(node)] = View(value, identity)
        for node in graph.nodes:
            if node.op not in (Op.INPUT, Op.CONSTANT):
                builder.add(node)
        func.ReturnOp([builder.dense(node) for node in outputs])
    return function
