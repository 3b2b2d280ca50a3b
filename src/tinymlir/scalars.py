# Tangled from notebooks/02_builder.md: edit the chapter, not this file.

# %% 02_builder.md § Numbers (1)
"""Arithmetic on single numbers in MLIR (chapter 2)."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mlir import ir
from mlir.dialects import arith, math

from tinymlir.expr import UFUNC, Expr, Op, is_number, loop

ELEMENT = {
    np.dtype("float32"): ir.F32Type.get, np.dtype("float64"): ir.F64Type.get,
    np.dtype("int32"): lambda: ir.IntegerType.get_signless(32),
    np.dtype("int64"): lambda: ir.IntegerType.get_signless(64),
    np.dtype("bool"): lambda: ir.IntegerType.get_signless(1),
}


def element(dtype: np.dtype) -> ir.Type:
    return ELEMENT[dtype]()


def number(value: Any, dtype: np.dtype) -> ir.Value:
    """An arith.constant."""
    as_python = float if dtype.kind == "f" else int
    return arith.constant(element(dtype), as_python(value))


def index(value: int) -> ir.Value:
    """A constant for counting and addressing."""
    return arith.constant(ir.IndexType.get(), value)


# %% 02_builder.md § Numbers (2)
Float, Int = arith.CmpFPredicate, arith.CmpIPredicate
COMPARE = {  # for floats, integers and booleans
    Op.LT: (Float.OLT, Int.slt, Int.ult), Op.LE: (Float.OLE, Int.sle, Int.ule),
    Op.GT: (Float.OGT, Int.sgt, Int.ugt), Op.GE: (Float.OGE, Int.sge, Int.uge),
    Op.EQ: (Float.OEQ, Int.eq, Int.eq), Op.NE: (Float.UNE, Int.ne, Int.ne),
}
SCALAR: dict[tuple[Op, str], Callable[..., ir.Value]] = {
    (Op.ADD, "f"): arith.addf, (Op.ADD, "i"): arith.addi, (Op.ADD, "b"): arith.ori,
    (Op.SUB, "f"): arith.subf, (Op.SUB, "i"): arith.subi,
    (Op.MUL, "f"): arith.mulf, (Op.MUL, "i"): arith.muli, (Op.MUL, "b"): arith.andi,
    (Op.DIV, "f"): arith.divf,
    (Op.MAXIMUM, "f"): arith.maximumf, (Op.MINIMUM, "f"): arith.minimumf,
    (Op.MAXIMUM, "i"): arith.maxsi, (Op.MINIMUM, "i"): arith.minsi,
    (Op.MAXIMUM, "b"): arith.ori, (Op.MINIMUM, "b"): arith.andi,
    (Op.NEG, "f"): arith.negf, (Op.ABS, "f"): math.absf, (Op.ABS, "i"): math.absi,
    (Op.ABS, "b"): lambda x: x, (Op.SQRT, "f"): math.sqrt,
    (Op.EXP, "f"): math.exp, (Op.LOG, "f"): math.log, (Op.TANH, "f"): math.tanh,
}
for op_, predicates in COMPARE.items():
    for kind_, predicate, compare in zip(
            "fib", predicates, (arith.cmpf, arith.cmpi, arith.cmpi)):
        SCALAR[op_, kind_] = partial(compare, predicate)
for kind_ in "ib":
    SCALAR |= {(Op.AND, kind_): arith.andi, (Op.OR, kind_): arith.ori,
               (Op.XOR, kind_): arith.xori}


# %% 02_builder.md § Numbers (3)
def like(x: ir.Value, value: int | float) -> ir.Value:
    """A constant of the type of x."""
    return arith.constant(x.type, float(value) if is_float(x) else int(value))


def is_float(x: ir.Value) -> bool:
    return isinstance(x.type, (ir.F32Type, ir.F64Type))


SCALAR |= {
    (Op.NEG, "i"): lambda x: arith.subi(like(x, 0), x),
    (Op.NOT, "i"): lambda x: arith.xori(x, like(x, -1)),
    (Op.NOT, "b"): lambda x: arith.xori(x, like(x, 1)),
}


# %% 02_builder.md § Numbers (4)
def stored(dtype: np.dtype) -> ir.Type:
    """The type of a number in memory."""
    return ir.IntegerType.get_signless(8) if dtype.kind == "b" else element(dtype)


def from_memory(x: ir.Value) -> ir.Value:
    byte = ir.IntegerType.get_signless(8)
    return arith.cmpi(Int.ne, x, arith.constant(byte, 0)) if x.type == byte else x


def to_memory(x: ir.Value) -> ir.Value:
    bit, byte = (ir.IntegerType.get_signless(n) for n in (1, 8))
    return arith.extui(byte, x) if x.type == bit else x


# %% 02_builder.md § Numbers (5)
def to_bool(x: ir.Value) -> ir.Value:
    zero = like(x, 0)
    return (arith.cmpf(Float.UNE, x, zero) if is_float(x)
            else arith.cmpi(Int.ne, x, zero))


WIDEN = {"ff": arith.extf, "ii": arith.extsi, "bi": arith.extui, "bf": arith.uitofp,
         "if": arith.sitofp}
NARROW = {**WIDEN, "ff": arith.truncf, "ii": arith.trunci}


def convert(x: ir.Value, old: np.dtype, new: np.dtype) -> ir.Value:
    """The number x as another dtype, with NumPy's astype meaning."""
    if old == new:
        return x
    if new.kind == "b":
        return to_bool(x)
    if old.kind == "f" and new.kind == "i":
        return to_integer(x, new)
    table = WIDEN if new.itemsize > old.itemsize else NARROW
    return table[old.kind + new.kind](element(new), x)


