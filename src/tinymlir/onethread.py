# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § A GPU made of functions (1)
"""A kernel as a function of the CPU, for one GPU thread (chapter 8)."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from mlir import ir
from mlir.dialects import arith, func, memref, scf, vector

from tinymlir.expr import rule
from tinymlir.plan import BYTES
from tinymlir.scalars import index


# %% 08_gpu.md § A GPU made of functions (2)
SLOTS = 6  # words in which a thread shows the others of its warp what it holds
ACCESSES = "memref.load", "memref.store", "vector.load", "vector.store"
IDS = {f"gpu.{what}_id": place for what, place in (("block", 0), ("thread", 3))}


@dataclass(eq=False)
class Emulated:
    """A gpu.func on its way to a function for one thread."""

    name: str
    function: ir.Operation
    arrays: list[ir.MemRefType]
    shared: list[ir.MemRefType]
    block: list[int]
    accesses: list[str] = field(default_factory=list)
    waits: bool = False  # has it a barrier, or a shuffle?

    @property
    def threads(self) -> int:
        return int(np.prod(self.block))


def plain(kind: ir.Type) -> ir.MemRefType:
    """The same memory without a memory space."""
    kind = ir.MemRefType(kind)
    return ir.MemRefType.get(kind.shape, kind.element_type)


def emulated(function: ir.Operation) -> Emulated:
    """What there is to know about a kernel."""
    kinds = [a.type for a in function.regions[0].blocks[0].arguments]
    shared = [k for k in kinds if ir.MemRefType(k).memory_space is not None]
    arrays = kinds[:len(kinds) - len(shared)]
    name = ir.StringAttr(function.attributes["sym_name"]).value
    block = list(function.attributes["known_block_size"])
    return Emulated(name, function, arrays, [plain(k) for k in shared], block)


# %% 08_gpu.md § A GPU made of functions (3)
def to_function(e: Emulated, target: ir.Block) -> None:
    """The kernel as a function: the numbers of block and thread are arguments."""
    block = e.function.regions[0].blocks[0]
    number, unknown = ir.IndexType.get(), ir.Location.unknown()
    for argument, kind in zip(list(block.arguments), [*e.arrays, *e.shared]):
        argument.set_type(kind)
    word = ir.IntegerType.get_signless(64)
    shown = ir.MemRefType.get([e.threads * SLOTS], word)
    slots = block.add_argument(shown, unknown)
    state = block.add_argument(ir.MemRefType.get([3], word), unknown)
    ids = [block.add_argument(number, unknown) for _ in range(6)]
    kinds = [a.type for a in block.arguments]
    with ir.InsertionPoint(target):
        made = func.FuncOp(e.name, ir.FunctionType.get(kinds, []))
    block.append_to(made.regions[0])
    for op in inner_operations(made):
        if op.name in REPLACE:
            with ir.InsertionPoint(op):
                REPLACE[op.name](e, op, ids, slots, state)
    e.function.erase()


def inner_operations(function: ir.Operation) -> list[ir.Operation]:
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        found.append(op)
        return ir.WalkResult.ADVANCE

    function.operation.walk(visit)
    return found


# %% 08_gpu.md § A GPU made of functions (4)
REPLACE: dict[str, Callable[..., None]] = {}


@rule(REPLACE, "gpu.return")
def leave(e, op, ids, slots, state) -> None:
    one = arith.constant(ir.IntegerType.get_signless(64), 1)
    done = memref.load(state, [index(0)])
    memref.store(arith.addi(done, one), state, [index(0)])
    func.ReturnOp([])
    op.erase()


@rule(REPLACE, "gpu.block_id", "gpu.thread_id")
def number(e, op, ids, slots, state) -> None:
    """The number of the block or of the thread: an argument."""
    named = str(op.attributes["dimension"])  # such as #gpu<dim x>
    axis = next(i for i, d in enumerate("xyz") if f" {d}>" in named)
    op.results[0].replace_all_uses_with(ids[IDS[op.name] + axis])
    op.erase()


# %% 08_gpu.md § A GPU made of functions (5)
@rule(REPLACE, *ACCESSES)
def checked(e, op, ids, slots, state) -> None:
    """An address outside of its array, or one that is not aligned, is noted."""
    at = 0 if op.name.endswith("load") else 1
    pointer, where = op.operands[at], op.operands[at + 1]
    moved = op.results[0].type if at == 0 else op.operands[0].type
    kind = ir.MemRefType(pointer.type)
    lanes = ir.VectorType(moved).shape[0] if "vector" in op.name else 1
    end = index(kind.shape[0] - lanes + 1)
    good = arith.cmpi(arith.CmpIPredicate.ult, where, end)
    if "alignment" in op.attributes:
        step = op.attributes["alignment"].value // BYTES[str(kind.element_type)]
        rest = arith.remui(where, index(step))
        aligned = arith.cmpi(arith.CmpIPredicate.eq, rest, index(0))
        good = arith.andi(good, aligned)
    e.accesses.append(f"{op.name} of array {ir.BlockArgument(pointer).arg_number}")
    bad = arith.xori(good, arith.constant(good.type, 1))
    with ir.InsertionPoint(scf.IfOp(bad).then_block):
        word = ir.IntegerType.get_signless(64)
        memref.store(arith.constant(word, len(e.accesses)), state, [index(1)])
        scf.YieldOp([])
    op.operands[at + 1] = arith.select(good, where, index(0))


# %% 08_gpu.md § Waiting for each other (1)
@rule(REPLACE, "gpu.barrier")
def barrier(e, op, ids, slots, state) -> None:
    wait(e)
    op.erase()


def wait(e: Emulated) -> None:
    """A call that will become the end of a turn: the other threads go on."""
    e.waits = True
    func.call([], "barrier", [])


@rule(REPLACE, "gpu.shuffle")
def shuffle(e, op, ids, slots, state) -> None:
    """Everybody writes; everybody waits; everybody reads a neighbour's."""
    value, distance, _ = op.operands
    kind, word = value.type, ir.IntegerType.get_signless(64)
    bits = ir.IntegerType.get_signless(BYTES[str(kind)] * 8)
    mine = value if kind == bits else arith.bitcast(bits, value)
    mine = mine if bits == word else arith.extui(word, mine)
    me = thread_number(e, ids)
    memref.store(mine, slots, [arith.muli(me, index(SLOTS))])
    wait(e)
    other = arith.xori(me, arith.index_cast(ir.IndexType.get(), distance))
    theirs = memref.load(slots, [arith.muli(other, index(SLOTS))])
    wait(e)
    theirs = theirs if bits == word else arith.trunci(bits, theirs)
    theirs = theirs if kind == bits else arith.bitcast(kind, theirs)
    op.results[0].replace_all_uses_with(theirs)
    op.erase()


