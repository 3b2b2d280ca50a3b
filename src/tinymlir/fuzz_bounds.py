# Tangled from notebooks/90_fuzz.md: edit the chapter, not this file.

# %% 90_fuzz.md § How far apart may two right answers be? (1)
"""How far two right answers may lie apart (appendix on fuzzing)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tinymlir.expr import COMPARISONS, NUMPY, VIEWS, Expr, Op, rule
from tinymlir.graph import Graph, evaluate_all

BOUND: dict[Op, Callable[..., Any]] = {}
ULPS = 8  # of exp, log, tanh and powers: NumPy's 4 and ours 4
UNKNOWN = np.inf
Arrays = Sequence[np.ndarray]


def bounds(graph: Graph, *arrays: np.ndarray) -> dict[int, np.ndarray]:
    """id(node) -> how far each element of a right answer may be from NumPy's."""
    values = evaluate_all(graph, *arrays)
    found: dict[int, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            value = np.asarray(values[id(node)])
            given = [np.asarray(values[id(x)]) for x in node.operands]
            errors = [found[id(x)] for x in node.operands]
            found[id(node)] = settled(
                value, BOUND[node.op](node, value, given, errors))
    return found


def settled(value: np.ndarray, bound: Any) -> np.ndarray:
    """A bound for each element; for integers it is none or all."""
    bound = np.broadcast_to(np.asarray(bound, float), value.shape)
    bound = np.where(np.isnan(bound), UNKNOWN, bound)
    if value.dtype.kind != "f":
        return np.where(bound > 0, UNKNOWN, 0)
    huge = np.isfinite(value) & (bound > 0.01 * float(np.finfo(value.dtype).max))
    return np.where(huge, UNKNOWN, bound)


# %% 90_fuzz.md § How far apart may two right answers be? (2)
@rule(BOUND, Op.INPUT, Op.CONSTANT)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    return 0.0


@rule(BOUND, *VIEWS, Op.TRIU, Op.TRIL, Op.CONCATENATE)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    return NUMPY[node.op](*errors, **node.attrs)


@rule(BOUND, Op.GATHER)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    return UNKNOWN if errors[1].any() else errors[0][given[1]]


@rule(BOUND, Op.UPDATE)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    return UNKNOWN if errors[1].any() else NUMPY[node.op](
        errors[0], given[1], errors[2])


@rule(BOUND, Op.WHERE)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    return np.where(errors[0] > 0, UNKNOWN, np.where(given[0], *errors[1:]))


@rule(BOUND, Op.AND, Op.OR, Op.XOR, Op.NOT, Op.NEG, Op.ABS)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    return sum(errors)


# %% 90_fuzz.md § How far apart may two right answers be? (3)
def spacing(value: np.ndarray) -> np.ndarray:
    """One unit in the last place of a float; of infinity and NaN, that of 0."""
    size = np.abs(np.where(np.isfinite(value), value, 0)).astype(value.dtype)
    return np.spacing(size).astype(float)


@rule(BOUND, *COMPARISONS)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    """Unknown where the errors can turn it round."""
    total = sum(errors)
    near = np.abs(np.subtract(*(g.astype(float) for g in given))) <= total
    return np.where((total > 0) & (near | np.isinf(total)), UNKNOWN, 0)


@rule(BOUND, Op.CAST)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    (x,), (e,) = given, errors
    if value.dtype.kind == "f":
        return e + np.where(e > 0, spacing(value), 0)
    low, high = ((x + s * e).astype(float) for s in (-1, 1))
    same = np.trunc(low) == np.trunc(high)
    same &= (value.dtype.kind != "b") | (low * high > 0)
    return np.where((e > 0) & ~same, UNKNOWN, 0)


# %% 90_fuzz.md § How far apart may two right answers be? (4)
def wide(x: np.ndarray) -> np.ndarray:
    return np.abs(x.astype(float))


def times(x: np.ndarray, e: np.ndarray) -> np.ndarray:
    """x * e, but nothing comes of no error, be x infinite."""
    return np.where(e > 0, x * e, 0)


def rounded(value: np.ndarray, given: Arrays, error: Any) -> Any:
    """The error after rounding. An infinity that comes of finite, inexact numbers
    is not certain."""
    error = error + np.where(error > 0, 2 * spacing(value), 0)
    finite = np.all(np.broadcast_arrays(*map(np.isfinite, given)), axis=0)
    doubtful = (error > 0) & (finite | np.isinf(error))
    return np.where(np.isfinite(value), error, np.where(doubtful, UNKNOWN, 0))


@rule(BOUND, Op.ADD, Op.SUB)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    total = sum(errors)
    return rounded(value, given, total) if value.dtype.kind == "f" else total


@rule(BOUND, Op.MUL)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    if value.dtype.kind != "f":
        return sum(errors)
    (a, b), (ea, eb) = given, errors
    error = times(wide(a), eb) + times(wide(b), ea) + times(ea, eb)
    return rounded(value, given, error)


# %% 90_fuzz.md § How far apart may two right answers be? (5)
@rule(BOUND, Op.DIV)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    ea, eb = errors
    left = wide(given[1]) - eb  # the divisor is at least so large
    error = np.where(left > 0, (ea + times(wide(value), eb)) / left, UNKNOWN)
    return rounded(value, given, np.where(ea + eb > 0, error, 0))


@rule(BOUND, Op.SQRT)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    (x,), (e,) = given, errors
    error = np.where(x.astype(float) > 2 * e, e / wide(value), UNKNOWN)
    return rounded(value, given, np.where(e > 0, error, 0))


def tiny(value: np.ndarray) -> float:
    """The bound of a zero whose sign is not known."""
    return float(np.finfo(value.dtype).smallest_subnormal)


@rule(BOUND, Op.MAXIMUM, Op.MINIMUM)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    """The larger error. Which of two zeros is the larger one nobody says."""
    if value.dtype.kind != "f":
        return sum(errors)
    a, b = (g.astype(float) for g in given)
    either = (a == 0) & (b == 0) & (np.signbit(a) != np.signbit(b))
    return np.maximum(*errors) + np.where(either, tiny(value), 0)


# %% 90_fuzz.md § How far apart may two right answers be? (6)
def power_slope(value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    """How much a**b changes: both in the logarithm, then back."""
    (a, b), (ea, eb) = (tuple(g.astype(float) for g in given)), errors
    left = np.abs(a) - ea
    step = np.log1p(times(1 / left, ea))
    grown = np.abs(b) * step + times(np.abs(np.log(np.abs(a))) + step, eb)
    sure = (left > 0) & ((a > 0) | (eb == 0))
    return np.where(sure, wide(value) * np.expm1(grown), UNKNOWN)


SLOPE = {
    Op.EXP: lambda v, g, e: wide(v) * np.expm1(e[0]),
    Op.LOG: lambda v, g, e: np.where(
        g[0] > e[0], np.log1p(e[0] / (g[0] - e[0])), UNKNOWN),
    Op.TANH: lambda v, g, e: e[0],
    Op.POW: power_slope,
}


@rule(BOUND, *SLOPE)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    if value.dtype.kind != "f":  # an integer power
        return sum(errors)
    error = np.where(sum(errors) > 0, SLOPE[node.op](value, given, errors), 0)
    own = np.where(np.isfinite(value), ULPS * spacing(value), 0)
    return rounded(value, given, error) + own


# %% 90_fuzz.md § How far apart may two right answers be? (7)
def sum_bound(value: np.ndarray, size: np.ndarray, n: float, error: Any,
              finite: np.ndarray) -> Any:
    """Of n terms; `size` is the sum of their sizes. Infinite terms are certain."""
    info = np.finfo(value.dtype)
    bound = error + n * float(info.eps) * size + (value == 0) * tiny(value)
    bound = np.where(size > float(info.max) / 4, UNKNOWN, bound)
    certain = np.where(np.isinf(error), UNKNOWN, 0)
    return np.where(finite | np.isinf(bound), bound, certain)


@rule(BOUND, Op.SUM)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    (x,), (e,), axis = given, errors, node.attrs["axis"]
    how = {"axis": axis, "keepdims": node.attrs["keepdims"]}
    if value.dtype.kind != "f":
        return np.sum(e, **how)
    n, finite = np.prod([x.shape[i] for i in axis], dtype=float), np.isfinite(x)
    size = np.sum(wide(np.where(finite, x, 0)), **how)
    return sum_bound(value, size, n, np.sum(e, **how), np.all(finite, **how))


@rule(BOUND, Op.MAX, Op.MIN)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    (x,), (e,) = given, errors
    how = {"axis": node.attrs["axis"], "keepdims": node.attrs["keepdims"]}
    bound, zero, minus = np.max(e, **how, initial=0), x == 0, np.signbit(x * 1.0)
    both = np.any(zero & minus, **how) & np.any(zero & ~minus, **how)
    unsure = (value == 0) & both & (value.dtype.kind == "f")
    return bound + np.where(unsure, 5e-324, 0)


# %% 90_fuzz.md § How far apart may two right answers be? (8)
@rule(BOUND, Op.MATMUL)
def _(node: Expr, value: np.ndarray, given: Arrays, errors: Arrays) -> Any:
    (a, b), (ea, eb) = given, errors
    if value.dtype.kind != "f" or not np.isfinite(ea).all() & np.isfinite(eb).all():
        return UNKNOWN if ea.any() or eb.any() else 0
    odd = [~np.isfinite(m) for m in given]
    a, b = (np.where(o, 0, wide(m)) for o, m in zip(odd, given))
    some = np.any(odd[0], -1)[..., :, None] | np.any(odd[1], -2)[..., None, :]
    n = a.shape[-1]
    error = a @ eb + ea @ b + ea @ eb + n * tiny(value)  # products may underflow
    return sum_bound(value, a @ b, n + 1, error, ~some)
