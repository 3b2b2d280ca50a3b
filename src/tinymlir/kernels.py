# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Building a kernel (1)
"""Kernels, built operation by operation (chapter 8)."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, gpu, memref, scf, vector
from mlir.dialects import math as math_

from tinymlir.groups import (
    PRODUCTS, Group, Linear, Member, address, linear, number_of)
from tinymlir.lanes import widen
from tinymlir.plan import BYTES
from tinymlir.scalars import index


# %% 08_gpu.md § Building a kernel (2)
@dataclass(eq=False)
class Array:
    """Device memory of one tensor, or of several that are views of it."""

    size: int  # in elements
    element: str
    kind: str  # as in plan.Buffer
    number: int = 0  # among the arguments, or the results
    data: bytes = b""  # of a constant

    @property
    def nbytes(self) -> int:
        return self.size * BYTES[self.element]


@dataclass(frozen=True)
class Place:
    """Where a tensor is: from an offset on, with a stride for each axis."""

    array: Array
    offset: int
    strides: tuple[int, ...]

    def address(self, map_: ir.AffineMap) -> Linear:
        return address(map_, self.offset, self.strides)


# %% 08_gpu.md § Building a kernel (3)
SHELL = """
gpu.module @kernels {{
  gpu.func @kernel({takes}) {shared} kernel
      attributes {{known_block_size = array<i32: {block}>, nvvm.minctasm = 1 : i32}}
      {{ gpu.return }}
}}"""
SHARED = "memref<{}x{}, #gpu.address_space<workgroup>> {{llvm.align = 16 : i64}}"
READ_ONLY = " {llvm.noalias}"


class Kernel:
    """A gpu.func that is being built; arrays are its arguments, one-dimensional."""

    def __init__(self, arrays: Sequence[Array], block: tuple[int, int, int],
                 shared: Sequence[tuple[int, str]] = ()) -> None:
        takes = ", ".join(f"%a{i}: memref<{a.size}x{a.element}> {{llvm.noalias}}"
                          for i, a in enumerate(arrays))
        parts = ", ".join(f"%s{i}: {SHARED.format(*s)}"
                          for i, s in enumerate(shared))
        self.module = ir.Module.parse(SHELL.format(
            takes=takes, shared=f"workgroup({parts})" if parts else "",
            block=", ".join(map(str, block))))
        (outer,) = self.module.body.operations
        self.function = outer.regions[0].blocks[0].operations[0]
        inside = self.function.regions[0].blocks[0]
        self.arrays, self.block = list(arrays), block
        arguments = list(inside.arguments)
        self.pointers = {id(a): v for a, v in zip(arrays, arguments)}
        self.shared = arguments[len(arrays):]
        self.body = ir.InsertionPoint(inside.operations[0])


# %% 08_gpu.md § Building a kernel (4)
@dataclass(eq=False)
class Built:
    """A kernel and how to launch it."""

    kernel: Kernel
    grid: tuple[int, int, int]


KERNELS: dict[str, Callable[..., Built]] = {}  # kind of group -> what builds it


# %% 08_gpu.md § Building a kernel (5)
WARP = 32  # threads that run together


def plus(*terms: ir.Value | int) -> ir.Value:
    """A sum of indices; numbers are added here and now."""
    known = sum(t for t in terms if isinstance(t, int))
    total = None
    for t in terms:
        if not isinstance(t, int):
            total = t if total is None else arith.addi(total, t)
    if total is None:
        return index(known)
    return arith.addi(total, index(known)) if known else total


def scaled(x: ir.Value, factor: int) -> ir.Value:
    return x if factor == 1 else arith.muli(x, index(factor))


def at(formula: Linear, point: Sequence[ir.Value]) -> ir.Value:
    """The element that a formula names at a point."""
    terms = [scaled(x, s) for x, s in zip(point, formula.steps) if s]
    return plus(*terms, formula.offset)


def split(number: ir.Value, extents: Sequence[int]) -> list[ir.Value]:
    """A running number as coordinates, the last one running fastest."""
    point = []
    for extent in reversed(extents[1:]):
        point.append(arith.remui(number, index(extent)))
        number = arith.divui(number, index(extent))
    return [number, *reversed(point)][:len(extents)]


# %% 08_gpu.md § Building a kernel (6)
def below(x: ir.Value, limit: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, x, index(limit))


def block_id(dimension: str) -> ir.Value:
    return gpu.block_id(getattr(gpu.Dimension, dimension))


def thread_id(dimension: str) -> ir.Value:
    return gpu.thread_id(getattr(gpu.Dimension, dimension))


def both(x: ir.Value | None, y: ir.Value | None) -> ir.Value | None:
    """Both conditions; None is always."""
    if x is None or y is None:
        return y if x is None else x
    return arith.andi(x, y)


@contextmanager
def guarded(condition: ir.Value | None) -> Iterator[None]:
    """Code that runs only if the condition holds; None is always."""
    if condition is None:
        yield
        return
    with ir.InsertionPoint(scf.IfOp(condition).then_block):
        yield
        scf.YieldOp([])


# %% 08_gpu.md § Building a kernel (7)
UNROLL = "llvm.loop_annotation"  # of a loop that LLVM is to write out


def load(pointer: ir.Value, where: ir.Value, lanes: int) -> list[ir.Value]:
    """So many neighbours, in one instruction."""
    if lanes == 1:
        return [memref.load(pointer, [where])]
    kind = ir.MemRefType(pointer.type).element_type
    whole = vector.load(ir.VectorType.get([lanes], kind), pointer, [where],
                        alignment=aligned(kind, lanes))
    return [vector.extract(whole, [], [i]) for i in range(lanes)]


def store(values: Sequence[ir.Value], pointer: ir.Value, where: ir.Value) -> None:
    if len(values) == 1:
        memref.store(values[0], pointer, [where])
        return
    kind = values[0].type
    whole = vector.from_elements(ir.VectorType.get([len(values)], kind), values)
    vector.store(whole, pointer, [where], alignment=aligned(kind, len(values)))


def aligned(kind: ir.Type, lanes: int) -> int:
    """Bytes; 16 is as much as one instruction moves."""
    return min(BYTES[str(kind)] * lanes, 16)


# %% 08_gpu.md § Building a kernel (8)
def last_step(formula: Linear) -> int:
    return formula.steps[-1] if formula.steps else 0


def together(formula: Linear, lanes: int) -> bool:
    """Are the lanes neighbours in memory, and the first one where a vector is?"""
    rest = (*formula.steps[:-1], formula.offset)
    return last_step(formula) == 1 and all(s % lanes == 0 for s in rest)


def load_lanes(pointer: ir.Value, formula: Linear, point: Sequence[ir.Value],
               lanes: int) -> list[ir.Value]:
    """Numbers along the last loop: a vector, the same for all, or one by one."""
    where, step = at(formula, point), last_step(formula)
    if lanes == 1 or not step:
        return load(pointer, where, 1) * lanes
    if together(formula, lanes):
        return load(pointer, where, lanes)
    return [load(pointer, plus(where, step * i), 1)[0] for i in range(lanes)]


def store_lanes(numbers: Sequence[ir.Value], pointer: ir.Value, formula: Linear,
                point: Sequence[ir.Value]) -> None:
    where, step = at(formula, point), last_step(formula)
    if len(numbers) == 1 or together(formula, len(numbers)):
        store(numbers, pointer, where)
        return
    for i, number in enumerate(numbers):
        store([number], pointer, plus(where, step * i))


# %% 08_gpu.md § What a group computes (1)
@dataclass(eq=False)
class Numbers:
    """The numbers of a group at a point and at its neighbours along the last loop.

    They are worked out when they are asked for, and kept: in registers."""

    scope: Scope
    point: list[ir.Value]
    lanes: int
    valid: ir.Value | None = None

    def __post_init__(self) -> None:
        self.known: dict[ir.Value, list[ir.Value]] = {}

    def of(self, value: ir.Value, map_: ir.AffineMap, member: Member
           ) -> list[ir.Value]:
        """What a member reads."""
        if (number := number_of(value)) is not None:
            return [constant(number)] * self.lanes
        if value in self.scope.rows:
            return [self.scope.rows[value]] * self.lanes
        maker = self.scope.group.maker(value)
        if maker is None:
            return self.load(self.scope.places[value], map_, member)
        if value not in self.known:
            self.known[value] = self.run(maker)
        return self.known[value]

    def load(self, place: Place, map_: ir.AffineMap, member: Member
             ) -> list[ir.Value]:
        pointer = self.scope.kernel.pointers[id(place.array)]
        formula = self.scope.formula(place, map_, member)
        return load_lanes(pointer, formula, self.point, self.lanes)

    def run(self, member: Member) -> list[ir.Value]:
        """The results of a member that is no reduction, one for each lane."""
        given = [self.of(v, m, member) for v, m in member.reads]
        return [self.body(member, lane, [numbers[lane] for numbers in given])
                for lane in range(self.lanes)]

    def add_to(self, total: ir.Value, member: Member) -> ir.Value:
        """A reduction's total so far, and all lanes."""
        given = [self.of(v, m, member) for v, m in member.reads]
        new = total
        for lane in range(self.lanes):
            new = self.body(member, lane, [*(n[lane] for n in given), new])
        return new if self.valid is None else arith.select(self.valid, new, total)

    def body(self, member: Member, lane: int, numbers: list[ir.Value]) -> ir.Value:
        if member.op.name in PRODUCTS:
            return product_of(*numbers)
        if member.op.name != "linalg.generic":
            return numbers[0]
        block = member.op.regions[0].blocks[0]
        return clone(block, numbers, member, self, lane)

    def store(self, value: ir.Value) -> None:
        """Write a member's result to its place."""
        member, place = self.scope.group.maker(value), self.scope.places[value]
        numbers = self.of(value, member.writes, member)
        pointer = self.scope.kernel.pointers[id(place.array)]
        formula = self.scope.formula(place, member.writes, member)
        store_lanes(numbers, pointer, formula, self.point)


