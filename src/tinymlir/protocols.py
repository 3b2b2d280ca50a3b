# Tangled from notebooks/01_expr.md: edit the chapter, not this file.

# %% 01_expr.md § Operators (1)
"""What `x + y` and `np.sum(x)` do to traced arrays (chapter 1)."""
from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tinymlir.errors import DTypeError, ShapeError, UnsupportedError
from tinymlir.expr import (
    COMPARISONS, METHODS, OP_OF, Expr, Op, as_expr, constant, located, loop, make,
    supported)

ARRAYS = (Expr, np.ndarray, np.generic, bool, int, float, complex, list, tuple,
          range)


def apply_ufunc(ufunc: np.ufunc, method: str, inputs: tuple, keywords: dict) -> Any:
    """NEP 13: what `x + y` and `np.add(x, y)` do when one of them is traced."""
    if not all(isinstance(x, ARRAYS) for x in inputs):
        return NotImplemented
    return located(traced_ufunc, ufunc, method, inputs, keywords)


def traced_ufunc(ufunc: np.ufunc, method: str, inputs: tuple, keywords: dict
                 ) -> Expr:
    """The node of a ufunc call; UnsupportedError for what would be ignored."""
    name = f"np.{ufunc.__name__}"
    if method != "__call__":
        raise UnsupportedError(f"{name}.{method} cannot be traced")
    if "out" in keywords:
        raise UnsupportedError(
            f"traced arrays cannot be written to: `out=` of {name} and operators "
            f"such as += are not supported; write x = x + y")
    if keywords:
        raise UnsupportedError(
            f"keyword `{min(keywords)}` of {name} is not supported")
    if ufunc in COMPOSED:
        return composed(ufunc, *inputs)
    if ufunc not in OP_OF:
        raise UnsupportedError(f"{name} cannot be traced")
    return elementwise(OP_OF[ufunc], *inputs)


METHODS["__array_ufunc__"] = apply_ufunc


# %% 01_expr.md § Operators (2)
COMPOSED: dict[np.ufunc, Callable] = {
    np.square: lambda x: elementwise(Op.MUL, x, x),
    np.reciprocal: lambda x: elementwise(Op.DIV, 1, x),
    np.positive: lambda x: x,
    np.logical_and: lambda x, y: elementwise(Op.AND, truth(x), truth(y)),
    np.logical_or: lambda x, y: elementwise(Op.OR, truth(x), truth(y)),
    np.logical_not: lambda x: elementwise(Op.EQ, x, 0),
    np.isnan: lambda x: elementwise(Op.NE, x, x),
    np.matmul: lambda x, y: METHODS["__matmul__"](x, y),
}


def truth(x: Any) -> Expr:
    """x != 0. Two Python numbers have no dtype to agree on, so x gets its own."""
    return elementwise(Op.NE, constant(x, type(x)) if is_weak(x) else x, 0)


def composed(ufunc: np.ufunc, *inputs: Any) -> Expr:
    """A ufunc made of others, with the dtype that NumPy gives it."""
    dtypes = [type(x) if is_weak(x) else as_expr(x).dtype for x in inputs]
    dtype = supported(ufunc.resolve_dtypes((*dtypes, None))[-1])
    result = COMPOSED[ufunc](*inputs)
    if result.dtype != dtype:
        raise UnsupportedError(
            f"np.{ufunc.__name__} is not supported for these dtypes")
    return result


# %% 01_expr.md § Operators (3)
def is_weak(x: Any) -> bool:
    """NEP 50: Python's int and float, but not bool and not np.float64."""
    return type(x) in (int, float)


def elementwise(op: Op, *inputs: Any) -> Expr:
    """One elementwise node; numbers become constants of the dtype they take."""
    inputs = tuple(x if is_weak(x) else as_expr(x) for x in inputs)
    if op in COMPARISONS:
        inputs = tuple(comparable(x, inputs) for x in inputs)
    takes = loop(op, *(type(x) if is_weak(x) else x.dtype for x in inputs))
    operands = [constant(x, d) if is_weak(x) else x for x, d in zip(inputs, takes)]
    return power(*operands) if op is Op.POW else make(op, *operands)