def thread_number(e: Emulated, ids: Sequence[ir.Value]) -> ir.Value:
    x, y, z = ids[3:]
    row = arith.addi(arith.muli(z, index(e.block[1])), y)
    return arith.addi(arith.muli(row, index(e.block[0])), x)


# %% 08_gpu.md § Waiting for each other (2)
@rule(REPLACE, "nvgpu.mma.sync")
def multiply(e, op, ids, slots, state) -> None:
    """16 x 8 x 8 products: everybody shows what they hold, cut to TF32."""
    a, b, total = op.operands
    me = thread_number(e, ids)
    held = [vector.extract(x, [], [i, 0])
            for x, n in ((a, 4), (b, 2)) for i in range(n)]
    mine = arith.muli(me, index(SLOTS))
    for i, x in enumerate(held):
        memref.store(cut(x), slots, [arith.addi(mine, index(i))])
    wait(e)
    lane = arith.remui(me, index(32))
    warp = arith.subi(me, lane)
    eighth, fourth = (f(lane, index(4)) for f in (arith.divui, arith.remui))
    for lower, e2 in ((0, 0), (0, 1), (1, 0), (1, 1)):
        row = arith.addi(warp, arith.muli(eighth, index(4)))
        column = arith.addi(arith.muli(fourth, index(2)), index(e2))
        column = arith.addi(warp, arith.muli(column, index(4)))
        new = vector.extract(total, [], [lower, e2])
        for k in range(8):
            x = shown(slots, arith.addi(row, index(k % 4)), lower + 2 * (k // 4))
            y = shown(slots, arith.addi(column, index(k % 4)), 4 + k // 4)
            new = arith.addf(new, arith.mulf(x, y))
        total = vector.insert(new, total, [], [lower, e2])
    wait(e)
    op.results[0].replace_all_uses_with(total)
    op.erase()


def cut(x: ir.Value) -> ir.Value:
    """A float32 without the 13 bits that a tensor core does not look at."""
    half, word = (ir.IntegerType.get_signless(n) for n in (32, 64))
    bits = arith.andi(arith.bitcast(half, x), arith.constant(half, -(1 << 13)))
    return arith.extui(word, bits)


def shown(slots: ir.Value, thread: ir.Value, number: int) -> ir.Value:
    """What a thread shows the others."""
    where = arith.addi(arith.muli(thread, index(SLOTS)), index(number))
    half = ir.IntegerType.get_signless(32)
    bits = arith.trunci(half, memref.load(slots, [where]))
    return arith.bitcast(ir.F32Type.get(), bits)
