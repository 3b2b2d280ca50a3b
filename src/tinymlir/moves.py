# Tangled from notebooks/02_builder.md: edit the chapter, not this file.

# %% 02_builder.md § Views and copies (1)
"""Operations that move elements without computing (chapter 2)."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mlir import ir
from mlir.dialects import arith, linalg, tensor

from tinymlir.arrays import (
    MLIR, Builder, View, aligned, dims, empty, generic, tensor_type, zero)
from tinymlir.expr import Expr, Op, rule
from tinymlir.scalars import index, like


@rule(MLIR, Op.TRANSPOSE)
def transpose(b: Builder, node: Expr) -> View:
    d, axes = dims(len(node.shape)), node.attrs["axes"]
    return b.view(node.operands[0]).through(
        len(d), [d[axes.index(i)] for i in range(len(d))])


@rule(MLIR, Op.BROADCAST)
def broadcast(b: Builder, node: Expr) -> View:
    (x,) = node.operands
    return aligned(b.view(x), x.shape, node.shape)


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
        if size != length or not group:  # an old axis of length one may get none
            return None
        groups.append(group)
    rest = list(range(at, len(new)))
    if any(new[i] != 1 for i in rest):
        return None
    groups[-1] += rest
    return groups


# %% 02_builder.md § Views and copies (3)
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
    plain = x.op is not Op.MATMUL  # MLIR would turn a product into loops with it
    if plain and (groups := splits(x.shape, new)) is not None:
        return tensor.expand_shape(result, value, groups, [], list(new))
    index = ir.IndexType.get()
    attr = ir.DenseElementsAttr.get(np.array(new, np.int64), type=index)
    return tensor.reshape(result, value, arith.constant(attr.type, attr))


# %% 02_builder.md § Views and copies (4)
@rule(MLIR, Op.SLICE)
def slice_(b: Builder, node: Expr) -> ir.Value:
    (x,), slices = node.operands, node.attrs["slices"]
    source, result = b.dense(x), tensor_type(node.shape, node.dtype)
    starts, steps = [s.start for s in slices], [s.step for s in slices]
    if min(steps, default=1) > 0 and steps[-1:] in ([], [1]):
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


# %% 02_builder.md § Views and copies (5)
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
        negative = arith.cmpi(arith.CmpIPredicate.slt, at, index(0))
        at = arith.select(negative, wrapped, at)
        at = arith.minsi(arith.maxsi(at, index(0)), index(x.shape[0] - 1))
        return tensor.extract(source, [at, *(here(i) for i in range(lead, n))])

    return generic([(where.tensor, where.map)], empty(node.shape, node.dtype),
                   ir.AffineMap.get_identity(n), ["parallel"] * n, body)
