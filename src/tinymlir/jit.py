# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § Targets (1)
"""jit: compile a NumPy function for the arrays it is called with (chapter 4)."""
from __future__ import annotations

import functools
import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np

from tinymlir.compiler import merged
from tinymlir.donated import check_donated, check_rest, span
from tinymlir.errors import ArgumentError, OutOfRangeError, translated
from tinymlir.expr import Expr, Source, TensorType
from tinymlir.graph import BOUNDS, Graph, parameter_names, trace
from tinymlir.pytree import LEAF, Structure, children, flatten_all, freeze
from tinymlir.rewrites import improve, narrow
from tinymlir.watch import watched

TARGETS = {  # name -> the module that has take, ready, load and texts
    "cpu": "tinymlir.compiler",
    "emulator": "tinymlir.emulator",  # chapter 8
    "gpu": "tinymlir.cuda",  # chapter 9
}


def target_module(name: str) -> ModuleType:
    """Imported when the first function is made for it."""
    return importlib.import_module(TARGETS[name])


# %% 04_jit.md § A compiled function (1)
def collect(tree: Any, structure: Structure, leaves: list[Any]) -> bool:
    """Has the tree this structure? Then its arrays are appended to `leaves`."""
    if structure is LEAF:
        leaves.append(tree)
        return True
    if type(tree) is not structure.kind:
        return False
    if structure.parts is None:
        return freeze(tree) == structure.frozen
    if type(tree) is dict and tuple(map(freeze, tree)) != structure.frozen:
        return False
    parts = tree if isinstance(tree, (tuple, list)) else [
        part for _, part in children(tree)]
    return len(parts) == len(structure.parts) and all(
        collect(part, inner, leaves) for part, inner in zip(parts, structure.parts))


def count(structure: Structure) -> int:
    """How many arrays there are in a tree of this structure."""
    if structure is LEAF:
        return 1
    return sum(map(count, structure.parts or ()))


# %% 04_jit.md § A compiled function (2)
@dataclass(eq=False)
class Signature:
    """What a call has to be given, by name: structure, and types of the arrays."""

    function: str
    target: ModuleType
    parameters: dict[str, tuple[Structure, list[TensorType]]]

    def __post_init__(self) -> None:
        self.structures = tuple(s for s, _ in self.parameters.values())
        self.types = [t for _, types in self.parameters.values() for t in types]

    def only(self, names: Iterable[str]) -> Signature:
        """The part that says something about these parameters."""
        return replace(self, parameters={n: self.parameters[n] for n in names})

    def match(self, args: tuple) -> list[Any] | None:
        """The arrays, if every one is ready as it is."""
        found: list[Any] = []
        ready = self.target.ready
        good = len(args) == len(self.structures) and all(
            collect(arg, inner, found) for arg, inner in zip(args, self.structures))
        good = good and all(ready(array, t.shape, t.dtype)
                            for array, t in zip(found, self.types))
        return found if good else None

    def take(self, args: tuple) -> list[Any]:
        """The arrays, made ready. Raises ArgumentError for others than expected."""
        if (found := self.match(args)) is not None:
            return found
        names = list(self.parameters)
        leaves, structures = flatten_all(args, names)
        fit = [a == b for a, b in zip(structures, self.structures)]
        if len(args) != len(names) or not all(fit):
            which = "arguments" if all(fit) else f"`{names[fit.index(False)]}`"
            raise ArgumentError(
                f"{self.function} was compiled for {which} of another structure; "
                f"it takes {', '.join(names) or 'none'}")
        arrays = [self.target.take(leaf, path) for path, leaf in leaves]
        for array, expected, (path, _) in zip(arrays, self.types, leaves):
            given = TensorType(array.shape, array.dtype)
            if given != expected:
                raise ArgumentError(f"{path}: expected {expected}, got {given}")
        return arrays


# %% 04_jit.md § A compiled function (3)
@dataclass(eq=False)
class Compiled:
    """One specialisation: the code of a function for certain shapes and statics."""

    graph: Graph
    names: Sequence[str]
    inputs: tuple[Structure, ...]
    result: Structure
    target: str = "cpu"
    static: tuple = ()

    def __post_init__(self) -> None:
        self.module = target_module(self.target)
        self.program = self.module.load(self.graph)
        self.checks = [(*BOUNDS[x.op](x), x.source) for x in self.graph.gathers]
        types = iter(x.type for x in self.graph.inputs)
        self.signature = Signature(self.graph.name, self.module, {
            name: (structure, list(islice(types, count(structure))))
            for name, structure in zip(self.names, self.inputs)})

    def __call__(self, *args: Any) -> Any:
        """Run. Raises ArgumentError for other shapes than those compiled for."""
        return self.run(self.signature.take(args))

    def run(self, arrays: Sequence[Any]) -> Any:
        """Run on what the target took. Raises OutOfRangeError."""
        check_donated(self.graph, arrays)
        return self.finish(self.program(arrays))

    def finish(self, made: list[Any]) -> Any:
        """The result, once the indices that came with it have been checked."""
        for check, rows in zip(self.checks, made[len(self.graph.outputs):]):
            check_rows(rows, *check)
        return self.result.fill(iter(made))

    def bind(self, **arguments: Any) -> Bound:
        """The function with some arguments given now, by the parameter's name."""
        return Bound(self, {}).bind(**arguments)

    @cached_property
    def stages(self) -> Mapping[str, str]:
        """The text of every stage, from `graph` to machine code."""
        with watched(f"compiling {self.graph.name}"):
            return self.module.texts(self.graph)