# %% 08_gpu.md § What a group computes (2)
@dataclass(eq=False)
class Scope:
    """What all points of a kernel share."""

    group: Group
    places: dict[ir.Value, Place]
    kernel: Kernel
    flat: bool = False  # is the whole group one long loop?

    def __post_init__(self) -> None:
        self.rows: dict[ir.Value, ir.Value] = {}  # what a row has one of

    def formula(self, place: Place, map_: ir.AffineMap, member: Member) -> Linear:
        """Where a member's number is, over the loops that the kernel counts."""
        formula = member.in_order(place.address(map_))
        return Linear(formula.offset, formula.steps[-1:]) if self.flat else formula


# %% 08_gpu.md § What a group computes (3)
def product_of(a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """total + a * b, as a matrix product adds them up."""
    a, b = widen(a, total.type), widen(b, total.type)
    if isinstance(total.type, ir.IntegerType):
        return arith.addi(total, arith.muli(a, b))
    return math_.fma(a, b, total)


def constant(value: ir.Value) -> ir.Value:
    """A number of the surrounding function, once more, here."""
    return arith.constant(value.type, value.owner.attributes["value"])


def clone(block: ir.Block, numbers: Sequence[ir.Value], member: Member,
          where: Numbers, lane: int) -> ir.Value:
    """The body of a linalg.generic, with numbers for its arguments."""
    known = dict(zip(block.arguments, numbers))

    def get(value: ir.Value) -> ir.Value:
        return known[value] if value in known else constant(value)

    for op in block:
        operation = op.operation
        if operation.name == "linalg.yield":
            return get(operation.operands[0])
        if operation.name in SPECIAL:
            made = SPECIAL[operation.name](operation, get, member, where, lane)
        else:
            made = copied(operation, get)
        known[operation.results[0]] = made
    raise AssertionError("a body ends with linalg.yield")


def copied(operation: ir.Operation, get: Callable) -> ir.Value:
    given = [get(v) for v in operation.operands]
    new = operation.clone()
    for i, value in enumerate(given):
        new.operands[i] = value
    return new.results[0]


# %% 08_gpu.md § What a group computes (4)
def loop_number(op, get, member, where, lane) -> ir.Value:
    """linalg.index: where the point is."""
    loop = ir.IntegerAttr(op.attributes["dim"]).value
    if loop not in member.order:
        return index(0)
    g = member.order.index(loop)
    last = g == len(member.order) - 1
    return plus(where.point[g], lane) if last else where.point[g]


def element(op, get, member, where, lane) -> ir.Value:
    """tensor.extract: any element of a tensor."""
    tensor, *coordinates = op.operands
    if (number := number_of(tensor)) is not None:
        return constant(number)
    place, scope = where.scope.places[tensor], where.scope
    formula = Linear(place.offset, place.strides)
    pointer = scope.kernel.pointers[id(place.array)]
    return load(pointer, at(formula, [get(c) for c in coordinates]), 1)[0]


def affine(op, get, member, where, lane) -> ir.Value:
    map_ = ir.AffineMapAttr(op.attributes["map"]).value
    return at(linear(map_.results[0], map_.n_dims), [get(v) for v in op.operands])


SPECIAL = {"linalg.index": loop_number, "tensor.extract": element,
           "affine.apply": affine}
