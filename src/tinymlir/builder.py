# Tangled from notebooks/02_builder.md: edit the chapter, not this file.

# %% 02_builder.md § The function (1)
"""From the expression graph to a module of MLIR (chapter 2)."""
from __future__ import annotations

from collections.abc import Sequence

from mlir import ir
from mlir.dialects import func

import tinymlir.moves  # noqa: F401  fills the table of rules
from tinymlir.arrays import MLIR, Builder, View, tensor_type
from tinymlir.expr import Expr, Op, rule
from tinymlir.graph import Graph


def marks(writable: bool) -> ir.DictAttr:
    """What is known of an argument: no other one overlaps with what it writes."""
    return ir.DictAttr.get({"llvm.noalias": ir.UnitAttr.get(),
                            "bufferization.writable": ir.BoolAttr.get(writable)})


Output = tuple[Expr, Expr | None]  # a result, and the argument it is made in


def targets(graph: Graph) -> dict[int, Output]:
    """The outputs that are made in the memory of an input, by number."""
    return {i: (graph.outputs[i], graph.inputs[j])
            for i, j in graph.in_place.items()}


def build(graph: Graph, name: str = "main") -> ir.Module:
    """A verified module with one function; call it inside an MLIR context."""
    with ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            fresh = [(x, None) for x in graph.returned]
            build_function(graph, name, module, [*targets(graph).values(), *fresh])
    module.operation.verify()
    return module


# %% 02_builder.md § The function (2)
def build_function(graph: Graph, name: str, module: ir.Module,
                   outputs: Sequence[Output]) -> func.FuncOp:
    """The function of a graph, at the current insertion point."""
    params = graph.arguments
    types = [[tensor_type(x.shape, x.dtype) for x in xs]
             for xs in (params, [x for x, _ in outputs])]
    function = func.FuncOp(name, ir.FunctionType.get(*types))
    writable = {id(target) for _, target in outputs}
    function.arg_attrs = ir.ArrayAttr.get(
        [marks(id(x) in writable) for x in params])
    block = function.add_entry_block()
    builder = Builder(module)
    with ir.InsertionPoint(block):
        for node, value in zip(params, block.arguments):
            identity = ir.AffineMap.get_identity(len(node.shape))
            builder.views[id(node)] = View(value, identity)
        for node in graph.nodes:
            if node.op not in (Op.INPUT, Op.CONSTANT):
                builder.add(node)
        func.ReturnOp([builder.into(node, target) for node, target in outputs])
    return function


# %% 02_builder.md § Graphs that call graphs (1)
@rule(MLIR, Op.CALL)
def call(b: Builder, node: Expr) -> ir.Value:
    """func.call of the body's function; RESULT nodes pick its values."""
    body = node.attrs["body"]
    if id(body) not in b.functions:
        name = f"{body.name}{len(b.functions)}"
        with ir.InsertionPoint.at_block_begin(b.module.body):
            into = targets(body)
            outputs = [into.get(i, (x, None)) for i, x in enumerate(body.outputs)
                       if x.size]
            function = build_function(body, name, b.module, outputs)
        function.attributes["sym_visibility"] = ir.StringAttr.get("private")
        b.functions[id(body)] = name
    types = [tensor_type(x.shape, x.dtype) for x in body.outputs if x.size]
    given = [b.dense(x) for x in node.operands if x.size]
    made = iter(func.CallOp(types, b.functions[id(body)], given).results)
    b.results[id(node)] = [next(made) if x.size else None for x in body.outputs]
    return b.results[id(node)][0]


@rule(MLIR, Op.RESULT)
def result(b: Builder, node: Expr) -> ir.Value:
    return b.results[id(node.operands[0])][node.attrs["index"]]
