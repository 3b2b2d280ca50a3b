# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § Running it (1)
"""What the instructions of PTX compute, by NumPy (chapter 9)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

TYPES = {f"{kind}{bits}": np.dtype(f"{code}{bits // 8}")
         for kind, code in (("b", "u"), ("u", "u"), ("s", "i")) for bits in (
             8, 16, 32, 64)} | {"f32": np.dtype("f4"), "f64": np.dtype("f8"),
                                "pred": np.dtype(bool)}
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


# %% 09_cuda.md § Running it (2)
def wide(a: Any, b: Any, name: Sequence[str]) -> Any:
    """The upper half of a product."""
    bits = a.dtype.itemsize * 8
    big = np.dtype(f"{a.dtype.kind}8") if bits < 64 else object
    return np.asarray(np.asarray(a).astype(big) * np.asarray(b).astype(big) >> bits
                      ).astype(a.dtype)


def fma(a: Any, b: Any, c: Any, name: Sequence[str]) -> Any:
    if a.dtype != np.float32:
        return a * b + c
    exact = np.multiply(a, b, dtype="f8") + c
    near = exact.astype("f4")
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near
                    ).astype("f4") if "rm" in name else near


def shift(a: Any, by: Any, left: bool) -> Any:
    """Shifts beyond the width give zero, or the sign."""
    bits = a.dtype.type(a.dtype.itemsize * 8 - 1)
    small = np.minimum(by, np.uint32(bits)).astype(a.dtype)
    moved = a << small if left else a >> small
    keeps_sign = not left and a.dtype.kind == "i"
    beyond = moved if keeps_sign else np.zeros((), a.dtype)
    return np.where(by <= bits, moved, beyond).astype(a.dtype)


def quotient(a: Any, b: Any) -> Any:
    """Division; of integers, towards zero."""
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, b.dtype.type(1), b)
    return (a - np.fmod(a, safe)) // safe


def field(a: Any, start: Any, length: Any, name: Sequence[str]) -> Any:
    """Some bits of a number, from `start` on, with the sign of the last one."""
    bits = np.uint32(a.dtype.itemsize * 8)
    end = np.minimum(start + length, bits)
    found = shift(shift(a, bits - end, True), bits - end + start, False)
    return np.where(end > start, found, 0).astype(a.dtype)


def integer(name: Sequence[str]) -> bool:
    return name[-1][0] != "f"


# %% 09_cuda.md § Running it (3)
def product(a: Any, b: Any, name: Sequence[str]) -> Any:
    if "hi" in name:
        return wide(a, b, name)
    if "wide" in name:
        into = TYPES[WIDER[name[-1]]]
        return a.astype(into) * b.astype(into)
    return a * b


def largest(a: Any, b: Any, name: Sequence[str]) -> Any:
    return (np.maximum if "NaN" in name or integer(name) else np.fmax)(a, b)


def smallest(a: Any, b: Any, name: Sequence[str]) -> Any:
    return (np.minimum if "NaN" in name or integer(name) else np.fmin)(a, b)


COMPUTE: dict[str, Callable[..., Any]] = {  # operation -> from operands and name
    "add": lambda a, b, name: a + b, "sub": lambda a, b, name: a - b,
    "mul": product, "fma": fma, "max": largest, "min": smallest,
    "mad": lambda a, b, c, name: product(a, b, name) + c,
    "div": lambda a, b, name: quotient(a, b),
    "rem": lambda a, b, name: a - b * quotient(a, b),
    "neg": lambda a, name: -a, "abs": lambda a, name: abs(a),
    "and": lambda a, b, name: a & b, "or": lambda a, b, name: a | b,
    "xor": lambda a, b, name: a ^ b, "not": lambda a, name: ~a,
    "shl": lambda a, by, name: shift(a, by, True),
    "shr": lambda a, by, name: shift(a, by, False), "bfe": field,
    "selp": lambda a, b, p, name: np.where(p, a, b),
    "sqrt": lambda a, name: np.sqrt(a), "rcp": lambda a, name: 1 / a,
    "rsqrt": lambda a, name: 1 / np.sqrt(a), "ex2": lambda a, name: np.exp2(a),
    "lg2": lambda a, name: np.log2(a), "sin": lambda a, name: np.sin(a),
    "cos": lambda a, name: np.cos(a), "tanh": lambda a, name: np.tanh(a),
    "copysign": lambda a, b, name: np.copysign(b, a),
    "cvta": lambda a, name: a, "mov": lambda a, name: a,
    "clz": lambda a, name: np.uint32(31) - np.floor(np.log2(np.maximum(
        a, 1).astype("f8"))).astype("u4") + (a == 0),
}
SIGNED = {"lt": np.less, "le": np.less_equal, "gt": np.greater,
          "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
          "lo": np.less, "ls": np.less_equal, "hi": np.greater,
          "hs": np.greater_equal}


def compare(how: str, a: Any, b: Any) -> Any:
    """A comparison. With a NaN it is false, or true if its name ends in u."""
    unordered = (np.isnan(a) | np.isnan(b)) if a.dtype.kind == "f" else False
    if how in ("nan", "num"):
        return unordered if how == "nan" else ~unordered
    if how in SIGNED:
        return SIGNED[how](a, b) & ~(np.asarray(unordered))
    return SIGNED[how[:-1]](a, b) | unordered


# %% 09_cuda.md § Running it (4)
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def convert(a: Any, name: Sequence[str]) -> Any:
    """`cvt.rounding.to.from`"""
    into = TYPES["f32" if name[-2] == "tf32" else name[-2]]
    for mode in name[1:-2]:
        a = ROUND[mode](a) if mode in ROUND else a
    if name[-2] == "tf32":  # ten bits of the fraction, to nearest, ties away
        bits = a.view("u4") + np.uint32(0x1000)
        return (bits & np.uint32(0xffffe000)).view("f4")
    if a.dtype.kind == "f" and into.kind != "f":
        low, high = np.iinfo(into).min, np.iinfo(into).max
        inside = np.clip(np.nan_to_num(a.astype("f8")), low, float(high))
        made = inside.astype(into)
        return np.where(inside >= high, into.type(high), made)
    made = a.astype(into)
    return np.fmin(np.fmax(made, 0), 1).astype(into) if "sat" in name else made
