# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Passes on graphs (1)
"""Rewrites from graph to graph (chapter 3)."""
from __future__ import annotations

import numpy as np

from tinymlir.expr import NUMPY, Expr, Op, constant
from tinymlir.graph import Graph, rewrite, same

SMALL = 1024  # elements


def fold(graph: Graph) -> Graph:
    """Compute small nodes whose operands are all constants."""
    def visit(node: Expr, operands: tuple[Expr, ...]) -> Expr:
        known = operands and all(x.op is Op.CONSTANT for x in operands)
        if not known or node.size > SMALL:
            return same(node, operands)
        with np.errstate(all="ignore"):
            value = NUMPY[node.op](*(x.attrs["value"] for x in operands), **node.attrs)
        return constant(value, node.dtype)
    return rewrite(graph, visit)


REWRITES = [fold]  # chapter 6 adds to these


def improve(graph: Graph) -> Graph:
    """Every rewrite, in order. The interpreter's results stay as they are."""
    for step in REWRITES:
        graph = step(graph)
    return graph
