# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Loops that belong together (1)
"""Which loops are merged, and which the threads share (chapter 3)."""
from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from mlir import ir
from mlir.dialects import memref, scf

from tinymlir.calls import constant_of, find

LOOPS = "scf.parallel", "scf.for"
ACCESS = {"memref.load": 0, "memref.store": 1}  # -> which operand is the buffer
PURE = ("arith.", "math.", "affine.apply", "scf.")
VIEWS = ("memref.subview", "memref.expand_shape", "memref.collapse_shape",
         "memref.cast", "memref.reinterpret_cast", "memref.transpose",
         "memref.reshape")


def body_of(op: ir.Operation) -> ir.Block:
    return op.regions[0].blocks[0]


def inside(op: ir.Operation) -> list[ir.Operation]:
    """Everything in a loop."""
    found = []

    def visit(inner: ir.Operation) -> ir.WalkResult:
        found.append(inner)
        return ir.WalkResult.ADVANCE

    op.walk(visit)
    return found[:-1]  # the loop itself comes last


def root(buffer: ir.Value) -> ir.Value:
    """The buffer that a view looks into."""
    while not isinstance(buffer.owner, ir.Block) and buffer.owner.name in VIEWS:
        buffer = buffer.owner.operands[0]
    return buffer


@dataclass
class Loop:
    """An scf.parallel: its bounds, and what it does to which buffer."""

    op: ir.Operation

    def __post_init__(self) -> None:
        self.places = list(body_of(self.op).arguments)
        n = len(self.places)
        numbers = list(self.op.operands)
        self.bounds = [tuple(numbers[i::n]) for i in range(n)]  # from, to, step
        self.inner = inside(self.op)
        self.plain = all(op.name in ACCESS or op.name.startswith(PURE)
                         for op in self.inner)

    def accesses(self, count: int) -> list[tuple[ir.Value, bool, tuple]]:
        """(buffer, written?, where the first `count` dimensions index it)."""
        found = []
        for op in self.inner:
            if op.name not in ACCESS:
                continue
            at = ACCESS[op.name]
            indices = list(op.operands)[at + 1:]
            where = tuple(indices.index(i) if i in indices else None
                          for i in self.places[:count])
            found.append((op.operands[at], at == 1, where))
        return found


# %% 03_passes.md § Loops that belong together (2)
MOST = 8  # loops in one


@dataclass
class Group:
    """Neighbours that become one loop along their first dimensions."""

    loops: list[Loop] = field(default_factory=list)
    count: int = 0

    def takes(self, new: Loop) -> bool:
        """Add a loop, if that changes no result."""
        if not self.loops or not new.plain or len(self.loops) == MOST:
            return False
        ranks = [len(loop.places) for loop in (*self.loops, new)]
        most = min(self.count, ranks[-1], max(ranks) - 1)  # not the innermost loops
        for count in range(most, 0, -1):
            same = self.loops[0].bounds[:count] == new.bounds[:count]
            if same and self.independent(new, count):
                self.loops.append(new)
                self.count = count
                return True
        return False

    def independent(self, new: Loop, count: int) -> bool:
        """Does each turn only meet what the same turn of the others wrote?"""
        old = [x for loop in self.loops for x in loop.accesses(count)]
        ours = new.accesses(count)
        for buffer, written, where in ours:
            for other, written2, where2 in old:
                clash = root(buffer) == root(other) and (written or written2)
                if clash and (buffer != other or where != where2 or None in where):
                    return False
        return True


# %% 03_passes.md § Loops that belong together (3)
HARMLESS = ("arith.", "memref.alloc", "memref.get_global", *VIEWS)


def groups(block: ir.Block) -> list[Group]:
    """The loops of a block, those that can be merged together."""
    found, open_ = [], Group()
    for op in (x.operation for x in block):
        if op.name == "scf.parallel":
            loop = Loop(op)
            if not open_.takes(loop):
                open_ = Group([loop], len(loop.places)) if loop.plain else Group()
                found.append(open_)
        elif not op.name.startswith(HARMLESS):
            open_ = Group()
    return [group for group in found if len(group.loops) > 1]


def merge(group: Group) -> None:
    """One scf.parallel in the place of the last of the group."""
    last, count = group.loops[-1].op, group.count
    with ir.InsertionPoint(last), ir.Location.unknown():
        lower, upper, step = zip(*group.loops[0].bounds[:count])
        loop, places, end = parallel(lower, upper, step)
        for member in group.loops:
            nest(member, places, end)
            member.op.erase()


def parallel(lower: tuple, upper: tuple, step: tuple) -> tuple:
    """An empty scf.parallel, its variables, and the place where its body ends."""
    loop = scf.ParallelOp([], lower, upper, step, [])
    block = loop.region.blocks.append(*[ir.IndexType.get()] * len(lower))
    with ir.InsertionPoint(block):
        end = scf.ReduceOp([], 0).operation
    return loop, list(block.arguments), end


