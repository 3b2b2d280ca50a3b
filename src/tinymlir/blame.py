# Tangled from notebooks/07_parity.md: edit the chapter, not this file.

# %% 07_parity.md § Who did it? (1)
"""Which operation is wrong? (chapter 7)"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tinymlir.compiler import take
from tinymlir.errors import TinymlirError
from tinymlir.expr import NUMPY, Expr, Op
from tinymlir.fused import FusedModel, padded, residual_names
from tinymlir.graph import Graph, reachable
from tinymlir.jit import Compiled, Jitted
from tinymlir.model import Model, Sublayers, residuals
from tinymlir.pytree import LEAF, flatten
from tinymlir.verify import Place, Report, compare

LEAVES = (Op.INPUT, Op.CONSTANT)


# %% 07_parity.md § Who did it? (2)
@dataclass(frozen=True)
class Case:
    """A compiled graph, the arrays it was given, and a value that is wrong."""

    graph: Graph
    arrays: Sequence[np.ndarray]
    wrong: Expr
    right: tuple[Expr, ...] = ()  # values that are known to be right
    known: dict[int, Any] = field(default_factory=dict)
    target: str = "cpu"

    def suspects(self) -> list[Expr]:
        """The operations between what is right and what is wrong, in order."""
        cleared = {id(node) for node in reachable(self.right)}
        return [node for node in reachable([self.wrong])
                if node.op not in LEAVES and id(node) not in cleared]


# %% 07_parity.md § Who did it? (3)
def value(case: Case, node: Expr) -> Any:
    """What the compiled code makes of a node. Compiles the graph up to it."""
    if not case.known:
        case.known.update(zip(map(id, case.graph.inputs), case.arrays))
    if id(node) not in case.known:
        case.known[id(node)] = compute(case, node)
    return case.known[id(node)]


def compute(case: Case, node: Expr) -> Any:
    if node.op is Op.CONSTANT:
        return node.attrs["value"]
    if node.op is Op.CALL:
        return by_numpy(case, node)
    part = Graph(case.graph.name, case.graph.inputs, (node,), case.graph.names)
    return Compiled(part, part.names, (), LEAF, case.target).run(case.arrays)


def by_numpy(case: Case, node: Expr) -> Any:
    """What NumPy makes of a node, given the operands of the compiled code."""
    with np.errstate(all="ignore"):
        operands = (value(case, x) for x in node.operands)
        return NUMPY[node.op](*operands, **node.attrs)


# %% 07_parity.md § Who did it? (4)
def agree(ours: np.ndarray, want: np.ndarray) -> bool:
    """Equal, up to what one operation may lose."""
    if (ours.dtype, ours.shape) != (want.dtype, want.shape):
        return False
    if ours.dtype.kind != "f":
        return np.array_equal(ours, want)
    room = np.finfo(ours.dtype).eps ** 0.5
    return np.allclose(ours, want, rtol=room, atol=room, equal_nan=True)


# %% 07_parity.md § Who did it? (5)
def first_wrong(case: Case) -> Expr | None:
    """The first operation whose compiled value is not what NumPy makes of it."""
    for node in case.suspects():
        if node.op is Op.CALL or agree(value(case, node), by_numpy(case, node)):
            continue
        found = inside(case, node) if node.op is Op.RESULT else node
        if found is not None:
            return found
    return None


def inside(case: Case, result: Expr) -> Expr | None:
    """The operation of a body that makes the result of a call wrong."""
    body, index = result.attrs["body"], result.attrs["index"]
    arrays = [value(case, x) for x in result.operands[0].operands]
    part = Case(body, arrays, body.outputs[index], target=case.target)
    node = first_wrong(part)
    row = compare("", 0, value(case, result), by_numpy(case, result))
    return result if node is None and not row.ok else node


# %% 07_parity.md § Who did it? (6)
def in_sublayer(model: Model, place: Place) -> Case | None:
    """The case of a model with a function for each sublayer."""
    calls = []

    def watched(function: Callable) -> Callable:
        def call(*args: Any, **static: Any) -> Any:
            calls.append((function, args, static))
            return function(*args, **static)
        return call

    spied = replace(model, run=Sublayers(*map(watched, model.run)))
    names = [name for name, _ in residuals(spied, np.array(place.ids))]
    function, args, static = calls[names.index(place.name)]
    if not isinstance(function, Jitted):
        return None
    graph = function.compile(*args, **static).graph
    return Case(graph, arrays_of(args), graph.outputs[0], target=function.target)


def arrays_of(args: tuple) -> list[np.ndarray]:
    leaves = flatten(args, "args")[0]
    return [take(np.asarray(leaf), path) for path, leaf in leaves]


# %% 07_parity.md § Who did it? (7)
def in_module(model: FusedModel, place: Place) -> Case:
    """The case of a model that is one function."""
    config, last = model.config, np.array(len(place.ids) - 1)
    args = (padded(np.array(place.ids), config.context), last, model.params)
    graph = model.run.compile(*args, heads=config.heads, residuals=True).graph
    logits, *kept = graph.outputs
    row = [*residual_names(config.blocks), "logits"].index(place.name)
    return Case(graph, arrays_of(args), [*kept, logits][row], tuple(kept[:row]),
                target=model.run.target)


# %% 07_parity.md § Who did it? (8)
CASES: dict[type, Callable[[Any, Place], Case | None]] = {
    Model: in_sublayer, FusedModel: in_module}
NOBODY = ("none; each one does what NumPy does, so the two sides differ in their "
          "formula or in their weights")


def blame(model: Any, report: Report) -> str:
    """The first residual that is wrong, and the first operation that made it so."""
    place = report.first
    if place is None:
        return "no residual is wrong"
    head = f"first wrong: {place.name}, step {place.step}\nfirst wrong operation: "
    if place.name == "token":
        return head + "none; the best logits are nearly equal"
    find = CASES.get(type(model)) or type(model).case  # a later chapter's model
    try:
        case = find(model, place)
        node = first_wrong(case) if case else None
    except TinymlirError as error:  # there may be no compiler on this machine
        return f"{head}unknown ({error})"
    if node is None:
        return head + NOBODY
    return head + f"{node.op}: {node.type}, {node.source}"