# %% 04_jit.md § A compiled function (4)
def check_rows(rows: np.ndarray, low: int, high: int, message: str, source: Source
               ) -> None:
    """Raise OutOfRangeError, as NumPy would, for an index outside its array."""
    if rows.size == 1 and low <= rows.item() <= high:
        return
    bad = rows[(rows < low) | (rows > high)]
    if bad.size:
        raise translated(OutOfRangeError(message.format(bad[0])), source)


# %% 04_jit.md § Arguments that stay (1)
class Bound:
    """A compiled function some of whose arguments are given."""

    def __init__(self, compiled: Compiled, given: dict[str, list[Any]]) -> None:
        self.compiled, self.given = compiled, given
        whole = compiled.signature
        self.signature = whole.only(n for n in whole.parameters if n not in given)
        self.arrays = [array for name, (_, types) in whole.parameters.items()
                       for array in given.get(name, [None] * len(types))]
        check_donated(compiled.graph, self.arrays)
        given = [self.arrays[i] for i in compiled.graph.donated]
        self.late = any(array is None for array in given)
        self.spans = [] if self.late else sorted(map(span, given))
        self.program = compiled.program.bind(self.arrays)

    def __call__(self, *rest: Any) -> Any:
        """Call with the arguments that are left. Raises ArgumentError."""
        arrays = self.signature.take(rest)
        if self.late:
            check_donated(self.compiled.graph, merged(self.arrays, arrays))
        elif self.spans:
            check_rest(self.spans, arrays)
        return self.compiled.finish(self.program(arrays))

    def bind(self, **arguments: Any) -> Bound:
        """Bind more. Raises ArgumentError for a name or type that does not fit."""
        function, left = self.compiled.graph.name, self.signature.parameters
        for name in arguments:
            if name not in left:
                why = "bound already" if name in self.given else "no parameter"
                raise ArgumentError(f"bind: `{name}` is {why} of {function}; "
                                    f"left to bind: {', '.join(left)}")
        taken = {name: self.signature.only([name]).take((argument,))
                 for name, argument in arguments.items()}
        return Bound(self.compiled, self.given | taken)


# %% 04_jit.md § Specialisation (1)
def donated(graph: Graph, chosen: Sequence[str], names: Sequence[str],
            structures: Sequence[Structure], target: str) -> Graph:
    """The graph with the arrays of these parameters marked as donated."""
    for name in chosen:
        if name not in names:
            raise ArgumentError(f"donate: {graph.name} has no parameter `{name}`; "
                                f"it takes {', '.join(names) or 'none'}")
    owner = [name for name, structure in zip(names, structures)
             for _ in range(count(structure))]
    return replace(graph, donated=tuple(
        i for i, name in enumerate(owner) if in_place(target) and name in chosen))


ELSEWHERE: list[Callable[[Graph], Graph]] = []  # rewrites where nothing is in place


def in_place(target: str) -> bool:
    """Can code for this target write to its arguments?"""
    return getattr(target_module(target), "IN_PLACE", False)


DTYPES = {None: (improve,), "float32": (narrow, improve)}  # -> rewrites
PRECISIONS = {"float32": TARGETS, "tf32": ("emulator", "gpu")}  # -> who has it


def add_hint(error: BaseException, names: Sequence[str],
             structures: Sequence[Structure]) -> None:
    """A note for who passed a list of numbers, which is static, for an array."""
    empty = [(name, s.kind.__name__) for name, s in zip(names, structures)
             if s.parts and not count(s)]
    for name, kind in empty if isinstance(error, TypeError) else ():
        error.add_note(f"`{name}` is a {kind} without an array in it; "
                       f"pass np.asarray({name})")


def frozen(static: dict[str, Any]) -> tuple:
    """The static keywords as part of a key."""
    return freeze(dict(sorted(static.items()))) if static else ()