def nest(loop: Loop, places: list[ir.Value], end: ir.Operation) -> None:
    """Move a body to before `end`, its remaining dimensions as plain loops."""
    body, places = body_of(loop.op), list(places)
    for bounds in loop.bounds[len(places):]:
        with ir.InsertionPoint(end), ir.Location.unknown():
            inner = scf.ForOp(*bounds)
        places.append(inner.induction_variable)
        with ir.InsertionPoint(inner.body), ir.Location.unknown():
            end = scf.YieldOp([]).operation
    for old, new in zip(body.arguments, places):
        old.replace_all_uses_with(new)
    for op in list(body)[:-1]:
        op.operation.move_before(end)


# %% 03_passes.md § Loops that belong together (4)
def accumulate(op: ir.Operation) -> None:
    """A buffer element that a loop loads and stores each turn becomes its value."""
    body, variable = body_of(op), body_of(op).arguments[0]
    used = [x.operation for x in body if x.operation.name in ACCESS]
    stores = [x for x in used if x.name == "memref.store"]
    if len(used) != len(inside_accesses(op)) or len(stores) != 1:
        return
    value, buffer, *indices = stores[0].operands
    loads = [x for x in used if x.name == "memref.load"
             and root(x.operands[0]) == root(buffer)]
    if (variable in indices or len(loads) != 1 or op.results
            or list(loads[0].operands) != [buffer, *indices]
            or any(made_in(x, body) for x in indices)):
        return
    with ir.InsertionPoint(op), ir.Location.unknown():
        start = memref.load(buffer, indices)
        new = scf.ForOp(*list(op.operands)[:3], [start])
        memref.store(new.results[0], buffer, indices)
    with ir.InsertionPoint(new.body), ir.Location.unknown():
        end = scf.YieldOp([value]).operation
    loads[0].results[0].replace_all_uses_with(new.inner_iter_args[0])
    variable.replace_all_uses_with(new.induction_variable)
    for inner in list(body)[:-1]:
        if inner.operation not in (loads[0], stores[0]):
            inner.operation.move_before(end)
    op.erase()


def inside_accesses(op: ir.Operation) -> list[ir.Operation]:
    return [x for x in inside(op) if x.name in ACCESS]


def made_in(value: ir.Value, block: ir.Block) -> bool:
    owner = value.owner
    return owner == block or (not isinstance(owner, ir.Block)
                              and owner.operation.block == block)


# %% 03_passes.md § Loops on threads (1)
ENOUGH = 1 << 15  # turns of the innermost loop: some microseconds


def turns(op: ir.Operation) -> int:
    """How often the bodies of a loop run, those of the loops in it included.

    A bound that is only known when the program runs counts as 1."""
    n = len(body_of(op).arguments) if op.name == LOOPS[0] else 1
    uppers = [constant_of(x) for x in list(op.operands)[n:2 * n]]
    inner = [turns(x.operation) for x in body_of(op) if x.operation.name in LOOPS]
    return prod(1 if x is None else x for x in uppers) * max(sum(inner), 1)


def calls(op: ir.Operation) -> bool:
    """Is a product computed in this loop?"""
    return any(x.name == "func.call" for x in inside(op))


def shared(op: ir.Operation) -> int:
    """How many leading dimensions the threads share: none, one, or all of them
    if each turn computes whole products."""
    if op.parent.name in LOOPS:
        return 0
    return len(body_of(op).arguments) if calls(op) else int(turns(op) >= ENOUGH)


def sequential(op: ir.Operation, keep: int) -> None:
    """Write scf.parallel anew: `keep` parallel dimensions around plain loops."""
    loop = Loop(op)
    with ir.InsertionPoint(op), ir.Location.unknown():
        if keep:
            lower, upper, step = zip(*loop.bounds[:keep])
            _, places, end = parallel(lower, upper, step)
            nest(loop, places, end)
        else:
            nest(loop, [], op)
    op.erase()


def shape_loops(module: ir.Module, threads: bool) -> None:
    """Merge neighbours, share large loops between threads, sums to registers."""
    bodies = [body_of(op) for op in find(module, *LOOPS) if calls(op)]
    blocks = [x for op in find(module, "func.func") for x in op.regions[0]]
    for block in (*bodies, *blocks):
        for group in groups(block):
            merge(group)
    chosen = [(op, shared(op) if threads else 0)
              for op in find(module, "scf.parallel")]
    for op, keep in chosen:
        sequential(op, keep)
    for op in find(module, "scf.for"):
        accumulate(op)
