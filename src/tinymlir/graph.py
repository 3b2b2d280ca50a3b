# Tangled from notebooks/01_expr.md: edit the chapter, not this file.

# %% 01_expr.md § Tracing (1)
"""Tracing, printing, drawing and interpreting graphs (chapter 1)."""
from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

import tinymlir.indexing  # noqa: F401  fills the tables of functions
from tinymlir.errors import ArgumentError, TinymlirError, TracedValueError
from tinymlir.expr import DTYPES, NUMPY, Expr, Op, as_expr, serials, variable
from tinymlir.pytree import Structure, flatten, flatten_all


def reachable(outputs: Iterable[Expr]) -> tuple[Expr, ...]:
    """Every node the outputs need, in the order of creation."""
    seen: dict[int, Expr] = {}
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            stack.extend(node.operands)
    return tuple(sorted(seen.values(), key=lambda node: node.serial))


# %% 01_expr.md § Tracing (2)
@dataclass(frozen=True, eq=False)
class Graph:
    """A traced program: named inputs, outputs, and all nodes between."""

    name: str
    inputs: tuple[Expr, ...]
    outputs: tuple[Expr, ...]
    names: tuple[str, ...]
    donated: tuple[int, ...] = ()  # inputs that may be written to: chapter 10
    precision: str = "float32"  # of products of float32 matrices: chapter 8

    @cached_property
    def nodes(self) -> tuple[Expr, ...]:
        return reachable(self.outputs)

    @cached_property
    def arrays(self) -> tuple[Expr, ...]:
        """Constants that are more than one number: they travel as arguments."""
        return tuple(n for n in self.nodes if n.op is Op.CONSTANT and n.type.shape)

    @cached_property
    def gathers(self) -> tuple[Expr, ...]:
        """Nodes with an index known only at run time, one for each index."""
        nodes = {(id(n.operands[1]), BOUNDS[n.op](n)): n
                 for node in self.nodes for n in indexed(node)
                 if n.operands[1].op is not Op.CONSTANT}
        return tuple(nodes.values())

    @property
    def results(self) -> tuple[Expr, ...]:
        """The outputs and, after them, the index of every gather."""
        return (*self.outputs, *(node.operands[1] for node in self.gathers))

    @cached_property
    def arguments(self) -> tuple[Expr, ...]:
        """What native code is given: inputs, then arrays, if they have elements."""
        return tuple(x for x in (*self.inputs, *self.arrays) if x.size)

    @cached_property
    def returned(self) -> tuple[Expr, ...]:
        """What native code fills: the results that have elements."""
        return tuple(x for i, x in enumerate(self.results)
                     if x.size and i not in self.in_place)

    @cached_property
    def in_place(self) -> dict[int, int]:
        """Outputs that are made in the memory of an input: which, and of which."""
        place = {id(self.inputs[i]): i for i in self.donated}
        found: dict[int, int] = {}
        for i, x in enumerate(self.outputs):
            at = place.get(id(updated(x)))
            if at is not None and at not in found.values() and x.size:
                found[i] = at
        return found

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return svg(self)


# %% 01_expr.md § Tracing (3)
BOUNDS: dict[Op, Callable[[Expr], tuple[int, int, str]]] = {
    Op.GATHER: lambda x: (
        -len(x.operands[0]), len(x.operands[0]) - 1,
        f"index {{}} is out of bounds for axis 0 with size {len(x.operands[0])}")}


def indexed(node: Expr) -> Iterable[Expr]:
    """The node, if it indexes; for a call, what its body indexes with arguments."""
    if node.op is not Op.CALL:
        return [node] if node.op in BOUNDS else []
    body = node.attrs["body"]
    given = dict(zip(map(id, body.inputs), node.operands))
    return [replace(x, operands=(x.operands[0], given[id(x.operands[1])],
                                 *x.operands[2:])) for x in body.gathers]


def updated(node: Expr) -> Expr | None:
    """The value that a chain of updates started from; None if there is none."""
    start = None
    while node.op in (Op.UPDATE, Op.RESULT):
        step = node.operands[0]
        if node.op is Op.RESULT:
            body = node.attrs["body"]
            passed = dict(zip(map(id, body.inputs), step.operands))
            step = passed.get(id(updated(body.outputs[node.attrs["index"]])))
        if step is None:
            break
        start = node = step
    return start


