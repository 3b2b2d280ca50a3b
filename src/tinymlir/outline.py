# Tangled from notebooks/06_fused.md: edit the chapter, not this file.

# %% 06_fused.md § Finding what repeats (1)
"""Repeated blocks of a graph become calls of one function (chapter 6)."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinymlir.expr import (
    NUMPY, TYPE, Expr, Op, TensorType, is_number, make, rule, variable)
from tinymlir.graph import BOUNDS, Graph, evaluate, rewrite, same
from tinymlir.rewrites import REWRITES


def key(node: Expr) -> tuple:
    """What can be said of a node without looking further than its operands."""
    seen = [(x.type, x.attrs["value"].tobytes() if is_number(x) else None)
            for x in node.operands]
    return node.op, node.type, repr(sorted(node.attrs.items())), tuple(seen)


def is_leaf(node: Expr) -> bool:
    return node.op in (Op.INPUT, Op.CONSTANT)


# %% 06_fused.md § Finding what repeats (2)
@dataclass(frozen=True)
class Repeat:
    """`count` blocks of `period` nodes; the first may start `slack` nodes later."""

    start: int
    period: int
    count: int
    slack: int


def longest_run(flags: np.ndarray) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags, [0]])))
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    best = int(np.argmax(ends - starts))
    return int(starts[best]), int(ends[best] - starts[best])


def find_repeat(keys: Sequence[tuple]) -> Repeat | None:
    """The repetition that saves the most nodes, or None."""
    number: dict[tuple, int] = {}
    codes = np.array([number.setdefault(k, len(number)) for k in keys])
    best, saved = None, 0
    for period in range(1, len(codes) // 2 + 1):
        same_key = codes[:-period] == codes[period:]
        if np.count_nonzero(same_key) <= saved:
            continue
        start, run = longest_run(same_key)
        count = run // period + 1
        if (count - 1) * period > saved:
            saved = (count - 1) * period
            best = Repeat(start, period, count, run % period)
    return best


# %% 06_fused.md § Is it the same block? (1)
def wiring(block: Sequence[Expr]) -> list[tuple]:
    """For each node, where its operands are: a place in the block, or None."""
    place = {id(node): i for i, node in enumerate(block)}
    return [tuple(place.get(id(x)) for x in node.operands) for node in block]


def cut(nodes: Sequence[Expr], repeat: Repeat, shift: int) -> list[list[Expr]]:
    """The blocks, the first one starting `shift` nodes late."""
    first, p = repeat.start + shift, repeat.period
    starts = range(first, first + repeat.count * p, p)
    return [list(nodes[i:i + p]) for i in starts]


def inputs_of(blocks: Sequence[Sequence[Expr]]) -> list[tuple[Expr, ...]]:
    """What comes from outside: for each argument, one node for each block."""
    slots: dict[tuple[int, ...], tuple[Expr, ...]] = {}
    for i, places in enumerate(wiring(blocks[0])):
        for j, place in enumerate(places):
            if place is None and not is_number(blocks[0][i].operands[j]):
                given = tuple(block[i].operands[j] for block in blocks)
                slots.setdefault(tuple(map(id, given)), given)
    return list(slots.values())


# %% 06_fused.md § Is it the same block? (2)
def links(graph: Graph, nodes: Sequence[Expr]) -> np.ndarray:
    """(producer, consumer) of each operand and output, as numbers of nodes.

    A leaf is number -1; who takes an output comes after all nodes."""
    number = {id(node): i for i, node in enumerate(nodes)}
    pairs = [(number.get(id(x), -1), i) for i, node in enumerate(nodes)
             for x in node.operands]
    pairs += [(number.get(id(x), -1), len(nodes)) for x in graph.outputs]
    return np.array(pairs, int).reshape(-1, 2)


def outputs_of(wires: np.ndarray, repeat: Repeat, shift: int) -> list[int]:
    """The places in a block whose values are used outside of it."""
    block, place = np.divmod(wires - repeat.start - shift, repeat.period)
    inside = (block[:, 0] >= 0) & (block[:, 0] < repeat.count)
    crossing = inside & (block[:, 0] != block[:, 1])
    return np.unique(place[crossing, 0]).tolist()


def alike(wires: np.ndarray, repeat: Repeat, shift: int) -> bool:
    """Are all blocks wired as the first one is?"""
    block, place = np.divmod(wires - repeat.start - shift, repeat.period)
    inside = (block[:, 1] >= 0) & (block[:, 1] < repeat.count)
    same_block = block[:, 0] == block[:, 1]
    where = np.where(same_block, place[:, 0], -1)[inside]
    rows = where.reshape(repeat.count, -1)  # equal keys: as many operands in each
    return bool((rows == rows[0]).all())


def best_cut(wires: np.ndarray, repeat: Repeat) -> int | None:
    """The shift with the fewest results; None if no blocks are wired alike."""
    shifts = [shift for shift in range(repeat.slack + 1)
              if alike(wires, repeat, shift)]
    return min(shifts, default=None,
               key=lambda shift: len(outputs_of(wires, repeat, shift)))


# %% 06_fused.md § Is it the same block? (3)
def worth_it(blocks: Sequence[Sequence[Expr]]) -> bool:
    """A call forbids fusion across its border, so a block has to hold a product.

    An index is checked after the call (chapter 4), so it has to come from outside,
    and whoever looks for it looks into one level of calls."""
    ops, inside = {node.op for node in blocks[0]}, set(map(id, blocks[0]))
    hidden = any(node.op in BOUNDS and id(node.operands[1]) in inside
                 for node in blocks[0])
    return Op.MATMUL in ops and Op.CALL not in ops and not hidden


# %% 06_fused.md § A call is a node (1)
@rule(TYPE, Op.CALL)
def _(*types: TensorType, body: Graph) -> TensorType:
    return body.outputs[0].type


@rule(TYPE, Op.RESULT)
def _(call: TensorType, body: Graph, index: int) -> TensorType:
    return body.outputs[index].type


NUMPY[Op.CALL] = lambda *arrays, body: evaluate(body, *arrays)
NUMPY[Op.RESULT] = lambda values, body, index: values[index]


def body_of(blocks: Sequence[Sequence[Expr]], slots: Sequence[tuple[Expr, ...]],
            used: Sequence[int]) -> Graph:
    """The first block as a graph with an input for each slot.

    Slots are told apart by what all blocks pass, not by what the first one does: it
    may pass the same value twice where another passes two."""
    inputs = {tuple(map(id, slot)): variable(slot[0].shape, slot[0].dtype)
              for slot in slots}
    new: list[Expr] = []
    for i, (node, places) in enumerate(zip(blocks[0], wiring(blocks[0]))):
        operands = []
        for j, place in enumerate(places):
            given = tuple(id(block[i].operands[j]) for block in blocks)
            outside = inputs.get(given, node.operands[j])  # or a number, as it is
            operands.append(outside if place is None else new[place])
        new.append(replace(node, operands=tuple(operands), serial=fresh_serial()))
    names = tuple(f"a{i}" for i in range(len(inputs)))
    outputs = tuple(new[i] for i in used)
    any_of_them = tuple(range(len(inputs)))  # what the caller may do is its affair
    return Graph("block", tuple(inputs.values()), outputs, names, any_of_them)


def fresh_serial() -> int:
    return variable((), np.float32).serial


# %% 06_fused.md § A call is a node (2)
def reroll(graph: Graph) -> Graph:
    """Blocks that repeat become calls of one graph."""
    nodes = [node for node in graph.nodes if not is_leaf(node)]
    repeat = find_repeat([key(node) for node in nodes])
    wires = links(graph, nodes)
    shift = best_cut(wires, repeat) if repeat else None
    blocks = [] if shift is None else cut(nodes, repeat, shift)
    if not blocks or not worth_it(blocks):
        return graph
    slots, used = inputs_of(blocks), outputs_of(wires, repeat, shift)
    body = body_of(blocks, slots, used)
    inside = {id(node): b for b, block in enumerate(blocks) for node in block}
    new: dict[int, Expr] = {id(x): x for x in graph.nodes if is_leaf(x)}
    for node in graph.nodes:
        if id(node) in new:
            continue
        if id(node) not in inside:
            new[id(node)] = same(node, tuple(new[id(x)] for x in node.operands))
            continue
        b = inside[id(node)]
        given = [new[id(slot[b])] for slot in slots]
        new |= call(body, given, blocks[b], used)
    outputs = tuple(new[id(x)] for x in graph.outputs)
    return Graph(graph.name, graph.inputs, outputs, graph.names)


def call(body: Graph, given: Sequence[Expr], block: Sequence[Expr],
         used: Sequence[int]) -> dict[int, Expr]:
    """The nodes that stand for a block; those nobody sees stand for themselves."""
    node = make(Op.CALL, *given, body=body)
    new = {id(x): x for x in block}
    for index, place in enumerate(used):
        result = make(Op.RESULT, node, body=body, index=index)
        new[id(block[place])] = replace(result, source=block[place].source)
    return new


# %% 06_fused.md § A call is a node (3)
def share_constants(graph: Graph) -> Graph:
    """Arrays with the same contents become the same node."""
    known: dict[tuple, Expr] = {}

    def visit(node: Expr, operands: tuple[Expr, ...]) -> Expr:
        if node.op is not Op.CONSTANT or not node.shape:
            return same(node, operands)
        digest = hashlib.sha256(np.ascontiguousarray(node.attrs["value"])).digest()
        return known.setdefault((node.type, digest), node)

    return rewrite(graph, visit)


# %% 06_fused.md § The row that is wanted (1)
def select_rows(graph: Graph) -> Graph:
    """(a @ b)[rows] becomes a[rows] @ b, when not all rows are wanted."""
    def visit(node: Expr, operands: tuple[Expr, ...]) -> Expr:
        product = operands[0] if node.op is Op.GATHER else None
        if product is None or product.op is not Op.MATMUL:
            return same(node, operands)
        rows = operands[1]
        a, b = product.operands
        if len(a.shape) != 2 or rows.size >= a.shape[0]:
            return same(node, operands)
        gather = replace(make(Op.GATHER, a, rows.reshape(rows.size)),
                         source=node.source)  # the line that an IndexError names
        picked = make(Op.MATMUL, gather, b)
        return replace(picked.reshape(node.shape), source=node.source)
    return rewrite(graph, visit)


REWRITES += [share_constants, select_rows, reroll]
