# Tangled from notebooks/02_builder.md: edit the chapter, not this file.

# %% 02_builder.md § The function (1)
"""From the expression graph to a module of MLIR (chapter 2)."""
from __future__ import annotations

from mlir import ir
from mlir.dialects import func

import tinymlir.moves  # noqa: F401  fills the table of rules
from tinymlir.arrays import MLIR, Builder, View, tensor_type
from tinymlir.expr import Expr, Op, rule
from tinymlir.graph import Graph

READ_ONLY = {"llvm.noalias": ir.UnitAttr.get,
             "bufferization.writable": lambda: ir.BoolAttr.get(False)}


def build(graph: Graph, name: str = "main") -> ir.Module:
    """A verified module with one function; call it inside an MLIR context."""
    with ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            build_function(graph, name, module)
    module.operation.verify()
    return module


# %% 02_builder.md § The function (2)
def build_function(graph: Graph, name: str, module: ir.Module) -> func.FuncOp:
    """The function of a graph, at the current insertion point."""
    params, outputs = graph.arguments, graph.returned
    types = [[tensor_type(x.shape, x.dtype) for x in xs]
             for xs in (params, outputs)]
    function = func.FuncOp(name, ir.FunctionType.get(*types))
    marks = ir.DictAttr.get({key: make() for key, make in READ_ONLY.items()})
    function.arg_attrs = ir.ArrayAttr.get([marks] * len(params))
    block = function.add_entry_block()
    builder = Builder(module)
    with ir.InsertionPoint(block):
        for node, value in zip(params, block.arguments):
            identity = ir.AffineMap.get_identity(len(node.shape))
            builder.views[id(node)] = View(value, identity)
        for node in graph.nodes:
            if node.op not in (Op.INPUT, Op.CONSTANT):
                builder.add(node)
        func.ReturnOp([builder.dense(node) for node in outputs])
    return function


# %% 02_builder.md § The function (3)
@rule(MLIR, Op.CALL)
def call(b: Builder, node: Expr) -> ir.Value:
    """func.call of the body's function; RESULT nodes pick its values."""
    body = node.attrs["body"]
    if id(body) not in b.functions:
        name = f"{body.name}{len(b.functions)}"
        with ir.InsertionPoint.at_block_begin(b.module.body):
            build_function(body, name, b.module).attributes["sym_visibility"] = (
                ir.StringAttr.get("private"))
        b.functions[id(body)] = name
    types = [tensor_type(x.shape, x.dtype) for x in body.returned]
    given = [b.dense(x) for x in node.operands if x.size]
    made = iter(func.CallOp(types, b.functions[id(body)], given).results)
    b.results[id(node)] = [next(made) if x.size else None for x in body.outputs]
    return b.results[id(node)][0]


@rule(MLIR, Op.RESULT)
def result(b: Builder, node: Expr) -> ir.Value:
    return b.results[id(node.operands[0])][node.attrs["index"]]