# %% 02_builder.md § Numbers (6)
def to_integer(x: ir.Value, new: np.dtype) -> ir.Value:
    """x cut to an integer; what is none becomes what NumPy makes of it."""
    with np.errstate(invalid="ignore"):
        answers = np.array([np.nan, np.inf, -np.inf]).astype(new)
    low = float(np.iinfo(new).min)
    outside = (Float.UNO, x), (Float.OGE, like(x, -low)), (Float.OLT, like(x, low))
    result = arith.fptosi(element(new), x)
    for (predicate, limit), answer in zip(outside, answers):
        found = arith.cmpf(predicate, x, limit)
        result = arith.select(found, number(answer, new), result)
    return result


# %% 02_builder.md § Numbers (7)
def power(node: Expr, x: ir.Value, y: ir.Value) -> ir.Value:
    """x ** y; a constant exponent of the table needs no call."""
    base, exponent = node.operands
    if is_number(exponent):
        n = exponent.attrs["value"].item()
        if is_float(x):
            return POWERS[n](x) if n in POWERS else math.powf(x, y)
        return integer_power(x, int(n))
    if exponent.size > 1 or exponent.shape and base.size == 1:
        return math.powf(x, y)
    half = arith.cmpf(Float.OEQ, y, like(y, 0.5))  # one exponent, known at run time
    return arith.select(half, math.sqrt(x), math.powf(x, y))


def integer_power(x: ir.Value, n: int) -> ir.Value:
    """Square and multiply; wraps around on overflow, as NumPy does."""
    result = like(x, 1)
    while n:
        result = arith.muli(result, x) if n & 1 else result
        x, n = arith.muli(x, x), n >> 1
    return result


def cube(x: ir.Value) -> ir.Value:
    """x * x * x; for float32 in float64, so that only the result is rounded."""
    wide = ir.F64Type.get()
    if x.type == wide:
        return arith.mulf(arith.mulf(x, x), x)
    return arith.truncf(x.type, cube(arith.extf(wide, x)))


POWERS: dict[float, Callable[[ir.Value], ir.Value]] = {
    0: lambda x: like(x, 1), 1: lambda x: x, 2: lambda x: arith.mulf(x, x), 3: cube,
    0.5: math.sqrt, -1: lambda x: arith.divf(like(x, 1), x),
}
SPECIAL = {
    Op.POW: power,
    Op.WHERE: lambda node, mask, x, y: arith.select(mask, x, y),
    Op.CAST: lambda node, x: convert(x, node.operands[0].dtype, node.dtype),
}


# %% 02_builder.md § Numbers (8)
def scalar(node: Expr, values: list[ir.Value]) -> ir.Value:
    """The op on numbers, computed in the dtypes of NumPy's loop."""
    old = [x.dtype for x in node.operands]
    if node.op not in UFUNC:
        return SPECIAL[node.op](node, *values)
    takes = loop(node.op, *old)
    values = [convert(v, o, t) for v, o, t in zip(values, old, takes)]
    if node.op in SPECIAL:
        return SPECIAL[node.op](node, *values)
    return SCALAR[node.op, takes[0].kind](*values)
