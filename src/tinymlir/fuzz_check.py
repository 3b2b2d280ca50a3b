# Tangled from notebooks/90_fuzz.md: edit the chapter, not this file.

# %% 90_fuzz.md § Modes (1)
"""One program in every mode, compared with NumPy (appendix on fuzzing)."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from tinymlir import jit, loops
from tinymlir.errors import TinymlirError
from tinymlir.expr import Expr, Op
from tinymlir.fuzz_bounds import bounds
from tinymlir.fuzz_programs import BUILT_IN, Program, outcome
from tinymlir.graph import Graph, evaluate, rewrite, same, trace
from tinymlir.jit import TARGETS
from tinymlir.updates import SPELLED

TARGETS["unfused"] = "tinymlir.fuzz_unfused"


def interpreted(function: Callable) -> Callable:
    """The function as the interpreter of graphs runs it."""
    def run(*arrays: np.ndarray) -> Any:
        graph, structure = trace(function, arrays, {})
        return structure.fill(iter(evaluate(graph, *arrays)))
    return run


@dataclass(frozen=True)
class Mode:
    """A way to run a function, and what NumPy is asked for comparison."""

    engine: Callable[[Callable], Callable]
    narrow: bool = False  # compare with the same program in float32


def shared(function: Callable) -> Callable:
    """Compiled code whose loops are shared by threads, however short they are."""
    compiled = jit(function)

    def run(*arrays: np.ndarray) -> Any:
        with mock.patch.object(loops, "ENOUGH", 1):
            return compiled(*arrays)
    return run


MODES: dict[str, Mode] = {
    "interpreter": Mode(interpreted),
    "unfused": Mode(partial(jit, target="unfused")),
    "fused": Mode(jit),
    "threads": Mode(shared),
    "float32": Mode(partial(jit, dtype="float32"), narrow=True),
}


# %% 90_fuzz.md § Modes (2)
NARROW = {"f8": "f4", "float64": "float32"}


def in_float32(program: Program) -> Program:
    """The program with float32 wherever it says float64."""
    inputs = []
    for x in program.inputs:
        layout = re.sub("f8|float64", lambda found: NARROW[found[0]], x.layout)
        inputs.append(replace(x, base=narrowed(x.base), layout=layout))
    lines = tuple(line.replace("float64", "float32") for line in program.lines)
    return Program(tuple(inputs), lines, program.returns)


def narrowed(array: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(np.float32) if array.dtype == np.float64 else array


def attend_spelled_out(node: Expr, operands: tuple[Expr, ...]) -> Expr:
    """ATTEND in other operations, whose bounds are known."""
    return (SPELLED[Op.ATTEND](*operands) if node.op is Op.ATTEND
            else same(node, operands))


@dataclass
class Oracle:
    """NumPy's results, and how far each element may be from them."""

    results: Any
    bounds: list[np.ndarray]


def oracle_of(program: Program, narrow: bool) -> Oracle | None:
    """What a mode is held to; None if that cannot be said."""
    small = in_float32(program) if narrow else program
    function, arrays = small.function(), small.arrays()
    ok, results = outcome(function, *arrays)
    traced, found = outcome(trace, function, tuple(arrays), {})
    if not ok or not traced:
        return None
    graph = rewrite(found[0], attend_spelled_out)
    limits = bounds(graph, *arrays)
    unsure = any(limits[id(x.operands[1])].any() for x in graph.nodes
                 if x.op in (Op.GATHER, Op.UPDATE))
    if unsure or narrow and any(x.dtype == np.float64 for x in graph.nodes):
        return None
    return Oracle(results, [limits[id(x)] for x in graph.outputs])


# %% 90_fuzz.md § One program (1)
REFUSALS = [  # what NumPy does and tinymlir does not: the patterns of its messages
    r"integer \*\* array is not supported",
    r"powers of bool arrays are int8",
    r"dtype \S+ is not supported",
    r"is not supported for these dtypes",
    r"a mask selects a number of elements",
    r"True and False as an index are masks",
    r"np.dot with a stack of matrices",
    r"a mean or variance of dtype",
    r"np.take needs integers",  # NumPy takes np.float64(0) for one, but no array
    r"Python integer \S+ out of bounds",  # np.where wraps it around
]


@dataclass
class Verdict:
    """What came of a program."""

    kind: str = "agree"  # or "refused", "undecided"
    reason: str = ""
    graph: Graph | None = None
    compared: Counter = field(default_factory=Counter)  # exact, near, unknown
    fault: tuple[str, str] | None = None  # the mode, and what is wrong


