# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Which operations share a kernel (1)
"""Which operations share a kernel (chapter 8)."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlir import ir

from tinymlir.errors import CompileError


# %% 08_gpu.md § Which operations share a kernel (2)
def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array that is stored row after row."""
    return tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))


def shape_of(value: ir.Value) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(value.type).shape)


@dataclass(frozen=True)
class Linear:
    """An address, or a coordinate, as a formula: offset + sum(steps * loops)."""

    offset: int
    steps: tuple[int, ...]  # one for each loop

    def __add__(self, other: Linear) -> Linear:
        return Linear(self.offset + other.offset,
                      tuple(a + b for a, b in zip(self.steps, other.steps)))

    def times(self, factor: int) -> Linear:
        return Linear(self.offset * factor, tuple(s * factor for s in self.steps))


# %% 08_gpu.md § Which operations share a kernel (3)
def linear(expr: ir.AffineExpr, loops: int) -> Linear:
    """An affine expression. Raises CompileError for one with a division."""
    zeros = (0,) * loops
    if isinstance(expr, ir.AffineConstantExpr):
        return Linear(expr.value, zeros)
    if isinstance(expr, ir.AffineDimExpr):
        return Linear(0, tuple(int(i == expr.position) for i in range(loops)))
    if isinstance(expr, ir.AffineAddExpr):
        return linear(expr.lhs, loops) + linear(expr.rhs, loops)
    if isinstance(expr, ir.AffineMulExpr):
        left, right = linear(expr.lhs, loops), linear(expr.rhs, loops)
        flat, other = (left, right) if not any(left.steps) else (right, left)
        return other.times(flat.offset)
    raise CompileError(f"no kernel can be addressed by {expr}")


def address(map_: ir.AffineMap, offset: int, strides: Sequence[int]) -> Linear:
    """The element that a map reads, in an array with these strides."""
    total = Linear(offset, (0,) * map_.n_dims)
    for expr, stride in zip(map_.results, strides):
        total += linear(expr, map_.n_dims).times(stride)
    return total


# %% 08_gpu.md § Which operations share a kernel (4)
@dataclass(eq=False)
class Member:
    """One operation of a group: a body that is run for every point of its loops."""

    op: ir.Operation
    extents: tuple[int, ...]
    reduced: tuple[bool, ...]
    reads: list[tuple[ir.Value, ir.AffineMap]]
    writes: ir.AffineMap
    order: list[int | None] = field(default_factory=list)  # as loops of the group

    def __post_init__(self) -> None:
        self.result = self.op.results[0]
        inner = inner_operations(self.op)
        self.counts = any(op.name == "linalg.index" for op in inner)
        self.captured = [op.operands[0] for op in inner
                         if op.name == "tensor.extract"]

    @property
    def is_product(self) -> bool:
        """Is it a product of matrices? One with a vector is a reduction."""
        if self.op.name not in PRODUCTS:
            return False
        *_, i, j = (e.position for e in self.writes.results)
        return self.extents[i] > 1 and self.extents[j] > 1

    @property
    def is_reduction(self) -> bool:
        return any(self.reduced) and not self.is_product

    def loops(self) -> list[int]:
        """Loops that run more than once: first those kept, then those reduced."""
        busy = [i for i, n in enumerate(self.extents) if n > 1]
        return sorted(busy, key=lambda i: self.reduced[i])

    def in_order(self, formula: Linear) -> Linear:
        """A formula over this member's loops, as one over the group's."""
        return Linear(formula.offset, tuple(
            0 if i is None else formula.steps[i] for i in self.order))


def inner_operations(op: ir.Operation) -> list[ir.Operation]:
    """The operations of a body."""
    return [inner.operation for region in op.regions for block in region
            for inner in block]


PRODUCTS = "linalg.matmul", "linalg.batch_matmul", "linalg.contract"


# %% 08_gpu.md § Which operations share a kernel (5)
def maps_of(op: ir.Operation) -> list[ir.AffineMap]:
    return [a.value for a in op.attributes["indexing_maps"]]


def member_of(op: ir.Operation) -> Member | None:
    """The operation as a member of a group, or None if it does not compute."""
    if op.name == "linalg.generic":
        maps = maps_of(op)
        kinds = ["reduction" in str(k) for k in op.attributes["iterator_types"]]
    elif op.name in PRODUCTS:
        maps = maps_of(op)
        last = {e.position for e in maps[-1].results}
        kinds = [i not in last for i in range(maps[0].n_dims)]
    elif op.name in ("linalg.copy", "linalg.transpose"):
        order = list(op.attributes.get("permutation") or [])
        rank = len(shape_of(op.results[0]))
        order = order or list(range(rank))
        inverse = [order.index(i) for i in range(rank)]
        maps = [ir.AffineMap.get_permutation(inverse),
                ir.AffineMap.get_identity(rank)]
        kinds = [False] * rank
    else:
        return None
    reads = list(zip(list(op.operands)[:len(maps) - 1], maps))
    return Member(op, extents_of(op, maps), tuple(kinds), reads, maps[-1])