def comparable(x: Any, inputs: tuple) -> Any:
    """A Python int beyond the integers it meets is as good as an infinity."""
    kinds = [i.dtype for i in inputs if isinstance(i, Expr) and i.dtype.kind == "i"]
    if type(x) is not int or not kinds:
        return x
    info = np.iinfo(kinds[0])
    beyond = math.inf if x > 0 else -math.inf
    return x if info.min <= x <= info.max else beyond


# %% 01_expr.md § Operators (4)
def power(base: Expr, exponent: Expr) -> Expr:
    """A power; one exponent for many numbers is a number itself, as in NumPy."""
    whole = loop(Op.POW, base.dtype, exponent.dtype)[-1].kind == "i"
    one = exponent.op is Op.CONSTANT and exponent.size == 1
    if one and exponent.ndim and (whole or base.size > 1):
        shape = np.broadcast_shapes(base.shape, exponent.shape)
        x = power(base, constant(exponent.attrs["value"].reshape(())))
        return x if shape == x.shape else make(Op.BROADCAST, x, shape=shape)
    if whole:
        check_integer_power(base, exponent)
    return make(Op.POW, base, exponent)


def check_integer_power(base: Expr, exponent: Expr) -> None:
    """Integer powers need one constant exponent that is not negative."""
    if base.dtype.kind == "b":
        raise DTypeError("powers of bool arrays are int8 in NumPy, which is not "
                         "supported; convert the base with astype(int)")
    if exponent.op is not Op.CONSTANT or exponent.ndim:
        raise UnsupportedError(
            "integer ** array is not supported; convert the base with "
            "astype(float), or use one constant exponent")
    if base.size and exponent.attrs["value"].item() < 0:
        raise ShapeError("Integers to negative integer powers are not allowed.")


# %% 01_expr.md § Functions (1)
FUNCTIONS: dict[Callable, Callable] = {}


def implements(*functions: Callable) -> Callable:
    """Decorator: this is what these NumPy functions do to traced arrays."""
    def register(ours: Callable) -> Callable:
        FUNCTIONS.update(dict.fromkeys(functions, ours))
        return ours
    return register


IN_C: dict[Callable, Callable] = {  # these say what they take only since NumPy 2.4
    np.concatenate: lambda arrays, /, axis=0, out=None, *, dtype=None,
    casting="same_kind": None,
    np.where: lambda condition, x=None, y=None, /: None,
    np.dot: lambda a, b, out=None: None,
}


@cache
def signature(function: Callable) -> inspect.Signature:
    return inspect.signature(IN_C.get(function, function))


def is_default(parameter: inspect.Parameter, value: Any) -> bool:
    if isinstance(value, (Expr, np.ndarray)):
        return False
    return value is parameter.default or (
        type(value) is type(parameter.default) and value == parameter.default)


# %% 01_expr.md § Functions (2)
COUNTING = {"nonzero", "flatnonzero", "argwhere", "unique", "extract", "compress"}
SHAPES_BY_NUMBERS = (": the shape of its result depends on the numbers; keep the "
                     "shape and use np.where(mask, x, 0)")


def apply_function(function: Callable, args: tuple, keywords: dict) -> Any:
    """NEP 18: what `np.sum(x, axis=-1)` does when x is traced."""
    return located(traced_function, function, args, keywords)


def traced_function(function: Callable, args: tuple, keywords: dict) -> Any:
    """The nodes of a function call; UnsupportedError for what would be ignored."""
    name = f"np.{function.__name__}"
    if function not in FUNCTIONS:
        hint = SHAPES_BY_NUMBERS if function.__name__ in COUNTING else ""
        raise UnsupportedError(f"{name} cannot be traced{hint}")
    theirs, ours = signature(function), FUNCTIONS[function]
    bound = theirs.bind(*args, **keywords).arguments
    given = {key: value for key, value in bound.items()
             if not is_default(theirs.parameters[key], value)}
    for key in given:
        if key not in signature(ours).parameters:
            raise UnsupportedError(f"argument `{key}` of {name} is not supported")
    return ours(**given)


METHODS["__array_function__"] = apply_function
