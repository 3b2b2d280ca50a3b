# Tangled from notebooks/01_expr.md: edit the chapter, not this file.

# %% 01_expr.md § Functions (1)
"""NumPy's functions, methods and indexing for traced arrays (chapter 1)."""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple
from numpy.lib.stride_tricks import as_strided

from tinymlir.errors import (
    DTypeError, ShapeError, TracedValueError, UnsupportedError)
from tinymlir.expr import (
    METHODS, NUMPY, TYPE, Expr, Op, TensorType, as_expr, constant, make, rule,
    supported)
from tinymlir.protocols import elementwise, implements, is_weak

Axis = int | Sequence[int] | None
REDUCE = {Op.SUM: np.sum, Op.MAX: np.max, Op.MIN: np.min}


@rule(TYPE, *REDUCE)
def _(x: TensorType, axis: tuple, keepdims: bool, dtype: Any) -> TensorType:
    kept = [1 if i in axis else n for i, n in enumerate(x.shape)
            if keepdims or i not in axis]
    return TensorType(tuple(kept), supported(dtype))


NUMPY[Op.SUM] = lambda x, axis, keepdims, dtype: np.asarray(
    np.sum(x, axis=axis, keepdims=keepdims, dtype=dtype))
NUMPY[Op.MAX] = lambda x, axis, keepdims, dtype: np.asarray(
    np.max(x, axis=axis, keepdims=keepdims))
NUMPY[Op.MIN] = lambda x, axis, keepdims, dtype: np.asarray(
    np.min(x, axis=axis, keepdims=keepdims))


# %% 01_expr.md § Functions (2)
def sample(t: TensorType) -> np.ndarray:
    """An array of this rank and dtype with one element, or none if t has none."""
    return np.ones([min(n, 1) for n in t.shape], t.dtype)


def reduction(op: Op, a: Any, axis: Axis, keepdims: Any, **given: Any) -> Expr:
    """One reduction node; every axis when axis is None, as in NumPy."""
    x = as_expr(a)
    answer = REDUCE[op](sample(x.type), axis=axis, keepdims=keepdims, **given)
    axes = range(x.ndim) if axis is None or x.ndim == 0 else axis
    axes = tuple(sorted(normalize_axis_tuple(axes, x.ndim)))
    return make(op, x, axis=axes, keepdims=bool(keepdims), dtype=answer.dtype)


@implements(np.max, np.amax)
def amax(a, axis=None, keepdims=False):
    return reduction(Op.MAX, a, axis, keepdims)


@implements(np.min, np.amin)
def amin(a, axis=None, keepdims=False):
    return reduction(Op.MIN, a, axis, keepdims)


@implements(np.sum)
def sum_(a, axis=None, dtype=None, keepdims=False):
    x = as_expr(a) if dtype is None else astype(a, dtype)
    return reduction(Op.SUM, x, axis, keepdims, dtype=dtype)


# %% 01_expr.md § Functions (3)
@rule(TYPE, Op.WHERE)
def _(mask: TensorType, x: TensorType, y: TensorType) -> TensorType:
    return TensorType(np.broadcast_shapes(mask.shape, x.shape, y.shape), x.dtype)


@rule(TYPE, Op.CAST)
def _(x: TensorType, dtype: Any) -> TensorType:
    return TensorType(x.shape, supported(dtype))


NUMPY[Op.WHERE] = np.where
NUMPY[Op.CAST] = lambda x, dtype: np.asarray(x).astype(dtype)


@implements(np.where)
def where(condition, x=None, y=None):
    if x is None or y is None:
        raise TracedValueError(
            "np.where with one argument has a shape that depends on the numbers; "
            "write np.where(condition, a, b)")
    dtype = np.result_type(*(i if is_weak(i) else as_expr(i).dtype for i in (x, y)))
    x, y = (constant(i, dtype) if is_weak(i) else astype(i, dtype) for i in (x, y))
    return make(Op.WHERE, astype(condition, bool), x, y)


def astype(a: Any, dtype: Any) -> Expr:
    x, wanted = as_expr(a), supported(dtype)
    return x if x.dtype == wanted else make(Op.CAST, x, dtype=wanted)


# %% 01_expr.md § Functions (4)
def count(x: Expr, axis: Axis) -> float:
    """How many elements a reduction over these axes adds up."""
    axes = range(x.ndim) if axis is None else normalize_axis_tuple(axis, x.ndim)
    return float(math.prod(x.shape[i] for i in axes))


def float_dtype(x: Expr, dtype: Any) -> np.dtype:
    """What mean and var compute in: float64 for integers, unless told otherwise."""
    if dtype is None:
        return np.dtype(np.float64) if x.dtype.kind in "bi" else x.dtype
    if supported(dtype).kind != "f":
        raise UnsupportedError(
            f"a mean or variance of dtype {np.dtype(dtype)} is not supported; "
            f"write np.mean(x).astype(dtype)")
    return supported(dtype)


