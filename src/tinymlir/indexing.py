# Tangled from notebooks/01_expr.md: edit the chapter, not this file.

# %% 01_expr.md § Indexing (1)
"""x[key], and cutting and joining of traced arrays (chapter 1)."""
from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from tinymlir.errors import (
    DTypeError, OutOfRangeError, TracedValueError, UnsupportedError)
from tinymlir.expr import (
    METHODS, NUMPY, TYPE, Expr, Op, TensorType, as_expr, constant, make, rule)
from tinymlir.numpy_api import astype, dummy, expand_dims, ravel, reshaped, sample
from tinymlir.protocols import implements, is_weak


def getitem(x: Expr, key: Any) -> Expr:
    """x[key] for slices, integers, None, ... and one array of row numbers."""
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(k, (bool, np.bool_)) for k in keys):
        raise UnsupportedError("True and False as an index are masks, which are "
                               "not supported; to add an axis write None")
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


METHODS["__getitem__"] = getitem


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
        raise OutOfRangeError("arrays used as indices must be of integer (or "
                              f"boolean) type, not {rows.dtype}")
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
        raise OutOfRangeError(
            f"index {bad[0]} is out of bounds for axis 0 with size {len(x)}")
    if rows.ndim == 1 and rows.size and numbers[0] >= 0 and np.array_equal(
            numbers, np.arange(numbers[0], numbers[0] + rows.size)):
        return x[int(numbers[0]):int(numbers[0]) + rows.size]
    return make(Op.GATHER, x, rows)


@implements(np.take)
def take(a, indices, axis=None):
    if type(axis) is not int or axis != 0 or isinstance(indices, (bool, int)):
        raise UnsupportedError("np.take needs axis=0 and an array of indices to be "
                               "traced")
    x, rows = as_expr(a), row_numbers(indices)
    if rows.dtype.kind == "f":
        raise DTypeError(f"np.take needs integers as indices, not {rows.dtype}")
    return gather_rows(x if x.ndim else ravel(x), (rows,))


# %% 01_expr.md § Cutting and joining (1)
@implements(np.split)
def split(ary, indices_or_sections, axis=0):
    x = as_expr(ary)
    axis = normalize_axis_index(axis, x.ndim)
    views = np.split(np.arange(x.shape[axis]), indices_or_sections)
    pieces = []
    for view in views:
        first = int(view[0]) if len(view) else 0
        pieces.append(x[(slice(None),) * axis + (slice(first, first + len(view)),)])
    return pieces


@rule(TYPE, Op.CONCATENATE)
def _(*types: TensorType, axis: int) -> TensorType:
    cut = [t.shape[:axis] + (0,) + t.shape[axis + 1:] for t in types]
    rest = np.concatenate([np.empty(shape, bool) for shape in cut], axis).shape
    total = sum(t.shape[axis] for t in types)
    return TensorType((*rest[:axis], total, *rest[axis + 1:]), types[0].dtype)


NUMPY[Op.CONCATENATE] = lambda *arrays, axis: np.concatenate(arrays, axis)


@implements(np.concatenate)
def concatenate(arrays, axis=0):
    parts = [as_expr(a) for a in arrays]
    np.concatenate([sample(p.type) for p in parts], axis)  # its errors count
    if axis is None:
        parts, axis = [ravel(p) for p in parts], 0
    dtype = np.result_type(*(a if is_weak(a) else p.dtype
                             for a, p in zip(arrays, parts)))
    axis = normalize_axis_index(axis, parts[0].ndim)
    return make(Op.CONCATENATE, *(astype(p, dtype) for p in parts), axis=axis)


# %% 01_expr.md § Cutting and joining (2)
@implements(np.stack)
def stack(arrays, axis=0):
    axis = operator.index(axis)
    return concatenate([expand_dims(a, axis) for a in arrays], axis)


@implements(np.hstack)
def hstack(tup):
    parts = [reshaped(a, np.atleast_1d) for a in tup]
    return concatenate(parts, 0 if parts[0].ndim == 1 else 1)


@implements(np.vstack)
def vstack(tup):
    return concatenate([reshaped(a, np.atleast_2d) for a in tup])


METHODS["__stack__"] = stack