class Jitted:
    """A NumPy function that compiles itself for each new kind of arguments."""

    def __init__(self, function: Callable, target: str, dtype: str | None,
                 limit: int, donate: tuple[str, ...], precision: str) -> None:
        for name, value, known in (("target", target, TARGETS),
                                   ("dtype", dtype, DTYPES),
                                   ("precision", precision, PRECISIONS)):
            if value is not None and type(value) is not str or value not in known:
                raise ArgumentError(f"{name} {value!r} is not supported; expected "
                                    f"one of {', '.join(map(repr, known))}")
        if target not in PRECISIONS[precision]:
            raise ArgumentError(
                f"precision {precision!r} is not supported for target {target!r}; "
                f"it needs {' or '.join(map(repr, PRECISIONS[precision]))}")
        limit_is_count = isinstance(limit, int) and limit is not True and limit > 0
        if not limit_is_count:
            raise ArgumentError(f"limit: expected a whole number of at least 1, "
                                f"got {limit!r}")
        functools.update_wrapper(self, function, updated=())
        self.function, self.limit, self.donate = function, limit, donate
        self.passes, self.target = DTYPES[dtype], target
        self.precision = precision
        self.cache: OrderedDict[tuple, Compiled] = OrderedDict()
        self.gates: dict[tuple, threading.Lock] = {}
        self.lock = threading.RLock()
        self.last: Compiled | None = None  # the one that was used last

    def __call__(self, *args: Any, **static: Any) -> Any:
        last = self.last
        if last is not None and frozen(static) == last.static:
            arrays = last.signature.match(args)
            if arrays is not None:
                return last.run(arrays)
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
        own = {"dtype": self.passes != DTYPES[None],
               "precision": self.precision != "float32"}
        for what in (what for what, chosen in own.items() if chosen):
            name = self.function.__name__
            raise ArgumentError(f"{name} has a {what} of its own, but is called "
                                f"inside another compiled function, whose {what} "
                                f"holds; give the {what} there")
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
               frozen(static))
        with self.lock:
            if key in self.cache:
                self.cache.move_to_end(key)
                self.last = self.cache[key]
                return self.last
            gate = self.gates.setdefault(key, threading.Lock())
        with gate:  # two threads with the same key compile once
            with self.lock:
                found = self.cache.get(key)
            if found:
                return found
            with watched(f"compiling {getattr(self, '__name__', 'a function')}"):
                return self.specialise(key, args, static, names, structures)

    def specialise(self, key, args, static, names, structures) -> Compiled:
        """Trace and compile; what the cache drops for it is least recently used."""
        try:
            graph, result = trace(self.function, args, static)
            before = () if in_place(self.target) else ELSEWHERE
            for step in (*before, *self.passes):
                graph = step(graph)
            graph = donated(graph, self.donate, names, structures, self.target)
            graph = replace(graph, precision=self.precision)
            compiled = Compiled(graph, names, structures, result, self.target,
                                key[-1])
        except BaseException as error:
            self.gates.pop(key, None)
            add_hint(error, names, structures)
            raise
        with self.lock:  # in the cache before the gate opens
            self.cache[key] = self.last = compiled
            self.gates.pop(key, None)
            while len(self.cache) > self.limit:
                self.cache.popitem(last=False)
        return compiled

    def cache_clear(self) -> None:
        """Forget every specialisation."""
        with self.lock:
            self.cache.clear()
            self.last = None

    def explain(self, *args: Any, **static: Any) -> str:
        """What the arguments compile to, and why (compiles if it is new)."""
        from tinymlir.explain import explain
        return explain(self, args, static)


# %% 04_jit.md § Specialisation (2)
def jit(function: Callable | None = None, *, target: str = "cpu",
        dtype: str | None = None, precision: str = "float32", limit: int = 256,
        donate: tuple[str, ...] = ()) -> Any:
    """Compile a NumPy function: `f = jit(f)`, `@jit` or `@jit(target="cpu")`.

    f(*arrays, **static): positional arguments are arrays and pytrees of arrays, and
    are traced; keyword arguments are static. Results are fresh arrays, equal in
    value, shape and dtype to what the function returns under NumPy. With
    dtype="float32" everything that would be float64 is computed in float32 instead.
    With precision="tf32" a GPU looks at no more than 11 bits of each number when it
    multiplies float32 matrices (chapter 8).
    At most `limit` specialisations are kept, the least recently used are dropped.
    Arrays of parameters named in `donate` may be overwritten (chapter 10).

    Raises a subclass of TinymlirError for what cannot be traced or compiled."""
    if function is None:
        return functools.partial(
            jit, target=target, dtype=dtype, precision=precision, limit=limit,
            donate=donate)
    if not callable(function):
        raise ArgumentError(f"jit takes a function, got {type(function).__name__}")
    names = (donate,) if isinstance(donate, str) else donate
    if not isinstance(names, (tuple, list)) or not all(
            isinstance(name, str) for name in names):
        raise ArgumentError(f"donate: expected names of parameters, got {donate!r}")
    return Jitted(function, target, dtype, limit, tuple(names), precision)
