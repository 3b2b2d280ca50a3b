# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Several threads (1)
"""A kernel as a module of its own, on one thread or several (chapter 3)."""
from __future__ import annotations

from collections.abc import Callable

from mlir import ir
from mlir.dialects import arith, func, memref, scf

from tinymlir.flow import either, loop_over
from tinymlir.lanes import add, as_matrix
from tinymlir.onerow import clear, cut, dots, next_border, row
from tinymlir.scalars import index
from tinymlir.schedule import LINE, VECTORS, Kernel, Types, matmul

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


def in_shares(t: Types, large: ir.Value, count: ir.Value, call: Callable
              ) -> None:
    """`call(first, last)` for ranges of `count` pieces, one for each thread."""
    if not t.kernel.parallel:
        return call(index(0), count)
    workers = arith.select(large, threads(), index(1))
    size = arith.ceildivui(count, workers)

    def one(i: ir.Value) -> None:
        first = arith.minui(arith.muli(i, size), count)
        call(first, arith.minui(arith.addi(first, size), count))

    def all_() -> None:
        in_parallel(workers, one)

    either(large, all_, lambda: one(index(0)))


def threads() -> ir.Value:
    """How many there are, when the kernel runs."""
    count = func.call([ir.IntegerType.get_signless(32)], "omp_get_max_threads", [])
    return arith.index_cast(ir.IndexType.get(), count)


# %% 03_passes.md § Several threads (2)
def is_large(a: ir.Value, c: ir.Value) -> ir.Value:
    """Is this product worth several threads?"""
    work = arith.muli(memref.dim(a, index(0)), arith.muli(
        memref.dim(a, index(1)), memref.dim(c, index(1))))
    return arith.cmpi(arith.CmpIPredicate.uge, work, index(WORTHWHILE))


def by_columns(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value
               ) -> None:
    """The whole product: each thread takes some panels."""
    columns, wide = memref.dim(c, index(1)), index(VECTORS * t.kernel.lanes)

    def call(first: ir.Value, last: ir.Value) -> None:
        left, right = arith.muli(first, wide), arith.muli(last, wide)
        func.call([], "part", [a, b, c, fresh, left, arith.minui(right, columns)])

    in_shares(t, is_large(a, c), arith.ceildivui(columns, wide), call)


def by_groups(t: Types, a: ir.Value, b: ir.Value, c: ir.Value, fresh: ir.Value
              ) -> None:
    """The whole product of one row: each thread takes some groups of rows of B."""
    columns = memref.dim(c, index(1))
    _, groups, stripes = cut(memref.dim(a, index(1)), columns)
    several = arith.cmpi(arith.CmpIPredicate.ugt, groups, index(1))
    room, rows = room_for(t, b, arith.select(several, groups, index(0)), columns)
    sums = arith.select(several, rows, c)  # a single one is C's
    new = arith.ori(several, fresh)
    in_shares(t, is_large(a, c), arith.muli(groups, stripes), lambda first, last:
              func.call([], "part", [a, b, sums, new, first, last]))
    either(several, lambda: add_up(t, sums, groups, c, fresh), lambda: None)
    memref.dealloc(room)


def room_for(t: Types, b: ir.Value, rows: ir.Value, columns: ir.Value
             ) -> tuple[ir.Value, ir.Value]:
    """Memory, and rows of sums in it that cross the same borders as a row of B."""
    lanes, unknown = index(t.kernel.lanes), ir.ShapedType.get_dynamic_size()
    border = next_border(t, b, index(0), index(0), lanes)
    step = arith.muli(arith.addi(arith.ceildivui(columns, lanes), index(1)), lanes)
    kind = ir.MemRefType.get([unknown], t.vector.element_type)
    room = memref.alloc(kind, [arith.muli(rows, step)], [], alignment=LINE)
    return room, as_matrix(t.c, room, arith.subi(lanes, border), (rows, columns),
                           (step, index(1)))


def add_up(t: Types, sums: ir.Value, groups: ir.Value, c: ir.Value, fresh: ir.Value
           ) -> None:
    """C[0] += the sums of all groups, in order."""
    either(fresh, lambda: clear(t, c), lambda: None)
    with (loop_over(index(0), groups, index(1)) as group,
          loop_over(index(0), memref.dim(c, index(1)), index(1)) as j):
        old = memref.load(c, [index(0), j])
        memref.store(add(old, memref.load(sums, [group, j])), c, [index(0), j])


# %% 03_passes.md § A kernel as a module (1)
BODY = {"matmul": matmul, "dots": dots, "row": row}  # computes a part
SHARE = {"matmul": by_columns, "dots": by_columns, "row": by_groups}


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
            function(kernel.symbol, takes,
                     lambda args: SHARE[kernel.kind](t, *args))
    return module


def function(name: str, kinds: list[ir.Type], body: Callable) -> func.FuncOp:
    """A function without results whose body is built by `body(arguments)`."""
    op = func.FuncOp(name, ir.FunctionType.get(kinds, []))
    block = op.add_entry_block()
    with ir.InsertionPoint(block):
        body(list(block.arguments))
        func.ReturnOp([])
    return op