def extents_of(op: ir.Operation, maps: Sequence[ir.AffineMap]) -> tuple[int, ...]:
    """How often each loop runs, from the shapes that it walks over."""
    extents = [1] * maps[0].n_dims
    for value, map_ in zip(op.operands, maps):
        for expr, length in zip(map_.results, shape_of(value)):
            if isinstance(expr, ir.AffineDimExpr):
                extents[expr.position] = length
    return tuple(extents)


# %% 08_gpu.md § Which operations share a kernel (6)
@dataclass(eq=False)
class Group:
    """Operations that become one kernel. Its loops are those of the first."""

    extents: tuple[int, ...]
    rows: int | None = None  # loops outside of a reduction, if there is one
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.makers = {m.result: m for m in self.members}

    def add(self, member: Member) -> None:
        self.members.append(member)
        self.makers[member.result] = member

    @property
    def product(self) -> Member | None:
        return self.members[0] if self.members[0].is_product else None

    @property
    def is_column(self) -> bool:
        """Are neighbours in memory neighbours among the results of a reduction?"""
        first = self.members[0]
        if not first.is_reduction or not self.rows:
            return False
        steps = [first.in_order(address(m, 0, dense(shape_of(v)))).steps
                 for v, m in first.reads]
        steps = [s for s in steps if any(s[:self.rows])]
        along = all(s[self.rows - 1] == 1 for s in steps)
        return bool(steps) and along and all(s[-1] != 1 for s in steps)

    @property
    def reduction(self) -> Member | None:
        """The first reduction, if there is one."""
        return next((m for m in self.members if m.is_reduction), None)

    @property
    def is_long(self) -> bool:
        """Would few blocks have much to do? Then each reduction is two kernels."""
        return self.rows is not None and is_long(self, self.rows)

    def maker(self, value: ir.Value) -> Member | None:
        """The member that makes the value."""
        return self.makers.get(value)

    def formula(self, value: ir.Value) -> Linear:
        """Where a point of the group has its number in a member's result."""
        member = self.maker(value)
        return member.in_order(address(member.writes, 0, dense(shape_of(value))))


# %% 08_gpu.md § Which operations share a kernel (7)
FEW, MUCH = 64, 1 << 15  # blocks of a reduction; numbers that one block reduces


