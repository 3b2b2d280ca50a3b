# Tangled from notebooks/01_expr.md: edit the chapter, not this file.

# %% 01_expr.md § Indexing (1)
"""x[key] for traced arrays (chapter 1)."""
from __future__ import annotations

import operator
from typing import Any

import numpy as np

from tinymlir.errors import OutOfRangeError, TracedValueError, UnsupportedError
from tinymlir.expr import (
    METHODS, NUMPY, TYPE, Expr, Op, TensorType, as_expr, constant, make, rule)
from tinymlir.numpy_api import dummy
from tinymlir.protocols import implements


def getitem(x: Expr, key: Any) -> Expr:
    """x[key] for slices, integers, None, ... and one array of row numbers."""
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(k, (bool, np.bool_)) for k in keys):
        raise UnsupportedError("True and False as an index are masks, which are not "
                               "supported; to add an axis write None")
    if any(is_array(k) for k in keys):
        return gather_rows(x, keys)
    view = dummy(x.type)[keys]
    used = sum(k is not None and k is not Ellipsis for k in keys)
    fill = (slice(None),) * (x.ndim - used)
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys = (*keys[:at], *fill, *keys[at + 1:])
    axes = [k for k in keys if k is not None]
    slices = tuple(as_slice(k, n) for k, n in zip(axes, x.shape))
    whole = all(s == slice(0, n, 1) for s, n in zip(slices, x.shape))
    return (x if whole else make(Op.SLICE, x, slices=slices)).reshape(view.shape)


def as_slice(key: Any, length: int) -> slice:
    """The same slice with its bounds written out."""
    if not isinstance(key, slice):
        first = operator.index(key) % length
        return slice(first, first + 1, 1)
    picked = range(length)[key]
    if not picked:
        return slice(0, 0, 1)
    stop = picked.stop if picked.stop >= 0 else None  # -1 would mean the last
    return slice(picked.start, stop, picked.step)


def is_array(key: Any) -> bool:
    return isinstance(key, (Expr, np.ndarray, list, tuple, range))


# %% 01_expr.md § Indexing (2)
@rule(TYPE, Op.GATHER)
def _(x: TensorType, rows: TensorType) -> TensorType:
    return TensorType((*rows.shape, *x.shape[1:]), x.dtype)


NUMPY[Op.GATHER] = lambda x, rows: np.asarray(x)[rows]


def gather_rows(x: Expr, keys: tuple) -> Expr:
    """x[rows], x[rows, :3]: rows of x, by an array of integers."""
    rest = keys[1:]
    if not is_array(keys[0]) or not all(isinstance(k, slice) or k is Ellipsis
                                        for k in rest):
        raise UnsupportedError("an index array has to come first, and only slices "
                               "may follow it")
    rows = row_numbers(keys[0])
    if rows.dtype.kind == "b":
        raise TracedValueError(
            "a mask selects a number of elements that is not known while tracing; "
            "keep the shape and write np.where(mask, x, 0)")
    if rows.dtype.kind != "i":
        raise OutOfRangeError("arrays used as indices must be of integer (or boolean) "
                              f"type, not {rows.dtype}")
    picked = pick(x, rows)
    return picked[(slice(None),) * rows.ndim + rest] if rest else picked


# %% 01_expr.md § Indexing (3)
def row_numbers(key: Any) -> Expr:
    """An index array as a node; an empty list is one of integers, as in NumPy."""
    if isinstance(key, (list, tuple)) and np.array(key, object).size == 0:
        return constant(key, np.int64)
    return as_expr(key)


def pick(x: Expr, rows: Expr) -> Expr:
    """The rows; consecutive constant rows are a slice, which needs no check."""
    if x.ndim == 0:
        raise OutOfRangeError("too many indices for a 0-d array")
    if rows.op is not Op.CONSTANT:
        return make(Op.GATHER, x, rows)
    numbers = rows.attrs["value"]
    bad = numbers[(numbers < -len(x)) | (numbers >= len(x))]
    if bad.size:
        raise OutOfRangeError(f"index {bad[0]} is out of bounds for axis 0 with size "
                              f"{len(x)}")
    if rows.ndim == 1 and rows.size and numbers[0] >= 0 and np.array_equal(
            numbers, np.arange(numbers[0], numbers[0] + rows.size)):
        return x[int(numbers[0]):int(numbers[0]) + rows.size]
    return make(Op.GATHER, x, rows)


@implements(np.take)
def take(a, indices, axis=None):
    if type(axis) is not int or axis != 0 or isinstance(indices, (bool, int)):
        raise UnsupportedError("np.take needs axis=0 and an array of indices to be "
                               "traced")
    return gather_rows(as_expr(a), (as_expr(indices),))


METHODS["__getitem__"] = getitem
