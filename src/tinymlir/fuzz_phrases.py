# Tangled from notebooks/90_fuzz.md: edit the chapter, not this file.

# %% 90_fuzz.md § A phrase book (1)
"""Random NumPy statements, filled in from a phrase book (appendix on fuzzing)."""
from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tinymlir.expr import DTYPES, Op
from tinymlir.fuzz_programs import (
    KINDS, NAMES, Choose, Input, Program, content, literal, new_input, outcome)

PHRASES: dict[Op, list[str]] = {
    Op.INPUT: ["np.positive({x})", "{x}.copy()"],
    Op.CONSTANT: ["{x} + {array}", "np.where({m}, {array}, {x})", "{array} * {x}"],
    Op.ADD: ["{x} + {y}", "{y} + {x}", "np.add({x}, {y})"],
    Op.SUB: ["{x} - {y}", "{y} - {x}",
             "{x} - np.max({x}, axis={axis}, keepdims=True)"],
    Op.MUL: ["{x} * {y}", "{y} * {x}", "np.square({x})"],
    Op.DIV: ["{x} / {y}", "{y} / {x}", "np.reciprocal({f})"],
    Op.POW: ["{x} ** {power}", "{f} ** {y}", "{number} ** {f}",
             "np.power({x}, {power})"],
    Op.MAXIMUM: ["np.maximum({x}, {y})", "np.maximum({y}, {x})"],
    Op.MINIMUM: ["np.minimum({x}, {y})", "np.minimum({y}, {x})"],
    Op.LT: ["{x} < {y}"], Op.LE: ["{x} <= {y}"], Op.GT: ["{x} > {y}"],
    Op.GE: ["np.greater_equal({x}, {y})"], Op.NE: ["{x} != {y}", "np.isnan({f})"],
    Op.EQ: ["{x} == {y}", "np.logical_not({x})"],
    Op.AND: ["{i} & {y}", "np.logical_and({x}, {y})"],
    Op.OR: ["{i} | {y}", "np.logical_or({x}, {y})"], Op.XOR: ["{i} ^ {y}"],
    Op.NOT: ["~{i}"], Op.NEG: ["-{x}"], Op.ABS: ["abs({x})", "np.abs({x})"],
    Op.EXP: ["np.exp({x})", "np.exp(-abs({f}))"],
    Op.LOG: ["np.log({x})", "np.log(abs({f}))"],
    Op.SQRT: ["np.sqrt({x})", "np.sqrt(abs({f}))"], Op.TANH: ["np.tanh({x})"],
    Op.WHERE: ["np.where({m}, {x}, {y})", "np.where({x} > 0, {x}, {y})"],
    Op.CAST: ["{x}.astype({dtype})"],
}


# %% 90_fuzz.md § A phrase book (2)
PHRASES |= {
    Op.SUM: ["np.sum({x}, axis={axis})", "{x}.sum()", "np.mean({x}, axis={axis})",
             "np.sum({x}, axis={axis}, keepdims=True)", "np.std({x}, axis={axis})",
             "np.sum({x}, dtype={dtype})", "np.var({x}, axis={axis}, ddof={k})"],
    Op.MAX: ["np.max({x}, axis={axis})", "{x}.max()",
             "{x}.max({axis}, keepdims=True)"],
    Op.MIN: ["np.min({x}, axis={axis})", "{x}.min()",
             "{x}.min({axis}, keepdims=True)"],
    Op.MATMUL: ["{x} @ {w}", "{x} @ {x}.T", "{x}.T @ {x}", "np.dot({x}, {w})",
                "{x} @ np.swapaxes({x}, -1, -2)", "{x} @ {w} + {x}", "{x}.T @ {y}"],
    Op.RESHAPE: ["{x}.reshape({shape})", "np.ravel({x})", "{x}[..., None]",
                 "np.expand_dims({x}, {k})", "np.squeeze({x})", "{x}[None]"],
    Op.TRANSPOSE: ["{x}.T", "np.transpose({x}, {permutation})",
                   "np.moveaxis({x}, 0, -1)", "np.swapaxes({x}, 0, {k})"],
    Op.BROADCAST: ["np.broadcast_to({x}, (2, *{x}.shape))",
                   "np.broadcast_to({x}[..., None], (*{x}.shape, 3))"],
    Op.SLICE: ["{x}[{slices}]", "{x}[::-1]", "{x}[..., {slice}]", "{x}[{k}]",
               "np.split({x}, [{k}])[1]"],
    Op.CONCATENATE: ["np.concatenate([{x}, {y}])", "np.hstack([{x}, {y}])",
                     "np.concatenate([{y}, {x}], {k})", "np.vstack([{x}, {y}])",
                     "np.concatenate([{x}, {y}], axis=None)",
                     "np.stack([{x}, {x}], {k})"],
    Op.GATHER: ["{x}[{rows}]", "{x}[{rows}, {slice}]",
                "np.take({x}, {rows}, axis=0)"],
    Op.TRIU: ["np.triu({x}, {k})"], Op.TRIL: ["np.tril({x}, {k})"],
    Op.CALL: ["{x}\nfor _ in range(3): {out} = {out} @ {square} - {out}",
              "{x}\nfor w in ({square}, {square}): {out} = np.tanh({out} @ w)"],
    Op.RESULT: ["{x}; kept = []\nfor _ in range(3): {out} = {out} @ {square}; "
                "kept.append({out} * 2)\n{out} = np.stack(kept)"],
    Op.UPDATE: ["update({x}, {x}[-1:], {at})", "update({x}, {x}[:2] * 2, {at})"],
    Op.ATTEND: ["attend({q}, {f}, {f} * 2, {at}, 2.0)"],
}


