# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Several threads (1)
"""A kernel as a module of its own, on one thread or several (chapter 3)."""
from __future__ import annotations

from collections.abc import Callable

from mlir import ir
from mlir.dialects import arith, func, memref, scf

from tinymlir.scalars import index
from tinymlir.onerow import dots, row
from tinymlir.schedule import VECTORS, Kernel, Types, matmul

WORTHWHILE = 1 << 18  # multiply-adds: some microseconds
Body = Callable[[ir.Value], None]


def in_parallel(count: ir.Value, body: Body) -> scf.ParallelOp:
    """`for i in range(count): body(i)`, in any order and side by side."""
    loop = scf.ParallelOp([], [index(0)], [count], [index(1)], [])
    block = loop.region.blocks.append(ir.IndexType.get())
    with ir.InsertionPoint(block):
        body(block.arguments[0])
        scf.ReduceOp([], 0)
    return loop


def share(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value) -> None:
    """The whole product, by one thread or by all."""
    columns = memref.dim(c, index(1))
    if not t.kernel.parallel:
        return func.call([], "part", [a, b, c, fresh, index(0), columns])
    work = arith.muli(memref.dim(a, index(0)),
                      arith.muli(memref.dim(a, index(1)), columns))
    large = arith.cmpi(arith.CmpIPredicate.uge, work, index(WORTHWHILE))
    workers = arith.select(large, threads(), index(1))
    wide = index(VECTORS * t.kernel.lanes)
    panels = arith.ceildivui(columns, wide)
    size = arith.muli(arith.ceildivui(panels, workers), wide)

    def one(i: ir.Value) -> None:
        first = arith.minui(arith.muli(i, size), columns)
        last = arith.minui(arith.addi(first, size), columns)
        func.call([], "part", [a, b, c, fresh, first, last])

    choice = scf.IfOp(large, has_else=True)
    with ir.InsertionPoint(choice.then_block):
        in_parallel(workers, one)
        scf.YieldOp([])
    with ir.InsertionPoint(choice.else_block):
        one(index(0))
        scf.YieldOp([])


def threads() -> ir.Value:
    """How many there are, when the kernel runs."""
    count = func.call([ir.IntegerType.get_signless(32)], "omp_get_max_threads", [])
    return arith.index_cast(ir.IndexType.get(), count)


# %% 03_passes.md § A kernel as a module (1)
BODY = {"matmul": matmul, "dots": dots, "row": row}


def library(kernel: Kernel) -> ir.Module:
    """The module of one kernel; call it inside an MLIR context."""
    with ir.Location.unknown():
        module, t = ir.Module.create(), Types(kernel)
        takes = [t.a, t.b, t.c, ir.IntegerType.get_signless(1)]
        column = ir.IndexType.get()
        body = BODY[kernel.kind]
        with ir.InsertionPoint(module.body):
            if kernel.parallel:
                kind = ir.FunctionType.get([], [ir.IntegerType.get_signless(32)])
                func.FuncOp("omp_get_max_threads", kind, visibility="private")
            part = function("part", [*takes, column, column],
                            lambda args: body(t, *args[:4], tuple(args[4:])))
            part.attributes["sym_visibility"] = ir.StringAttr.get("private")
            function(kernel.symbol, takes, lambda args: share(t, *args))
    return module


def function(name: str, kinds: list[ir.Type], body: Callable) -> func.FuncOp:
    """A function without results whose body is built by `body(arguments)`."""
    op = func.FuncOp(name, ir.FunctionType.get(kinds, []))
    block = op.add_entry_block()
    with ir.InsertionPoint(block):
        body(list(block.arguments))
        func.ReturnOp([])
    return op