# %% 90_fuzz.md § One program (2)
def check(program: Program, modes: Mapping[str, Mode] | None = None) -> Verdict:
    """Run a program in every mode and compare with NumPy."""
    modes = MODES if modes is None else modes
    function, arrays = program.function(), program.arrays()
    ok, theirs = outcome(function, *arrays)
    traced, found = outcome(trace, function, tuple(arrays), {})
    if not ok or not traced:
        return check_refusal(program, modes, None if ok else theirs, found)
    verdict = Verdict(graph=found[0])
    for name, mode in modes.items():
        oracle = oracle_of(program, mode.narrow)
        if oracle is None and not mode.narrow:
            return Verdict("undecided", "an index that is not certain", found[0])
        wrong = oracle and compare(
            mode.engine(function), arrays, oracle, verdict.compared)
        if wrong:
            verdict.fault = name, wrong
            break
    return verdict


def compare(run: Callable, arrays: list[np.ndarray], oracle: Oracle,
            compared: Counter) -> str | None:
    """What is wrong with the results of a mode, or None."""
    ok, ours = outcome(run, *arrays)
    if not ok:
        return f"{type(ours).__name__}: {ours}"
    pairs = zip(as_list(ours), as_list(oracle.results), oracle.bounds)
    found = (difference(np.asarray(mine), np.asarray(his), bound, compared)
             for mine, his, bound in pairs)
    return next(filter(None, found), None)


def as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple) else [results]


# %% 90_fuzz.md § One program (3)
def difference(mine: np.ndarray, his: np.ndarray, bound: np.ndarray,
               compared: Counter) -> str | None:
    """How two arrays differ by more than the bound, or None."""
    his = his.astype(his.dtype.newbyteorder("="))
    if (mine.shape, mine.dtype) != (his.shape, his.dtype):
        return f"{mine.dtype}{mine.shape} is not {his.dtype}{his.shape}"
    with np.errstate(all="ignore"):
        near = np.abs(mine.astype(float) - his.astype(float)) <= bound
    good = equal(mine, his) | ((bound > 0) & (near | np.isinf(bound)))
    compared["exact"] += int((bound == 0).sum())
    compared["near"] += int(((bound > 0) & np.isfinite(bound)).sum())
    compared["unknown"] += int(np.isinf(bound).sum())
    return None if good.all() else f"{mine[~good][:3]} is not {his[~good][:3]}"


def equal(mine: np.ndarray, his: np.ndarray) -> np.ndarray:
    """Bit by bit, but any NaN is like any other."""
    if mine.dtype.kind != "f":
        return mine == his
    same = (mine == his) & (np.signbit(mine) == np.signbit(his))
    return same | (np.isnan(mine) & np.isnan(his))


# %% 90_fuzz.md § One program (4)
def check_refusal(program: Program, modes: Mapping[str, Mode],
                  theirs: Exception | None, ours: Any) -> Verdict:
    """A program that NumPy or tinymlir refuses is refused in every mode."""
    verdict = Verdict("refused", "NumPy refuses it too" if theirs else str(ours))
    for name, mode in modes.items():
        if mode.narrow:
            continue
        ok, error = outcome(mode.engine(program.function()), *program.arrays())
        wrong = "it is not refused" if ok else wrong_error(error, theirs)
        if wrong:
            verdict.fault = name, wrong
            break
    return verdict


def wrong_error(ours: Exception, theirs: Exception | None) -> str | None:
    """What is wrong with a refusal, or None."""
    text, named = f"{type(ours).__name__}: {ours}", isinstance(ours, TinymlirError)
    if named and any(re.search(pattern, str(ours)) for pattern in REFUSALS):
        return None
    if theirs is None:
        return f"refused, unlike NumPy, by {text}"
    if type(ours) is type(theirs) and str(ours) == str(theirs):
        return None  # it was NumPy or Python that refused
    if "unsupported operand type" in str(theirs):
        return None  # NumPy's scalars are pickier than arrays of no dimension
    if named and "matmul does not take 0-d" in text:
        return None  # of several mistakes any may be named
    kinds = tuple(kind for kind in BUILT_IN if isinstance(theirs, kind))
    wanted = f"where NumPy has {type(theirs).__name__}: {theirs}"
    return None if named and isinstance(ours, kinds) else f"{text}, {wanted}"