# %% 90_fuzz.md § A phrase book (3)
class Writer:
    """Writes a program statement by statement."""

    def __init__(self, choose: Choose, values: dict[str, np.ndarray]) -> None:
        self.choose, self.values, self.lines = choose, dict(values), []
        self.reckless = False

    def pick(self, suits: Callable[[Any], bool] = lambda v: True) -> str | None:
        """The name of a value that suits, often a late one; or None."""
        good = [k for k, v in self.values.items() if self.reckless or suits(v)]
        return self.choose(good[::-1][:self.choose((99, 2))]) if good else None

    def array(self, shape: tuple[int, ...]) -> str:
        return literal(content(self.choose, shape, self.choose(KINDS)))

    def fill(self, phrase: str, out: str) -> str:
        """The phrase with its slots filled; the others have to fit the first."""
        slots = [s for _, s, _, _ in string.Formatter().parse(phrase) if s]
        main = next((s for s in MAIN if s in slots), "x")
        name = self.pick(MAIN[main]) or self.pick()
        filled = {"out": out, main: name}
        for slot in slots:
            if slot not in filled:
                filled[slot] = SLOTS[slot](self, self.values[name])
        return phrase.format(**filled)


MAIN = {"x": lambda v: True, "f": lambda v: v.dtype.kind == "f",
        "i": lambda v: v.dtype.kind in "ib"}


# %% 90_fuzz.md § A phrase book (4)
SLOTS: dict[str, Callable[[Writer, Any], str]] = {}


def slot(name: str) -> Callable:
    """Decorator: this function fills the slot of that name."""
    def register(function: Callable) -> Callable:
        SLOTS[name] = function
        return function
    return register