@implements(np.mean)
def mean(a, axis=None, dtype=None, keepdims=False):
    x = as_expr(a)
    return sum_(x, axis, float_dtype(x, dtype), keepdims) / count(x, axis)


@implements(np.var)
def var(a, axis=None, dtype=None, ddof=0, keepdims=False, correction=None):
    if correction is not None and ddof != 0:
        raise ShapeError("ddof and correction can't be provided simultaneously.")
    x = as_expr(a)
    dtype = float_dtype(x, dtype)
    x = x - mean(x, axis, dtype, keepdims=True)
    total = sum_(x * x, axis, dtype, keepdims)
    return total / float(max(count(x, axis) - (correction or ddof), 0))


@implements(np.std)
def std(a, axis=None, dtype=None, ddof=0, keepdims=False, correction=None):
    return np.sqrt(var(a, axis, dtype, ddof, keepdims, correction))


# %% 01_expr.md § Moving data (1)
def dummy(t: TensorType) -> np.ndarray:
    """An array of this shape that takes one element of memory."""
    return np.broadcast_to(np.zeros((), t.dtype), t.shape)


NUMPY[Op.RESHAPE] = lambda x, shape: np.reshape(x, shape)
NUMPY[Op.TRANSPOSE] = lambda x, axes: np.transpose(x, axes)
NUMPY[Op.BROADCAST] = lambda x, shape: np.broadcast_to(x, shape)
NUMPY[Op.SLICE] = lambda x, slices: np.asarray(x)[slices]
NUMPY[Op.TRIU] = lambda x, k: np.triu(x, k)
NUMPY[Op.TRIL] = lambda x, k: np.tril(x, k)


@rule(TYPE, Op.RESHAPE, Op.BROADCAST)
def _(x: TensorType, shape: tuple[int, ...]) -> TensorType:
    return TensorType(shape, x.dtype)


@rule(TYPE, Op.TRANSPOSE)
def _(x: TensorType, axes: tuple[int, ...]) -> TensorType:
    return TensorType(tuple(x.shape[i] for i in axes), x.dtype)


@rule(TYPE, Op.SLICE)
def _(x: TensorType, slices: tuple[slice, ...]) -> TensorType:
    return TensorType(dummy(x)[slices].shape, x.dtype)


@rule(TYPE, Op.TRIU, Op.TRIL)
def _(x: TensorType, k: int) -> TensorType:
    return x


# %% 01_expr.md § Moving data (2)
def reshaped(a: Any, function: Callable, *args: Any) -> Expr:
    """Reshape to what a NumPy function makes of an array of this shape."""
    x = as_expr(a)
    shape = function(dummy(x.type), *args).shape
    return x if shape == x.shape else make(Op.RESHAPE, x, shape=shape)


def reshape(x: Any, *shape: Any, order: str = "C") -> Expr:
    """x.reshape(2, 3), x.reshape((2, -1)): at most one -1, as in NumPy."""
    if order != "C":
        raise UnsupportedError(f"order={order!r} of reshape is not supported; a "
                               f"traced array has no order but 'C'")
    return reshaped(x, np.ndarray.reshape, *shape)


@implements(np.reshape)
def reshape_(a, shape):
    return reshaped(a, np.reshape, shape)


@implements(np.ravel)
def ravel(a):
    return reshape(a, as_expr(a).size)


@implements(np.squeeze)
def squeeze(a, axis=None):
    return reshaped(a, np.squeeze, axis)


@implements(np.expand_dims)
def expand_dims(a, axis):
    return reshaped(a, np.expand_dims, axis)


# %% 01_expr.md § Moving data (3)
def permuted(a: Any, function: Callable, *args: Any) -> Expr:
    """The transpose that a NumPy function makes of an array of this shape."""
    x = as_expr(a)
    numbered = as_strided(np.zeros(1, bool), x.shape, range(x.ndim))
    axes = function(numbered, *args).strides
    return x if axes == tuple(range(x.ndim)) else make(Op.TRANSPOSE, x, axes=axes)


def transpose(x: Any, *axes: Any) -> Expr:
    """x.transpose(), x.transpose(1, 0), x.transpose((1, 0))."""
    return permuted(x, np.ndarray.transpose, *axes)


@implements(np.transpose)
def transpose_(a, axes=None):
    return permuted(a, np.transpose, axes)


@implements(np.swapaxes)
def swapaxes(a, axis1, axis2):
    return permuted(a, np.swapaxes, axis1, axis2)


@implements(np.moveaxis)
def moveaxis(a, source, destination):
    return permuted(a, np.moveaxis, source, destination)


