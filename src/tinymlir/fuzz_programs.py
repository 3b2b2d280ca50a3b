# Tangled from notebooks/90_fuzz.md: edit the chapter, not this file.

# %% 90_fuzz.md § Programs as text (1)
"""Programs as text, and the arrays they are called with (appendix on fuzzing)."""
from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinymlir.updates import attend, update

NAMES = {"np": np, "attend": attend, "update": update}  # what programs may use


@dataclass(frozen=True, eq=False)
class Input:
    """An argument: an array, and the expression that views it in memory."""

    name: str
    base: np.ndarray
    layout: str  # such as "{}[::-1]", or "a.T" for another view of input a

    def __str__(self) -> str:
        return f"{self.name} = {self.layout.format(literal(self.base))}"

    def build(self, earlier: dict[str, np.ndarray]) -> np.ndarray:
        text = self.layout.format("base")
        return eval(text, {**NAMES, "base": self.base, **earlier})


# %% 90_fuzz.md § Programs as text (2)
def literal(array: np.ndarray) -> str:
    """An expression that makes this array."""
    kind, flat = f"np.{array.dtype}", array.reshape(-1)
    same = flat[:1].tobytes() * array.size == array.tobytes()
    if array.ndim and same:
        value = flat[0].item() if array.size else 0
        text = f"np.full({array.shape}, {value}, {kind})"
    else:
        text = f"np.array({array.tolist()}, {kind})"
    return re.sub(r"\b(nan|inf)\b", r"np.\1", text)


@dataclass(frozen=True, eq=False)
class Program:
    """A NumPy function as text, and what it is called with."""

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    returns: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.inputs), source(self)])

    def function(self) -> Callable:
        space: dict[str, Any] = {**NAMES, "__name__": "program"}
        exec(compile(source(self), "<program>", "exec"), space)
        return space["f"]

    def arrays(self) -> list[np.ndarray]:
        made: dict[str, np.ndarray] = {}
        for x in self.inputs:
            made[x.name] = x.build(made)
        return list(made.values())


# %% 90_fuzz.md § Programs as text (3)
def source(program: Program) -> str:
    """The function; a program of one statement is one line."""
    names = ", ".join(x.name for x in program.inputs)
    body = "\n".join(program.lines).splitlines()
    result = ", ".join(program.returns)
    if program.lines and re.fullmatch(f"{result} = .*", program.lines[-1]):
        result = body.pop().partition(" = ")[2]
    if not body:
        return f"def f({names}): return {result}"
    return "\n    ".join([f"def f({names}):", *body, f"return {result}"])


BUILT_IN = (TypeError, ValueError, IndexError, OverflowError, AttributeError)


def outcome(function: Callable, *args: Any) -> tuple[bool, Any]:
    """(True, result) or (False, error); NumPy's warnings are not our subject."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return True, function(*args)
        except Exception as error:  # of any kind: all are looked at
            return False, error


# %% 90_fuzz.md § Who chooses? (1)
Choose = Callable[[Sequence[Any]], Any]
f32, f64 = np.finfo(np.float32), np.finfo(np.float64)
POOLS: dict[str, list[list[Any]]] = {  # the first is tame, the others are not
    "f": [[1, 2, -1, 0, 3, -2, 0.5, -0.25], [1.5, 0.1, -3.7, 1e-3, 12.25, 1e4],
          [np.nan, 1, np.inf, -0.0, -np.inf, 0.0, 2],
          [1e-40, f32.max, 5e-324, -f32.smallest_subnormal, f64.tiny, f64.max,
           -1e30, 1 + f32.eps, 88.7, -103.5, 709.7, 2.0**31, -2.0**63, f32.tiny]],
    "i": [[1, 0, -1, 2, -2, 3], [7, 100, -46341, 2**16, 12345678],
          [2**31 - 1, -2**31, 2**30, -1],
          [2**63 - 1, -2**63, 2**53 + 1, 2**31, 5]],
    "b": [[True, False]],
}
KINDS = [np.dtype(t) for t in ("f8", "f4", "i8", "i4", "?")]
SHAPES = [(3,), (2, 3), (), (1,), (3, 3), (0,), (4, 1), (2, 3, 4), (1, 3), (2, 0),
          (5,), (3, 1, 2), (0, 3), (1, 1), (2, 3, 3), (17,), (2, 2, 1, 3),
          (1, 1, 2), (33, 5), (5, 18), (9, 9), (1, 70), (3, 300), (67,)]


def content(choose: Choose, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array whose numbers step through a pool, or are normal random numbers."""
    size, pools = int(np.prod(shape)), POOLS[dtype.kind]
    which = choose(range(len(pools) + (dtype.kind == "f")))
    if which == len(pools):
        rng = np.random.default_rng(choose(range(4)))
        return rng.standard_normal(shape).astype(dtype)
    pool = pools[which]
    start, step = choose(range(len(pool))), choose((1, 3, 5, 0))
    numbers = [pool[(start + i * step) % len(pool)] for i in range(size)]
    with np.errstate(all="ignore"):
        wide = np.array(numbers, "f8" if dtype.kind == "f" else None)
        return wide.astype(dtype).reshape(shape)


# %% 90_fuzz.md § Who chooses? (2)
LAYOUTS: list[Callable[[np.ndarray], str]] = [
    lambda x: "{}", lambda x: "{}.T", lambda x: "{}[::-1]",
    lambda x: "{}[..., ::2]", lambda x: "np.asfortranarray({})",
    lambda x: "{}[:, ::-1]", lambda x: "{}[1:]",
    lambda x: f"np.broadcast_to({{}}, {(2, *x.shape)})",
    lambda x: f"{{}}.astype('>{x.dtype.str[1:]}')",
    lambda x: f"np.frombuffer(b'.' + {{}}.tobytes(), '{x.dtype}', offset=1)"
              f".reshape({x.shape})",
]


def new_input(choose: Choose, name: str, earlier: dict[str, np.ndarray]) -> Input:
    """A new array in some layout, or a second look at an earlier one."""
    if earlier and choose(range(8)) == 7:
        other = choose(list(earlier))
        view = other + choose(("", "[::-1]", ".T"))
        return usable(Input(name, np.zeros(1), view), earlier, other)
    base = content(choose, choose(SHAPES), choose(KINDS))
    return usable(Input(name, base, choose(LAYOUTS)(base)), earlier, "{}")


def usable(x: Input, earlier: dict[str, np.ndarray], plain: str) -> Input:
    """The input, in the plain layout if its own does not fit the shape."""
    try:
        x.build(earlier)
        return x
    except (IndexError, ValueError):
        return Input(x.name, x.base, plain)