def blocks_of(group: Group, rows: int) -> int:
    """How many blocks reduce a group, if none of its rows is divided."""
    return -(-math.prod(group.extents[:rows]) // (32 if group.is_column else 1))


def parts_of(group: Group) -> int:
    """How many parts a row is cut into: the threads of a warp have as many each."""
    return 32 * -(-4 // blocks_of(group, group.rows))


def is_long(group: Group, rows: int) -> bool:
    """Is most of a GPU idle while few blocks have much to do?"""
    blocks, numbers = blocks_of(group, rows), math.prod(group.extents)
    return 0 < blocks < FEW and numbers > MUCH * blocks


def first_group(member: Member) -> Group:
    """A group of one operation, open to others that walk the same way."""
    if member.is_product:
        *batch, i, j = (e.position for e in member.writes.results)
        member.order = [*batch, i, j]
        extents = tuple(member.extents[d] for d in member.order)
        return Group(extents, None, [member])
    member.order = member.loops()
    extents = tuple(member.extents[d] for d in member.order)
    kept = sum(not member.reduced[d] for d in member.order)
    return Group(extents, kept if member.is_reduction else None, [member])


# %% 08_gpu.md § May it join? (1)
def order_in(group: Group, member: Member) -> list[int | None] | None:
    """Which loop of the member is which of the group's; None if they do not fit."""
    inside = [(v, m) for v, m in member.reads if group.maker(v)]
    order: list[int | None] = [None] * len(group.extents)
    for value, map_ in inside:
        theirs = address(map_, 0, dense(shape_of(value)))
        mine = group.formula(value)
        if theirs.offset or not assign(order, mine, theirs, group, member):
            return None
    free = [i for i in member.loops() if i not in order]
    open_ = [g for g, n in enumerate(group.extents) if n > 1 and order[g] is None]
    if not free and group.rows is not None and open_ and min(open_) >= group.rows:
        return order  # one number for each row
    if len(free) != len(open_):
        return None
    for g, i in zip(open_, free):
        if member.extents[i] != group.extents[g]:
            return None
        order[g] = i
    return order


# %% 08_gpu.md § May it join? (2)
def assign(order: list[int | None], mine: Linear, theirs: Linear, group: Group,
           member: Member) -> bool:
    """Match loops by the step they take through the same value."""
    for g, step in enumerate(mine.steps):
        if not step or group.extents[g] == 1:
            continue
        found = [i for i, s in enumerate(theirs.steps)
                 if s == step and member.extents[i] == group.extents[g]]
        if len(found) != 1 or order[g] not in (None, found[0]):
            return False
        order[g] = found[0]
    matched = {i for i in order if i is not None}
    return all(not s or i in matched or member.extents[i] == 1
               for i, s in enumerate(theirs.steps))


# %% 08_gpu.md § May it join? (3)
MANY = 400  # arrays that a kernel may read; the hardware can pass it 512


def joined(group: Group, member: Member) -> bool:
    """Add the member if both walk the same way; says whether it did."""
    order = order_in(group, member) if may_join(group, member) else None
    if order is None:
        return False
    rows = group.rows
    if group.is_column and any(i is not None for i in order[rows:]):
        return False
    if member.is_reduction:
        kept = [g for g, i in enumerate(order)
                if i is None or not member.reduced[i]]
        if kept != list(range(len(kept))) or rows not in (None, len(kept)):
            return False
        rows = len(kept)
        if group.reduction and is_long(group, rows):
            return False
    elif group.is_long and any(i is not None for i in order[rows:]):
        return False  # nobody knows a total before all blocks have ended
    last = [i for i in order if i is not None][-1:]
    if last and last != member.loops()[-1:]:
        return False  # neighbours in memory would go to threads far apart
    member.order, group.rows = order, rows
    group.add(member)
    return True


def may_join(group: Group, member: Member) -> bool:
    """Could it be done while the group's numbers are in registers?"""
    reads = {v for m in (*group.members, member) for v, _ in m.reads}
    whole_row = group.product and member.is_reduction
    return not member.is_product and not whole_row and len(reads) <= MANY


# %% 08_gpu.md § May it join? (4)
def made_by(value: ir.Value) -> ir.Operation | None:
    """The operation that makes a value; None for an argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def number_of(value: ir.Value) -> ir.Value | None:
    """The number that a tensor is full of, if it was made by linalg.fill."""
    maker = made_by(value)
    return maker.operands[0] if maker and maker.name == "linalg.fill" else None


# %% 08_gpu.md § May it join? (5)
class Partition:
    """The operations of a function in groups."""

    def __init__(self, block: ir.Block) -> None:
        self.group_of: dict[ir.Value, Group] = {}  # by what they make
        self.operations = [op.operation for op in block]
        for op in self.operations:
            member = member_of(op)
            if member is not None and all(member.extents):
                self.place(member)

    def place(self, member: Member) -> None:
        """Into the latest group that takes it, or into one of its own."""
        makers = [self.group_of.get(v) for v, _ in member.reads]
        for group in reversed(list(dict.fromkeys(g for g in makers if g))):
            if not self.detour(group, member) and joined(group, member):
                break
        else:
            group = first_group(member)
        self.group_of[member.result] = group

    def needs(self, op: ir.Operation) -> list[ir.Value]:
        """The values that have to exist before the operation or its group runs."""
        group = self.group_of.get(op.results[0]) if len(op.results) else None
        if group is None:
            return list(op.operands)
        needed = [v for m in group.members for v in (*m.op.operands, *m.captured)]
        return [v for v in needed if v not in group.makers]

    def detour(self, group: Group, member: Member) -> bool:
        """Does the member need the group by way of something outside of it?"""
        inside = group.makers
        waiting = [v for v in member.op.operands if v not in inside]
        waiting += member.captured
        seen: set[ir.Value] = set()
        while waiting:
            value = waiting.pop()
            if value in inside:
                return True
            if value not in seen and made_by(value):
                seen.add(value)
                waiting += self.needs(made_by(value))
        return False

    def __iter__(self) -> Iterator[ir.Operation | Group]:
        """Operations and groups, each after what it needs."""
        done: set[ir.Operation | Group] = set()
        for op in self.operations:
            stack = [] if self.unit(op) in done else [op]
            while stack:
                unit = self.unit(stack[-1])
                made = [made_by(v) for v in self.needs(stack[-1])]
                missing = [op for op in made if op and self.unit(op) not in done]
                stack = stack + missing if missing else stack[:-1]
                if not missing and unit not in done:
                    done.add(unit)
                    yield unit

    def unit(self, op: ir.Operation) -> ir.Operation | Group:
        group = self.group_of.get(op.results[0]) if len(op.results) else None
        return group or op