# %% 01_expr.md § Moving data (4)
@implements(np.broadcast_to)
def broadcast_to(array, shape):
    x = as_expr(array)
    new = np.broadcast_to(dummy(x.type), shape).shape
    return x if new == x.shape else make(Op.BROADCAST, x, shape=new)


@implements(np.triu)
def triu(m, k=0):
    return make(Op.TRIU, at_least_2d(m), k=operator.index(k))


@implements(np.tril)
def tril(m, k=0):
    return make(Op.TRIL, at_least_2d(m), k=operator.index(k))


def at_least_2d(m: Any) -> Expr:
    """A row becomes a matrix of equal rows, as NumPy's triu has it."""
    x = as_expr(m)
    if x.ndim == 0:
        raise DTypeError("a triangle needs an array of at least one dimension")
    return broadcast_to(x, (*x.shape, *x.shape)) if x.ndim == 1 else x


# %% 01_expr.md § Moving data (5)
@implements(np.shape)
def shape(a):
    return a.shape


@implements(np.ndim)
def ndim(a):
    return a.ndim


@implements(np.size)
def size(a, axis=None):
    return np.size(dummy(a.type), axis)


# %% 01_expr.md § Moving data (6)
def length(x: Expr) -> int:
    if x.ndim == 0:
        raise DTypeError("len() of unsized object")
    return x.shape[0]


def astype_(x, dtype, order="K", casting="unsafe", subok=True, copy=True):
    """x.astype(dtype); an order in memory or a copy means nothing here."""
    sample(x.type).astype(dtype, order, casting, subok, copy)  # its errors count
    return astype(x, dtype)


METHODS |= {
    "reshape": reshape, "transpose": transpose, "astype": astype_,
    "copy": lambda x, order="C": x, "flatten": np.ravel,
    "max": np.max, "min": np.min,
    "__len__": length,
}
METHODS |= {f.__name__: f for f in (
    np.sum, np.mean, np.var, np.std, np.ravel, np.squeeze, np.swapaxes, np.dot,
    np.take)}


# %% 01_expr.md § Matrix products (1)
@rule(TYPE, Op.MATMUL)
def _(a: TensorType, b: TensorType) -> TensorType:
    dtype = np.matmul.resolve_dtypes((a.dtype, b.dtype, None))[-1]
    return TensorType((*a.shape[:-1], b.shape[-1]), supported(dtype))


NUMPY[Op.MATMUL] = np.matmul


def matmul(x: Any, y: Any) -> Expr:
    """NumPy's matmul: 1-D operands, batches and broadcasting of batches."""
    a, b = as_expr(x), as_expr(y)
    if 0 in (a.ndim, b.ndim):
        raise ShapeError("matmul does not take 0-d arrays; use *")
    vectors = (a.ndim == 1, b.ndim == 1)
    a = a.reshape(1, -1) if vectors[0] else a
    b = b.reshape(-1, 1) if vectors[1] else b
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"matmul of {a.type} and {b.type}: the inner lengths "
            f"{a.shape[-1]} and {b.shape[-2]} differ")
    if a.dtype.kind == b.dtype.kind == "b":  # a sum of ands is an or
        return matmul(astype(x, np.int32), y).astype(bool)
    product = batched(a, b)
    drop = [axis for axis, gone in zip((-2, -1), vectors) if gone]
    return squeeze(product, tuple(drop)) if drop else product


# %% 01_expr.md § Matrix products (2)
def batched(a: Expr, b: Expr) -> Expr:
    """A product of stacks: as one matrix product if possible, else a batch."""
    if a.ndim == b.ndim == 2:
        return make(Op.MATMUL, a, b)
    if b.ndim == 2:
        rows = math.prod(a.shape[:-1])
        flat = make(Op.MATMUL, a.reshape(rows, a.shape[-1]), b)
        return flat.reshape(*a.shape[:-1], b.shape[-1])
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (stack_of_matrices(m, batch) for m in (a, b))
    return make(Op.MATMUL, a, b).reshape(*batch, a.shape[-2], b.shape[-1])


def stack_of_matrices(m: Expr, batch: tuple[int, ...]) -> Expr:
    """Broadcast the leading dimensions to `batch` and merge them into one."""
    full = broadcast_to(m, (*batch, *m.shape[-2:]))
    return full.reshape(math.prod(batch), *m.shape[-2:])


METHODS["__matmul__"] = matmul


@implements(np.dot)
def dot(a, b):
    x, y = as_expr(a), as_expr(b)
    if 0 in (x.ndim, y.ndim):
        return elementwise(Op.MUL, x, y)
    if y.ndim > 2:
        raise UnsupportedError("np.dot with a stack of matrices on the right "
                               "cannot be traced; use @")
    return matmul(x, y)
