# Tangled from notebooks/10_cache.md: edit the chapter, not this file.

# %% 10_cache.md § Only the rows that are there (1)
"""UPDATE and ATTEND as linalg on tensors of any length (chapter 10)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mlir import ir
from mlir.dialects import arith, linalg, math, tensor

from tinymlir.arrays import (
    MLIR, Builder, accumulator, affine_map, combiner, dims, generic, neutral,
    operand)
from tinymlir.expr import Expr, Op, rule
from tinymlir.moves import here
from tinymlir.scalars import convert, index, number, stored

ANY = ir.ShapedType.get_dynamic_size()


def place(b: Builder, position: Expr, last: int) -> ir.Value:
    """The position as an index from 0 to `last`."""
    value = tensor.extract(b.dense(position), [])
    at = arith.index_cast(ir.IndexType.get(), value)
    return arith.minsi(arith.maxsi(at, index(0)), index(last))


@rule(MLIR, Op.UPDATE)
def insert_rows(b: Builder, node: Expr) -> ir.Value:
    """tensor.insert_slice at a place that is known at run time."""
    buffer, position, rows = node.operands
    at = place(b, position, len(buffer) - len(rows))
    n = len(node.shape)
    return tensor.insert_slice(
        b.dense(rows), b.dense(buffer), [at], [], [], [ANY, *[0] * (n - 1)],
        list(rows.shape), [1] * n)


# %% 10_cache.md § Only the rows that are there (2)
def first_rows(b: Builder, buffer: Expr, count: ir.Value, heads: int) -> ir.Value:
    """A buffer's first rows, as (count, heads, size): a view of it."""
    width = buffer.shape[1]
    flat = ir.RankedTensorType.get([ANY, width], stored(buffer.dtype))
    rows = tensor.extract_slice(
        flat, b.dense(buffer), [], [count], [], [0, 0], [ANY, width], [1, 1])
    split = ir.RankedTensorType.get(
        [ANY, heads, width // heads], stored(buffer.dtype))
    return tensor.expand_shape(split, rows, [[0], [1, 2]], [count],
                               [ANY, heads, width // heads])


def room(sizes: Sequence[Any], dtype: np.dtype, value: Any = None) -> ir.Value:
    """A tensor of sizes that may be known at run time only, perhaps filled."""
    init = tensor.empty(list(sizes), stored(dtype))
    return init if value is None else linalg.fill(number(value, dtype), outs=[init])


def each(inputs: Sequence[tuple[ir.Value, Sequence[ir.AffineExpr]]], init: ir.Value,
         body: Callable[..., ir.Value], kept: int = 3) -> ir.Value:
    """A generic over (heads, queries, rows); of the result, `kept` dimensions."""
    kinds = ["parallel"] * kept + ["reduction"] * (3 - kept)
    return generic([(x, affine_map(3, exprs)) for x, exprs in inputs], init,
                   affine_map(3, dims(3)[:kept]), kinds, body)


# %% 10_cache.md § Only the rows that are there (3)
@rule(MLIR, Op.ATTEND)
def attend_rows(b: Builder, node: Expr) -> ir.Value:
    """Scores of the rows that are there, softmax, and the mean of the values."""
    q, position, keys, values, scale = node.operands
    heads, n, size = q.shape
    at = place(b, position, len(keys) - n)
    seen = arith.addi(at, index(n))
    k, v = (first_rows(b, x, seen, heads) for x in (keys, values))
    h, i, t, d = dims(4)
    dtype = np.result_type(q.dtype, keys.dtype)
    query, query_map = operand(b, q, dtype, 4, [h, i, d])
    scores = linalg.contract(
        query, k, outs=[room([heads, n, seen], dtype, 0)],
        indexing_maps=[
            query_map, affine_map(4, [t, h, d]), affine_map(4, [h, i, t])])
    wide = np.result_type(dtype, scale.dtype)
    scores = masked(scores, at, scale, dtype, wide)
    weights = weights_of(scores, seen, q.shape, wide)
    return linalg.contract(
        weights, v, outs=[room(q.shape, node.dtype, 0)], indexing_maps=[
            affine_map(4, [h, i, d]), affine_map(4, [d, h, t]),
            affine_map(4, [h, i, t])])


# %% 10_cache.md § Only the rows that are there (4)
def masked(scores: ir.Value, at: ir.Value, scale: Expr, dtype: np.dtype,
           wide: np.dtype) -> ir.Value:
    """The scores divided by the scale, and -inf where a row comes later."""
    shape = ir.RankedTensorType(scores.type).shape
    sizes = [*shape[:2], tensor.dim(scores, index(2))]

    def body(x: ir.Value, _: ir.Value) -> ir.Value:
        divisor = number(scale.attrs["value"], wide)
        y = arith.divf(convert(x, dtype, wide), divisor)
        last = arith.addi(at, here(1))
        later = arith.cmpi(arith.CmpIPredicate.sgt, here(2), last)
        return arith.select(later, number(-np.inf, wide), y)

    return each([(scores, dims(3))], room(sizes, wide), body)


def weights_of(x: ir.Value, seen: ir.Value, shape: Sequence[int], dtype: np.dtype
            ) -> ir.Value:
    """Weights that add up to 1 along the rows, in the dtypes of chapter 2."""
    d, pair, sizes = dims(3), shape[:2], [*shape[:2], seen]
    wide = accumulator(Op.SUM, dtype)
    largest = each([(x, d)], room(pair, dtype, neutral(Op.MAX, dtype)),
                   combiner(Op.MAX, dtype), kept=2)
    powers = each([(x, d), (largest, d[:2])], room(sizes, dtype),
                  lambda a, m, _: math.exp(arith.subf(a, m)))
    add = combiner(Op.SUM, dtype)
    total = each([(powers, d)], room(pair, wide, 0),
                 lambda a, old: add(old, convert(a, dtype, wide)), kept=2)
    return each([(powers, d), (total, d[:2])], room(sizes, dtype),
                lambda a, s, _: arith.divf(a, convert(s, wide, dtype)))
