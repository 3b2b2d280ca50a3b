# Tangled from notebooks/02_builder.md: edit the chapter, not this file.

# %% 02_builder.md § Arrays (1)
"""Whole-array operations as linalg on tensors (chapter 2)."""
from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from mlir import ir
from mlir.dialects import arith, bufferization, linalg, tensor

from tinymlir.errors import TooLargeError
from tinymlir.expr import (
    ELEMENTWISE, REDUCTIONS, VIEWS, Expr, Op, is_number, rule)
from tinymlir.scalars import (
    SCALAR, convert, from_memory, number, scalar, stored, to_memory)

MLIR: dict[Op, Callable[..., Any]] = {}


def tensor_type(shape: Sequence[int], dtype: np.dtype) -> ir.RankedTensorType:
    return ir.RankedTensorType.get(shape, stored(dtype))


@cache
def memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def empty(shape: Sequence[int], dtype: np.dtype) -> ir.Value:
    """A tensor whose contents do not matter yet. Raises TooLargeError."""
    if math.prod(shape) * dtype.itemsize > memory():
        raise TooLargeError(f"an array of shape {tuple(shape)} and dtype {dtype} "
                            f"does not fit into {memory() >> 30} GiB of memory")
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

    def __init__(self, module: ir.Module) -> None:
        self.module = module
        self.views: dict[int, View] = {}
        self.depths: dict[int, int] = {}  # elementwise operations in a row, so far
        self.functions: dict[int, str] = {}  # of graphs that are called
        self.results: dict[int, list[ir.Value]] = {}  # of calls

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
            exprs = list(view.map.results)
            order = [exprs.index(d) for d in dims(n)]
            op = linalg.transpose(view.tensor, outs=[init], permutation=order)
            value = op.result[0]
        else:
            value = generic([(view.tensor, view.map)], init, identity,
                            ["parallel"] * n, lambda x, _: x)
        self.views[id(node)] = View(value, identity)
        return value

    def into(self, node: Expr, target: Expr | None) -> ir.Value:
        """The node as a tensor; in the memory of an argument, if one is named."""
        if target is None:
            return self.dense(node)
        value = bufferization.materialize_in_destination(
            self.dense(target).type, self.dense(node), self.dense(target))
        self.views[id(node)] = View(value, self.views[id(node)].map)
        return value

    def add(self, node: Expr) -> None:
        """Build one node by its rule in the table."""
        above = [self.depths.get(id(x), 0) for x in node.operands]
        if node.op in ELEMENTWISE | VIEWS:
            self.depths[id(node)] = max(above, default=0) + (node.op in ELEMENTWISE)
        rule_ = MLIR[node.op] if not_empty(node) else nothing
        result = rule_(self, node)
        if not isinstance(result, View):
            result = View(result, ir.AffineMap.get_identity(len(node.shape)))
        self.views[id(node)] = result


# %% 02_builder.md § Views are maps (3)
def not_empty(node: Expr) -> bool:
    """Are there elements to compute, and elements to compute them from?"""
    if node.op is Op.CALL:  # its body looks after itself
        return True
    partly = node.op in (Op.CONCATENATE, Op.RESULT)  # some operands may be empty
    return bool(node.size) and (partly or all(x.size for x in node.operands))


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
DEEP = 256  # elementwise operations in a row that may be fused


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

    value = generic(
        [(v.tensor, v.map) for v in views], empty(node.shape, node.dtype),
        ir.AffineMap.get_identity(n), ["parallel"] * n, body)
    if b.depths[id(node)] % DEEP == 0:
        value = linalg.copy(value, outs=[empty(node.shape, node.dtype)])
    return value


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
    start = neutral(node.op, wide)
    init = filled(start, shape, wide)
    combine = combiner(node.op, wide)
    view, d = view_of_all(b, x, axes), dims(n)

    def body(v: ir.Value, old: ir.Value) -> ir.Value:
        before = old if axes else number(start, wide)
        return combine(before, convert(v, x.dtype, wide))

    total = generic(
        [(view.tensor, view.map)], init, affine_map(n, [d[i] for i in kept]),
        ["reduction" if i in axes else "parallel" for i in range(n)], body)
    if wide != node.dtype:
        total = cast(total, shape, wide, node.dtype)
    exprs = [e for i, e in enumerate(dims(len(node.shape))) if i not in axes]
    exprs = exprs if node.attrs["keepdims"] else dims(len(shape))
    return View(total, affine_map(len(node.shape), exprs))


def view_of_all(b: Builder, x: Expr, axes: Sequence[int]) -> View:
    """A view whose map names the axes; x is copied if it is broadcast along one."""
    named, d = list(b.view(x).map.results), dims(len(x.shape))
    if any(d[i] not in named for i in axes):
        b.dense(x)
    return b.view(x)


def cast(value: ir.Value, shape: Sequence[int], old: np.dtype, new: np.dtype
         ) -> ir.Value:
    """A whole tensor in another dtype."""
    identity = ir.AffineMap.get_identity(len(shape))
    return generic([(value, identity)], empty(shape, new), identity,
                   ["parallel"] * len(shape), lambda v, _: convert(v, old, new))


# %% 02_builder.md § Matrix products (1)
@rule(MLIR, Op.MATMUL)
def matmul(b: Builder, node: Expr) -> ir.Value:
    """linalg.matmul, linalg.batch_matmul, or linalg.contract for other orders."""
    n = len(node.shape) + 1
    *batch, i, j, k = dims(n)
    left, right = node.operands
    init = filled(0, node.shape, node.dtype)
    (a, a_map), (c, c_map) = (
        operand(b, x, node.dtype, n, [*batch, *last])
        for x, last in ((left, (i, k)), (right, (k, j))))
    maps = [a_map, c_map, affine_map(n, [*batch, i, j])]
    plain = all(list(m.results)[:-2] == batch for m in maps)
    named = linalg.batch_matmul if batch else linalg.matmul
    product = named if plain else linalg.contract
    return product(a, c, outs=[init], indexing_maps=maps)


def operand(b: Builder, x: Expr, dtype: np.dtype, n: int,
            exprs: list[ir.AffineExpr]) -> tuple[ir.Value, ir.AffineMap]:
    """A factor and its indexing map: read as stored if its rows or columns are."""
    view = b.view(x)
    last_two = dims(len(x.shape))[-2:]
    if not view.map.is_permutation or view.map.results[-1] not in last_two:
        b.dense(x)
        view = b.view(x)
    value = view.tensor
    if x.dtype != dtype and dtype.kind != "f" or x.dtype.kind != dtype.kind:
        shape = ir.RankedTensorType(value.type).shape
        value = cast(value, shape, x.dtype, dtype)
    return value, view.through(n, exprs).map
