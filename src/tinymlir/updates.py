# Tangled from notebooks/10_cache.md: edit the chapter, not this file.

# %% 10_cache.md § Two operations (1)
"""Rows of a buffer, written and attended to (chapter 10)."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tinymlir import compiler, plan
from tinymlir.errors import (
    DTypeError, OutOfRangeError, ShapeError, UnsupportedError)
from tinymlir.explain import FLOPS
from tinymlir.expr import (
    NUMPY, TYPE, Expr, Op, TensorType, as_expr, constant, located, make, rule)
from tinymlir.graph import BOUNDS, Graph, rewrite, same
from tinymlir.jit import ELSEWHERE
from tinymlir.numpy_api import astype

compiler.RULES.append("tinymlir.updates_mlir")
plan.RULES.append("tinymlir.updates_gpu")
Array = Any  # an np.ndarray, or a traced value in its place


def check_position(position: TensorType) -> None:
    if position.shape or position.dtype.kind != "i":
        raise DTypeError(f"position: expected one integer, got {position}")


@rule(TYPE, Op.UPDATE)
def _(buffer: TensorType, position: TensorType, rows: TensorType) -> TensorType:
    check_position(position)
    fits = rows.shape[1:] == buffer.shape[1:] and rows.shape and buffer.shape
    if not fits or rows.shape[0] > buffer.shape[0]:
        raise ShapeError(f"rows of {rows} do not fit into a buffer of {buffer}")
    if rows.dtype != buffer.dtype:
        raise DTypeError(f"rows of {rows} in a buffer of {buffer}")
    return buffer


@rule(NUMPY, Op.UPDATE)
def _(buffer: np.ndarray, position: Any, rows: np.ndarray) -> np.ndarray:
    at = checked(position, len(buffer) - len(rows))
    new = buffer.copy()
    new[at:at + len(rows)] = rows
    return new


# %% 10_cache.md § Two operations (2)
OUTSIDE = "position {{}} is out of bounds: {} rows fit at 0 to {}"


def checked(position: Any, last: int) -> int:
    """The position as an int. Raises OutOfRangeError."""
    at = int(position)
    if not 0 <= at <= last:
        raise OutOfRangeError(
            f"position {at} is out of bounds: expected 0 to {last}")
    return at


def room(size: int, rows: int) -> tuple[int, int, str]:
    return 0, size - rows, OUTSIDE.format(rows, size - rows)


BOUNDS[Op.UPDATE] = lambda x: room(len(x.operands[0]), len(x.operands[2]))
BOUNDS[Op.ATTEND] = lambda x: room(len(x.operands[2]), x.shape[1])
FLOPS[Op.ATTEND] = lambda x: 4 * x.size * len(x.operands[2])  # at most


# %% 10_cache.md § Two operations (3)
@rule(TYPE, Op.ATTEND)
def _(q: TensorType, position: TensorType, keys: TensorType, values: TensorType,
      scale: TensorType) -> TensorType:
    check_position(position)
    if len(q.shape) != 3 or any(len(x.shape) != 2 for x in (keys, values)):
        raise ShapeError(f"attend: expected queries (H, N, D) and buffers "
                         f"(C, H * D), got {q}, {keys} and {values}")
    heads, n, size = q.shape
    if {keys.shape, values.shape} != {(keys.shape[0], heads * size)}:
        raise ShapeError(f"attend: queries {q} do not fit {keys} and {values}")
    if n > keys.shape[0]:
        raise ShapeError(f"attend: {n} queries, but buffers {keys} and {values}")
    if any(x.dtype.kind != "f" for x in (q, keys, values, scale)):
        raise DTypeError("attend: expected arrays of floats")
    dtypes = q.dtype, keys.dtype, scale.dtype, values.dtype
    return TensorType(q.shape, np.result_type(*dtypes))


@rule(NUMPY, Op.ATTEND)
def _(q: np.ndarray, position: Any, keys: np.ndarray, values: np.ndarray,
      scale: Any) -> np.ndarray:
    heads, n, size = q.shape
    at = checked(position, len(keys) - n)
    seen = at + n
    k, v = (x[:seen].reshape(seen, heads, size).transpose(1, 0, 2)
            for x in (keys, values))
    later = np.arange(seen) > at + np.arange(n)[:, None]
    scores = np.where(later, -np.inf, q @ k.transpose(0, 2, 1) / scale)
    powers = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return powers / np.sum(powers, axis=-1, keepdims=True) @ v


# %% 10_cache.md § Two operations (4)
def applied(op: Op, *operands: Any) -> Array:
    """The node if an operand is traced, else what NumPy makes of the arrays."""
    nodes = [as_expr(x) for x in operands]
    node = make(op, *nodes)
    if any(isinstance(x, Expr) for x in operands):
        if nodes[1].op is Op.CONSTANT:
            checked(nodes[1].attrs["value"], BOUNDS[op](node)[1])
        nothing = op is Op.UPDATE and not nodes[2].shape[0]
        return nodes[0] if nothing else node
    return NUMPY[op](*map(np.asarray, operands))


def update(buffer: Array, rows: Array, position: Array) -> Array:
    """The buffer (C, ...) with rows (N, ...) from a position on.

    The rows take the buffer's dtype. Raises OutOfRangeError if they do not fit
    there, ShapeError or DTypeError if they do not fit at all."""
    if not isinstance(rows, Expr):
        rows = np.asarray(rows, buffer.dtype)
    elif rows.dtype != buffer.dtype:
        rows = astype(rows, buffer.dtype)
    return located(applied, Op.UPDATE, buffer, position, rows)


def attend(q: Array, keys: Array, values: Array, position: Array, scale: Any
           ) -> Array:
    """Causal attention of queries (H, N, D) to buffers (C, H * D): (H, N, D).

    Query i is at `position + i` and sees the rows up to there; the scores are
    divided by the number `scale`. Raises what `update` raises."""
    if isinstance(scale, Expr) or np.ndim(scale):
        raise UnsupportedError("attend: scale has to be a number")
    dtype = np.result_type(q.dtype, keys.dtype, scale)  # of a Python float: theirs
    return located(applied, Op.ATTEND, q, position, keys, values,
                   np.asarray(scale, dtype))


# %% 10_cache.md § Where nothing grows (1)
def bounded(position: Expr, last: int) -> Expr:
    """The position; looking it up in a list of the right ones is what checks it."""
    fine = constant(np.arange(last + 1))
    beyond = np.where(position < 0, last + 1, position)
    return fine[beyond]


def update_all(buffer: Expr, position: Expr, rows: Expr) -> Expr:
    """UPDATE by choosing, for each row of the buffer, the old or a new one."""
    at = bounded(position, len(buffer) - len(rows))
    turn = np.arange(len(buffer)) - at
    new = (turn >= 0) & (turn < len(rows))
    picked = rows[np.where(new, turn, 0)]
    return np.where(new.reshape(-1, *[1] * (buffer.ndim - 1)), picked, buffer)


def attend_all(q: Expr, position: Expr, keys: Expr, values: Expr, scale: Expr
               ) -> Expr:
    """ATTEND to the whole buffers, of which only some rows count."""
    heads, n, size = q.shape
    at, row = bounded(position, len(keys) - n), np.arange(len(keys))
    seen = (row < at + n)[:, None]
    k, v = (np.where(seen, x, 0.0).reshape(len(x), heads, size).transpose(1, 0, 2)
            for x in (keys, values))
    later = row > at + np.arange(n)[:, None]
    scores = np.where(later, -np.inf, q @ k.transpose(0, 2, 1) / scale)
    powers = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return powers / np.sum(powers, axis=-1, keepdims=True) @ v


# %% 10_cache.md § Where nothing grows (2)
SPELLED: dict[Op, Callable[..., Expr]] = {
    Op.UPDATE: update_all, Op.ATTEND: attend_all}


def spelled_out(graph: Graph) -> Graph:
    """The graph without UPDATE and ATTEND, for targets that cannot do them."""
    def visit(node: Expr, operands: tuple[Expr, ...]) -> Expr:
        if node.op not in SPELLED:
            return same(node, operands)
        return SPELLED[node.op](*operands)
    return rewrite(graph, visit)


ELSEWHERE.append(spelled_out)
