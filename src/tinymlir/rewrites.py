# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Passes on graphs (1)
"""Rewrites from graph to graph (chapter 3)."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tinymlir.expr import NUMPY, Expr, Op, constant, make
from tinymlir.graph import Graph, rewrite, same
from tinymlir.numpy_api import astype

SMALL = 1024  # elements


def fold(graph: Graph) -> Graph:
    """Compute small nodes whose operands are all constants."""
    def visit(node: Expr, operands: tuple[Expr, ...]) -> Expr:
        known = operands and all(x.op is Op.CONSTANT for x in operands)
        if not known or node.size > SMALL:
            return same(node, operands)
        values = [x.attrs["value"] for x in operands]
        with np.errstate(all="ignore"):
            value = NUMPY[node.op](*values, **node.attrs)
        return constant(value, node.dtype)
    return rewrite(graph, visit)


# %% 03_passes.md § Passes on graphs (2)
WIDE, NARROW = np.dtype(np.float64), np.dtype(np.float32)


def narrow(graph: Graph) -> Graph:
    """The graph computed in float32 throughout, whatever NumPy would promote to."""
    new = {id(x): astype(x, NARROW) if x.dtype == WIDE else x for x in graph.inputs}
    for node in graph.nodes:
        if node.op is Op.INPUT:
            continue
        attrs = {k: NARROW if k == "dtype" and v == WIDE else v
                 for k, v in node.attrs.items()}
        operands = [new[id(x)] for x in node.operands]
        if node.op is Op.CONSTANT:
            value = attrs["value"]
            made = constant(value, NARROW) if node.dtype == WIDE else node
        elif node.op is Op.CAST:  # perhaps to the dtype that it has now
            made = astype(operands[0], attrs["dtype"])
        else:
            made = replace(narrowed(node.op, operands, attrs), source=node.source)
        new[id(node)] = made
    outputs = tuple(new[id(x)] for x in graph.outputs)
    return Graph(graph.name, graph.inputs, outputs, graph.names)


def narrowed(op: Op, operands: list[Expr], attrs: dict[str, Any]) -> Expr:
    """The node in float32, also where integers alone would make it float64."""
    made = make(op, *operands, **attrs)
    if made.dtype != WIDE:
        return made
    return make(op, *(x if x.dtype.kind == "f" else astype(x, NARROW)
                      for x in operands), **attrs)


REWRITES = [fold]  # chapter 6 adds to these


def improve(graph: Graph) -> Graph:
    """Every rewrite, in order. The interpreter's results stay as they are."""
    for step in REWRITES:
        graph = step(graph)
    return graph