# %% 01_expr.md § Tracing (4)
def trace(function: Callable, args: tuple, static: dict[str, Any]
          ) -> tuple[Graph, Structure]:
    """Call the function with variables in place of arrays.

    Returns the graph and the structure of the result. The arrays are looked at
    for shape and dtype alone. Errors name the argument by its path."""
    names = parameter_names(function, len(args))
    pairs, structures = flatten_all(args, names)
    inputs = [named(path, variable, leaf.shape, leaf.dtype) for path, leaf in pairs]
    leaves = iter(inputs)
    result = function(*(s.fill(leaves) for s in structures), **static)
    found, structure = flatten(result, "result")
    outputs = tuple(named(path, as_expr, leaf) for path, leaf in found)
    name = getattr(function, "__name__", type(function).__name__)
    graph = Graph(name, tuple(inputs), outputs, tuple(path for path, _ in pairs))
    refuse_strangers(graph)
    return graph, structure


def named(path: str, function: Callable, *args: Any) -> Any:
    """Call the function; its errors begin with the path."""
    try:
        return function(*args)
    except TinymlirError as error:
        raise type(error)(f"{path}: {error}") from None


# %% 01_expr.md § Tracing (5)
def parameter_names(function: Callable, n: int) -> list[str]:
    """What the function calls its first n arguments."""
    try:
        known = [p.name for p in inspect.signature(function).parameters.values()
                 if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        known = []
    return (known + [f"argument {i}" for i in range(len(known), n)])[:n]


def refuse_strangers(graph: Graph) -> None:
    """A variable of another trace must not leak in through a global."""
    own = {id(node) for node in graph.inputs}
    for node in graph.nodes:
        if node.op is Op.INPUT and id(node) not in own:
            raise TracedValueError(
                f"{node.source}: the result of {graph.name} uses a value that was "
                f"traced in another call; return values instead of storing them")


# %% 01_expr.md § Printing and drawing (1)
def label(value: Any) -> str:
    """An attribute or a number as short text."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return label(value.item())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, np.dtype):
        return DTYPES[value]
    if isinstance(value, Graph):
        return value.name
    return str(value).replace(" ", "")


def names_of(graph: Graph) -> dict[int, str]:
    """%name for inputs, numbers for nodes, the value itself for scalars."""
    names = {id(node): f"%{name}" for node, name in zip(graph.inputs, graph.names)}
    counter = iter(range(len(graph.nodes)))
    for node in graph.nodes:
        scalar = node.op is Op.CONSTANT and not node.type.shape
        if id(node) not in names:
            names[id(node)] = (label(node.attrs["value"]) if scalar
                               else f"%{next(counter)}")
    return names


def text(graph: Graph) -> str:
    """The graph, one operation a line."""
    names = names_of(graph)
    head = ", ".join(f"{names[id(n)]}: {n.type}" for n in graph.inputs)
    lines = [f"graph {graph.name}({head})"]
    for node in graph.nodes:
        if node.op is Op.INPUT or names[id(node)][0] != "%":
            continue
        operands = [names[id(x)] for x in node.operands]
        attrs = [f"{k}={label(v)}" for k, v in node.attrs.items() if k != "value"]
        what = " ".join([str(node.op), ", ".join(operands + attrs)])
        lines.append(f"  {names[id(node)]} = {what.strip()} : {node.type}")
    lines.append(f"  return {', '.join(names[id(x)] for x in graph.outputs)}")
    return "\n".join(lines)


# %% 01_expr.md § Printing and drawing (2)
WIDE, HIGH, GAP = 96, 30, 18


def places(graph: Graph) -> dict[int, tuple[int, int]]:
    """id(node) -> (column, row) of each node that is drawn."""
    row: dict[int, int] = {}
    filled: dict[int, int] = {}
    place = {}
    for node in graph.nodes:
        if node.op is Op.CONSTANT and not node.type.shape:
            continue
        above = [row[id(x)] for x in node.operands if id(x) in row]
        row[id(node)] = r = max(above, default=-1) + 1
        filled[r] = column = filled.get(r, -1) + 1
        place[id(node)] = column, r
    return place


def box(node: Expr, title: str, x: int, y: int) -> str:
    """One rectangle with two lines of text."""
    shade = {Op.INPUT: "#dbe9f6", Op.CONSTANT: "#eeeeee"}.get(node.op, "#fdf6e3")
    mid = x + WIDE // 2
    return (f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="4" '
            f'fill="{shade}" stroke="#888"/>'
            f'<text x="{mid}" y="{y + 13}" text-anchor="middle">{title}</text>'
            f'<text x="{mid}" y="{y + 25}" text-anchor="middle" fill="#666">'
            f'{node.type}</text>')


# %% 01_expr.md § Printing and drawing (3)
def title(node: Expr, names: dict[int, str]) -> str:
    """The op, with the numbers among its operands written out."""
    if not node.operands:
        return names[id(node)].lstrip("%")
    numbers = [names[id(x)] for x in node.operands if names[id(x)][0] != "%"]
    return " ".join([str(node.op), *numbers])


def edge(a: int, b: int, x: int, y: int) -> str:
    """From the box at (a, b) down to the one at (x, y), or around those between."""
    if a != x or y == b + HIGH + GAP:
        mid = WIDE // 2
        way = f"M{a + mid} {b + HIGH}L{x + mid} {y}"
    else:
        side, start, end = x + WIDE, b + HIGH // 2, y + HIGH // 2
        bend = side + GAP
        way = f"M{side} {start}C{bend} {start} {bend} {end} {side} {end}"
    return f'<path d="{way}" fill="none" stroke="#888"/>'


def svg(graph: Graph) -> str:
    """The graph as a picture: the same bytes for the same graph."""
    names, place = names_of(graph), places(graph)
    corner = {k: (c * (WIDE + GAP) + 4, r * (HIGH + GAP) + 4)
              for k, (c, r) in place.items()}
    lines, boxes = [], []
    for node in graph.nodes:
        if id(node) not in corner:
            continue
        x, y = corner[id(node)]
        boxes.append(box(node, title(node, names), x, y))
        lines += [edge(*corner[id(o)], x, y) for o in node.operands
                  if id(o) in corner]
    width = max((x for x, _ in corner.values()), default=0) + WIDE + GAP
    height = max((y for _, y in corner.values()), default=0) + HIGH + 4
    told = html.escape(f"The graph of {graph.name}: {len(corner)} values")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'aria-label="{told}" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="monospace" font-size="11">'
            f'{"".join(lines)}{"".join(boxes)}</svg>')


# %% 01_expr.md § The interpreter (1)
def evaluate_all(graph: Graph, *arrays: np.ndarray) -> dict[int, np.ndarray]:
    """id(node) -> its value, by NumPy alone."""
    values = {id(x): np.asarray(a, x.dtype) for x, a in zip(graph.inputs, arrays)}
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            if node.op is Op.CONSTANT:
                values[id(node)] = node.attrs["value"]
            elif node.op is not Op.INPUT:
                operands = (values[id(x)] for x in node.operands)
                values[id(node)] = NUMPY[node.op](*operands, **node.attrs)
    return values


def evaluate(graph: Graph, *arrays: np.ndarray) -> list[np.ndarray]:
    """The outputs of the graph. Raises IndexError as NumPy does."""
    if len(arrays) != len(graph.inputs):
        raise ArgumentError(f"{graph.name} takes {len(graph.inputs)} arrays, "
                            f"got {len(arrays)}")
    values = evaluate_all(graph, *arrays)
    return [np.asarray(values[id(x)]) for x in graph.outputs]


# %% 01_expr.md § Rewriting (1)
def rewrite(graph: Graph, visit: Callable[[Expr, tuple[Expr, ...]], Expr]) -> Graph:
    """A new graph in which `visit` has replaced each node."""
    new: dict[int, Expr] = {id(node): node for node in graph.inputs}
    for node in graph.nodes:
        if node.op is not Op.INPUT:
            new[id(node)] = visit(node, tuple(new[id(x)] for x in node.operands))
    outputs = tuple(new[id(x)] for x in graph.outputs)
    return Graph(graph.name, graph.inputs, outputs, graph.names)


def same(node: Expr, operands: tuple[Expr, ...]) -> Expr:
    """The node with new operands, or itself if they are the old ones."""
    if all(a is b for a, b in zip(node.operands, operands)):
        return node
    late = any(x.serial > node.serial for x in operands)
    serial = next(serials) if late else node.serial  # still after its operands
    return replace(node, operands=operands, serial=serial)
