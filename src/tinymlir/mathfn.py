# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Exponentials (1)
"""exp and tanh in plain arithmetic, for whole vectors at a time (chapter 3)."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial

from mlir import ir
from mlir.dialects import arith, math

from tinymlir.calls import find


@dataclass(frozen=True)
class Format:
    """What exp needs to know about a floating-point format."""

    bits: int
    mantissa: int
    bias: int
    low: float  # exp of less than this is 0
    high: float  # exp of more than this is infinity
    ln2: tuple[float, float]  # ln 2 in two parts, the first with trailing zeros
    terms: int

    @property
    def round(self) -> float:
        """Adding this leaves the nearest whole number in the last bits."""
        return 1.5 * 2.0**self.mantissa


FORMAT = {
    "f32": Format(32, 23, 127, -104.0, 89.0, (0.693145751953125,
                                              1.428606765330187e-06), 7),
    "f64": Format(64, 52, 1023, -746.0, 710.0, (0.6931471803691238,
                                                1.9082149292705877e-10), 13),
}


# %% 03_passes.md § Exponentials (2)
def const(x: ir.Value, value: float) -> ir.Value:
    return arith.constant(x.type, float(value))


def polynomial(x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """Horner's rule, the highest power first; one rounding a step."""
    total = const(x, coefficients[0])
    for c in coefficients[1:]:
        total = math.fma(total, x, const(x, c))
    return total


def power_of_two(n: ir.Value, like: ir.Value, f: Format) -> ir.Value:
    """2**n for an integer n within the range of normal numbers."""
    biased = arith.addi(n, arith.constant(n.type, f.bias))
    shifted = arith.shli(biased, arith.constant(n.type, f.mantissa))
    return arith.bitcast(like.type, shifted)


def exp(x: ir.Value) -> ir.Value:
    """e**x within 1 ulp; 0, inf, NaN and subnormal results as they should be."""
    f = FORMAT[str(x.type)]
    whole = ir.IntegerType.get_signless(f.bits)
    tiny = arith.cmpf(arith.CmpFPredicate.OLT, x, const(x, f.low))
    y = arith.minnumf(arith.select(tiny, const(x, 0), x), const(x, f.high))
    shifted = math.fma(y, const(x, 1.4426950408889634), const(x, f.round))
    n = arith.subf(shifted, const(x, f.round))
    r = math.fma(n, const(x, -f.ln2[0]), y)
    r = math.fma(n, const(x, -f.ln2[1]), r)
    series = polynomial(r, [1 / factorial(i) for i in range(f.terms, -1, -1)])
    zero = arith.bitcast(whole, const(x, f.round))
    count = arith.subi(arith.bitcast(whole, shifted), zero)
    half = arith.shrsi(count, arith.constant(whole, 1))
    rest = arith.subi(count, half)
    y = arith.mulf(series, power_of_two(half, x, f))
    y = arith.mulf(y, power_of_two(rest, x, f))
    y = arith.select(tiny, const(x, 0), y)
    return arith.select(arith.cmpf(arith.CmpFPredicate.UNO, x, x), x, y)


# %% 03_passes.md § Exponentials (3)
NEAR_ZERO = {
    "f32": ([-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2,
             1.33314422036e-1, -3.33332819422e-1], [1.0]),
    "f64": ([-9.64399179425052238628e-1, -9.92877231001918586564e1,
             -1.61468768441708447952e3],
            [1.0, 1.12811678491632931402e2, 2.23548839060100448583e3,
             4.84406305325125486048e3]),
}


def tanh(x: ir.Value) -> ir.Value:
    """tanh within 2 ulp, also for the smallest arguments."""
    over, under = NEAR_ZERO[str(x.type)]
    size = math.absf(x)
    square = arith.mulf(x, x)
    quotient = polynomial(square, over)
    if len(under) > 1:
        quotient = arith.divf(quotient, polynomial(square, under))
    near = math.fma(arith.mulf(x, square), quotient, x)
    grown = arith.addf(exp(arith.addf(size, size)), const(x, 1))
    far = arith.subf(const(x, 1), arith.divf(const(x, 2), grown))
    small = arith.cmpf(arith.CmpFPredicate.OLT, size, const(x, 0.625))
    return math.copysign(arith.select(small, near, far), x)


# %% 03_passes.md § Exponentials (4)
EXPAND = {"math.exp": exp, "math.tanh": tanh}


def expand_math(module: ir.Module) -> None:
    """Replace exp and tanh of the math dialect by plain arithmetic."""
    for op in find(module, *EXPAND):
        with ir.InsertionPoint(op), op.location:
            op.result.replace_all_uses_with(EXPAND[op.name](op.operands[0]))
        op.erase()
