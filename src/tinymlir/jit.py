# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § Memory (1)
"""jit: compile a NumPy function for the arrays it is called with (chapter 4)."""
from __future__ import annotations

import functools
import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from tinymlir.errors import ArgumentError, OutOfRangeError, translated
from tinymlir.expr import ELEMENTWISE, REDUCTIONS, Expr, Op, TensorType
from tinymlir.graph import Graph, parameter_names, trace
from tinymlir.pytree import Structure, flatten_all, freeze
from tinymlir.rewrites import improve, narrow

TARGETS = {  # name -> the module that has take, load and texts
    "cpu": "tinymlir.compiler",
}


def target_module(name: str) -> ModuleType:
    """Imported when the first function is made for it."""
    return importlib.import_module(TARGETS[name])


# %% 04_jit.md § A compiled function (1)
@dataclass(eq=False)
class Compiled:
    """One specialisation: the code of a function for certain shapes and statics."""

    graph: Graph
    names: Sequence[str]
    inputs: tuple[Structure, ...]
    result: Structure
    target: str = "cpu"

    def __post_init__(self) -> None:
        self.program = target_module(self.target).load(self.graph)

    def __call__(self, *args: Any) -> Any:
        """Run. Raises ArgumentError for other shapes than those compiled for."""
        leaves, structures = flatten_all(args, self.names)
        if len(args) != len(self.inputs) or structures != self.inputs:
            raise ArgumentError(f"{self.graph.name} was compiled for arguments of "
                                f"another structure")
        take = target_module(self.target).take
        arrays = [take(leaf, path) for path, leaf in leaves]
        for array, node, path in zip(arrays, self.graph.inputs, self.graph.names):
            given = TensorType(array.shape, array.dtype)
            if given != node.type:
                raise ArgumentError(f"{path}: expected {node.type}, got {given}")
        return self.run(arrays)

    def run(self, arrays: Sequence[Any]) -> Any:
        """Run on what the target took. Raises OutOfRangeError."""
        made = self.program(arrays)
        for node, rows in zip(self.graph.gathers, made[len(self.graph.outputs):]):
            check_rows(node, rows)
        return self.result.fill(iter(made))

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """The text of every stage, from `graph` to machine code."""
        return target_module(self.target).texts(self.graph)


# %% 04_jit.md § A compiled function (2)
def check_rows(node: Expr, rows: np.ndarray) -> None:
    """Raise OutOfRangeError, as NumPy would, for an index outside its array."""
    n = len(node.operands[0])
    if rows.size and (rows.min() < -n or rows.max() >= n):
        bad = rows[(rows < -n) | (rows >= n)][0]
        raise translated(OutOfRangeError(
            f"index {bad} is out of bounds for axis 0 with size {n}"), node.source)


# %% 04_jit.md § Specialisation (1)
DTYPES = {None: (improve,), "float32": (narrow, improve)}  # -> rewrites


class Jitted:
    """A NumPy function that compiles itself for each new kind of arguments."""

    def __init__(self, function: Callable, target: str, dtype: str | None,
                 limit: int) -> None:
        for name, value, known in (("target", target, TARGETS),
                                   ("dtype", dtype, DTYPES)):
            if value not in known:
                raise ArgumentError(f"{name} {value!r} is not supported; expected "
                                    f"one of {', '.join(map(repr, known))}")
        limit_is_count = isinstance(limit, int) and limit is not True and limit > 0
        if not limit_is_count:
            raise ArgumentError(f"limit: expected a whole number of at least 1, "
                                f"got {limit!r}")
        functools.update_wrapper(self, function, updated=())
        self.function, self.limit = function, limit
        self.passes, self.target = DTYPES[dtype], target
        self.cache: OrderedDict[tuple, Compiled] = OrderedDict()
        self.gates: dict[tuple, threading.Lock] = {}
        self.lock = threading.RLock()

    def __call__(self, *args: Any, **static: Any) -> Any:
        names, leaves, structures = self.take_apart(args, static)
        if any(isinstance(leaf, Expr) for _, leaf in leaves):
            return self.inline(args, static)
        arrays = self.take(leaves)
        compiled = self.lookup(args, static, names, arrays, structures)
        return compiled.run(arrays)

    def take(self, leaves: Sequence[tuple[str, Any]]) -> list[Any]:
        take = target_module(self.target).take
        return [take(leaf, path) for path, leaf in leaves]

    def inline(self, args: tuple, static: dict) -> Any:
        """Inside another trace: one program, compiled as the outer one says."""
        if self.passes != DTYPES[None]:
            name = self.function.__name__
            raise ArgumentError(f"{name} has a dtype of its own, but is called "
                                f"inside another compiled function, whose dtype "
                                f"holds; give the dtype there")
        return self.function(*args, **static)

    def __get__(self, obj: Any, kind: type | None = None) -> Callable:
        return self if obj is None else functools.partial(self, obj)  # a method

    def compile(self, *args: Any, **static: Any) -> Compiled:
        """The specialisation for these arguments; compiles it if it is new."""
        names, leaves, structures = self.take_apart(args, static)
        arrays = self.take(leaves)
        return self.lookup(args, static, names, arrays, structures)

    def take_apart(self, args: tuple, static: dict) -> tuple:
        names = parameter_names(self.function, len(args))
        for key, value in static.items():
            if isinstance(value, (np.ndarray, Expr)):
                raise ArgumentError(f"keyword argument `{key}` is an array, and "
                                    f"keywords are static; pass it by position")
        return names, *flatten_all(args, names)

    def lookup(self, args, static, names, arrays, structures) -> Compiled:
        key = (structures, tuple((a.shape, a.dtype) for a in arrays),
               freeze(dict(sorted(static.items()))))
        with self.lock:
            if key in self.cache:
                self.cache.move_to_end(key)
                return self.cache[key]
            gate = self.gates.setdefault(key, threading.Lock())
        with gate:  # two threads with the same key compile once
            with self.lock:
                found = self.cache.get(key)
            return found or self.specialise(key, args, static, names, structures)

    def specialise(self, key, args, static, names, structures) -> Compiled:
        """Trace and compile; what the cache drops for it is least recently used."""
        try:
            graph, result = trace(self.function, args, static)
            for step in self.passes:
                graph = step(graph)
            compiled = Compiled(graph, names, structures, result, self.target)
        except BaseException:
            self.gates.pop(key, None)
            raise
        with self.lock:  # in the cache before the gate opens
            self.cache[key] = compiled
            self.gates.pop(key, None)
            while len(self.cache) > self.limit:
                self.cache.popitem(last=False)
        return compiled

    def cache_clear(self) -> None:
        """Forget every specialisation."""
        with self.lock:
            self.cache.clear()

    def explain(self, *args: Any, **static: Any) -> str:
        """What the arguments compile to, and why (compiles if it is new)."""
        return explain(self, args, static)