def fits(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Do they broadcast?"""
    return all(a == b or 1 in (a, b) for a, b in zip(shape[::-1], other[::-1]))


NUMBERS = ["2", "1", "0.5", "-1", "0", "3", "1e-3", "-0.0", "True", "np.float32(2)",
           "np.float64(1.5)", "np.int32(3)", "np.int64(-3)", "np.inf", "-np.inf",
           "np.nan", "2**31", "-2**40", "1e300", "1e40", "np.bool_(False)",
           "np.float64(0.1)", "np.float16(2)", "2**70"]
POWERS = ["2", "3", "0", "1", "0.5", "-1", "2.0", "1.5", "-2.0", "5", "31", "0.25",
          "np.float64(2)", "np.int32(2)", "np.float32(3)", "True", "-0.5"]
SLICES = [":", "1:", "::-1", ":1", "::2", "-2:", ":-1", "::-2", "2:0:-1", "5:"]
TYPES = ["np.float32", "np.int32", "np.int64", "np.float64", "bool", "np.float16"]
SLOTS["number"] = lambda w, x: w.choose(NUMBERS)
SLOTS["power"] = lambda w, x: w.choose(POWERS)
SLOTS["slice"] = lambda w, x: w.choose(SLICES)
SLOTS["dtype"] = lambda w, x: w.choose(TYPES)
SLOTS["array"] = lambda w, x: w.array(x.shape)
SLOTS["at"] = lambda w, x: w.pick(
    lambda v: not v.ndim and v.dtype.kind == "i" and 0 <= v <= 1) or w.choose("01")
SLOTS["k"] = lambda w, x: str(w.choose((1, 0, -1, 2, -2, 3)))


# %% 90_fuzz.md § A phrase book (5)
@slot("y")
def _(w: Writer, x: Any) -> str:
    """Another operand: a value, a number, or an array written out."""
    kind = w.choose(("value", "number", "value", "array"))
    found = w.pick(lambda v: fits(v.shape, x.shape)) if kind == "value" else None
    if found or kind == "array":
        return found or w.array(x.shape[x.ndim - w.choose(range(x.ndim + 1)):])
    return w.choose(NUMBERS)


@slot("m")
def _(w: Writer, x: Any) -> str:
    found = w.pick(lambda v: v.dtype.kind == "b" and fits(v.shape, x.shape))
    return found or w.choose(("True", w.array(x.shape)))


@slot("axis")
def _(w: Writer, x: Any) -> str:
    n = 4 if w.reckless else x.ndim
    axes = [None, *range(n), *range(-n, 0), (), tuple(range(n)), (0, -1)[:n]]
    return str(w.choose(axes))


@slot("w")
def _(w: Writer, x: Any) -> str:
    """A right factor."""
    n = x.shape[-1] if x.ndim else 1
    found = w.pick(lambda v: v.ndim and v.shape[-2:][0] == n)
    return found or w.array((n, w.choose((2, 1, 3, 0, 20))))


# %% 90_fuzz.md § A phrase book (6)
@slot("q")
def _(w: Writer, x: Any) -> str:
    """Queries (H, N, D) to rows of H * D."""
    n = x.shape[-1] if x.ndim else 1
    heads = w.choose([h for h in (1, 2, 3) if n % h == 0])
    shape = heads, w.choose((1, 2)), n // heads
    return literal(content(w.choose, shape, w.choose(KINDS[:2])))


@slot("square")
def _(w: Writer, x: Any) -> str:
    n = x.shape[-1] if x.ndim else 1
    return w.pick(lambda v: v.shape == (n, n)) or w.array((n, n))


@slot("shape")
def _(w: Writer, x: Any) -> str:
    n, s = x.size, x.shape
    if w.reckless:
        return str(w.choose([(2, -1), (3, 5), (n, 2), (-1, -1)]))
    good = [(-1,), (n, 1), (1, n), (*s, 1), s[::-1], (1, *s), (2, -1)]
    good += [(d, n // d) for d in (2, 3, 4) if n % d == 0]
    good += [(*s[:-1], d, s[-1] // d) for d in (2, 3) if s and s[-1] % d == 0]
    good += [(s[0] * s[1], *s[2:])] if len(s) > 1 else [()]
    return str(w.choose(good))


@slot("permutation")
def _(w: Writer, x: Any) -> str:
    axes, order = list(range(x.ndim)), []
    while axes:
        order.append(axes.pop(w.choose(range(len(axes)))))
    return str(tuple(order))


# %% 90_fuzz.md § A phrase book (7)
@slot("slices")
def _(w: Writer, x: Any) -> str:
    parts = [w.choose([*SLICES, "0", "-1", "None"] if n else SLICES)
             for n in x.shape]
    return ", ".join(parts) or "..."


ROWS = ("[0, -1]", "[]", "np.array([[0], [-1]])", "[1, 2, 0]", "range(2)",
        "np.array(0)")


@slot("rows")
def _(w: Writer, x: Any) -> str:
    """Row numbers: a value that holds such, or a list."""
    n = len(x) if x.ndim else 1
    found = w.pick(lambda v: v.dtype.kind == "i" and v.ndim and v.size < 40
                   and ((v >= -n) & (v < n)).all())
    return found if found and w.choose((True, True, False)) else w.choose(ROWS)


# %% 90_fuzz.md § A phrase book (8)
LARGEST = 5000  # elements


def write_program(choose: Choose) -> Program:
    """A program that NumPy can run, but perhaps for its last statement."""
    inputs: list[Input] = []
    values: dict[str, np.ndarray] = {}
    for name in "abc"[:choose((1, 2, 3))]:
        inputs.append(new_input(choose, name, values))
        values[name] = inputs[-1].build(values)
    writer = Writer(choose, values)
    while write_statement(writer) and len(writer.lines) < 12:
        if not choose((False, True, True, True, True)):  # another one?
            break
    program = Program(tuple(inputs), tuple(writer.lines), returned(writer))
    return without_unused(program) if choose((True, True, False)) else program


def returned(w: Writer) -> tuple[str, ...]:
    """The last value, every value that no statement uses, and perhaps some more."""
    text = " ".join(line.partition(" = ")[2] for line in w.lines)
    used = set(re.findall(r"\w+", text))
    names = list(w.values)[::-1]
    free = [n for n in names[1:] if n not in used and n[0] == "v"]
    more = [w.choose(names) for _ in range(w.choose((0, 0, 0, 1, 2)))]
    return (names[0], *free, *more)


def without_unused(program: Program) -> Program:
    """The program without the arguments that it has no use for."""
    inputs: list[Input] = []
    text = " ".join((*program.lines, *program.returns))
    for x in program.inputs[::-1]:
        if re.search(rf"\b{x.name}\b", text):
            inputs, text = [x, *inputs], f"{text} {x.layout}"
    return replace(program, inputs=tuple(inputs))


# %% 90_fuzz.md § A phrase book (9)
def write_statement(w: Writer) -> bool:
    """One more statement, if NumPy can run it. False: it is the last."""
    op, out = w.choose(list(PHRASES)), f"v{len(w.lines)}"
    w.reckless = w.choose(range(20)) == 19
    line = f"{out} = {w.fill(w.choose(PHRASES[op]), out)}"
    space = {**NAMES, **w.values}
    ok, _ = outcome(exec, line, space)
    value = np.asarray(space.get(out)) if ok else None
    good = ok and value.dtype in DTYPES
    if good and (value.size > LARGEST or value.ndim > 5):
        return True
    kept = good or w.choose(range(8)) == 7
    if kept:
        w.lines.append(line)
        w.values[out] = space[out] if good else np.zeros(())
    return good or not kept