# %% 04_jit.md § Specialisation (2)
def jit(function: Callable | None = None, *, target: str = "cpu",
        dtype: str | None = None, limit: int = 256) -> Any:
    """Compile a NumPy function: `f = jit(f)`, `@jit` or `@jit(target="cpu")`.

    f(*arrays, **static): positional arguments are arrays and pytrees of arrays, and
    are traced; keyword arguments are static. Results are fresh arrays, equal in
    value, shape and dtype to what the function returns under NumPy. With
    dtype="float32" everything that would be float64 is computed in float32 instead.
    At most `limit` specialisations are kept, the least recently used are dropped.

    Raises a subclass of TinymlirError for what cannot be traced or compiled."""
    if function is None:
        return functools.partial(jit, target=target, dtype=dtype, limit=limit)
    if not callable(function):
        raise ArgumentError(f"jit takes a function, got {type(function).__name__}")
    return Jitted(function, target, dtype, limit)


# %% 04_jit.md § What did it do? (1)
def differences(key: tuple, other: tuple, names: Sequence[str]) -> list[str]:
    """What tells two keys apart, in words."""
    (structures, types, static), (structures2, types2, static2) = key, other
    found = []
    if structures != structures2:
        found.append("the structure of the arguments differs")
    elif types != types2:
        found += [f"{name}: {TensorType(*a)} instead of {TensorType(*b)}"
                  for name, a, b in zip(names, types, types2) if a != b]
    if static != static2:
        found.append("the static keywords differ")
    return found


def flops(graph: Graph) -> int:
    """Arithmetic operations: two for each product of a matmul, else one."""
    products = sum(2 * x.size * x.operands[0].shape[-1] for x in graph.nodes
                   if x.op is Op.MATMUL)
    single = sum(x.size for x in graph.nodes if x.op in ELEMENTWISE)
    return products + single + sum(x.operands[0].size for x in graph.nodes
                                   if x.op in REDUCTIONS)


# %% 04_jit.md § What did it do? (2)
def explain(jitted: Jitted, args: tuple, static: dict) -> str:
    """The report of Jitted.explain."""
    known = list(jitted.cache)
    compiled = jitted.compile(*args, **static)
    key = next(k for k, c in jitted.cache.items() if c is compiled)
    graph = compiled.graph
    reasons = [differences(key, other, graph.names) for other in known]
    new = "; ".join(min(reasons, key=len)) if reasons else "this is the first call"
    inputs = sum(x.type.nbytes for x in (*graph.inputs, *graph.arrays))
    steps = [f"  {name}: {len(text.splitlines())} lines, "
             f"{text.count('linalg.generic')} generics, "
             f"{text.count('scf.for')} loops"
             for name, text in compiled.stages.items() if name != "asm"]
    takes = ", ".join(f"{n}: {x.type}" for n, x in zip(graph.names, graph.inputs))
    return "\n".join([
        f"{graph.name}({takes})",
        f"compiled already: {'yes' if key in known else 'no, ' + new}",
        f"specialisations: {len(jitted.cache)} of at most {jitted.limit}",
        f"bytes in {inputs}, out {sum(x.type.nbytes for x in graph.outputs)}; "
        f"operations {flops(graph)}", *steps])
