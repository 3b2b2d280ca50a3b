# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § From a function to a list of launches (1)
"""A function on tensors as a list of kernels to run (chapter 8)."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mlir import ir

from tinymlir.errors import CompileError, UnsupportedError
from tinymlir.expr import rule
from tinymlir.groups import (
    Group, Partition, dense, made_by, number_of, parts_of, shape_of)
from tinymlir.kernels import KERNELS, Array, Built, Place
from tinymlir.maps import copy_kernel, outside_of
from tinymlir.turned import turned_reads


# %% 08_gpu.md § From a function to a list of launches (2)
@dataclass(frozen=True, eq=False)
class Run:
    """A launch before memory has been given out: arrays in place of pointers."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arrays: tuple[Array, ...]


@dataclass(eq=False)
class Routine:
    """A function of the module: its arguments, its results and its steps."""

    takes: list[Array]
    gives: list[Array]
    steps: list[Run]


# %% 08_gpu.md § From a function to a list of launches (3)
@dataclass
class Library:
    """The kernels of a program. Equal ones are kept once."""

    names: dict[str, str] = field(default_factory=dict)  # text -> name
    modules: dict[str, ir.Module] = field(default_factory=dict)  # name -> module

    def add(self, built: Built, label: str) -> str:
        """The kernel's name in the library."""
        text = str(built.kernel.function)
        if text not in self.names:
            name = f"{label}_{len(self.names)}"
            built.kernel.function.attributes["sym_name"] = ir.StringAttr.get(name)
            self.names[text] = name
            self.modules[name] = built.kernel.module
        return self.names[text]

    def module(self) -> ir.Module:
        """All kernels in one gpu.module."""
        whole = ir.Module.parse(
            "module attributes {gpu.container_module} { gpu.module @kernels {} }")
        target = whole.body.operations[0].regions[0].blocks[0]
        for module in self.modules.values():
            (inner,) = module.body.operations[0].regions[0].blocks
            target.append(inner.operations[0])
        return whole


# %% 08_gpu.md § From a function to a list of launches (4)
def kind_of(group: Group, places: dict[ir.Value, Place], precision: str) -> str:
    """What kind of kernel a group becomes."""
    if group.product:
        values = [*group.product.op.operands][:2]
        single = all("f32" in str(v.type) for v in (*values, group.product.result))
        return "tensor" if single and precision == "tf32" else "product"
    if group.rows is None:
        return "turned" if turned_reads(group, places)[1] else "map"
    return "column" if group.is_column else "row"


# %% 08_gpu.md § From a function to a list of launches (5)
MOST = 512  # pointers: 4096 bytes hold the arguments of a kernel


@dataclass(eq=False)
class Program:
    """A module on its way to kernels."""

    module: ir.Module
    precision: str
    library: Library = field(default_factory=Library)

    def __post_init__(self) -> None:
        self.routines: dict[str, Routine] = {}
        self.functions = {
            ir.StringAttr(op.attributes["sym_name"]).value: op.operation
            for op in self.module.body.operations}

    def routine(self, name: str) -> Routine:
        """A function's steps, worked out when it is first called."""
        if name not in self.routines:
            self.routines[name] = Walker(self, self.functions[name]).routine
        return self.routines[name]


# %% 08_gpu.md § From a function to a list of launches (6)
INTO = "bufferization.materialize_in_destination"


def readers(value: ir.Value) -> list[ir.Operation]:
    """Who reads a tensor; who overwrites it does not."""
    return [use.owner.operation for use in value.uses
            if use.owner.operation.name != INTO or use.operand_number == 0]


class Walker:
    """Turns a function on tensors into a Routine."""

    def __init__(self, program: Program, function: ir.Operation) -> None:
        self.program = program
        block = function.regions[0].blocks[0]
        self.partition = Partition(block)
        self.places: dict[ir.Value, Place] = {}
        self.steps: list[Run] = []
        self.results: dict[ir.Value, int] = {}
        self.returned = list(block.operations[len(block.operations) - 1].operands)
        takes = [self.fresh(v, "argument", i).array
                 for i, v in enumerate(block.arguments)]
        for i, value in enumerate(self.returned):
            self.results.setdefault(value, i)
        self.goals = {op.operands[1]: self.places[op.operands[1]]
                      for op in self.partition.operations if op.name == INTO}
        self.free = set(self.goals)  # tensors whose memory may be changed
        for value in self.goals:
            self.keep_old(value)
        for unit in self.partition:
            self.add(unit)
        gives = [self.given(i, value) for i, value in enumerate(self.returned)]
        self.routine = Routine(takes, gives, self.steps)

    def fresh(self, value: ir.Value, kind: str = "scratch", number: int = 0
              ) -> Place:
        """A new array for a tensor; a result of the function if it is returned."""
        if kind == "scratch" and value in self.results:
            kind, number = "result", self.results[value]
        shape = shape_of(value)
        element = str(ir.RankedTensorType(value.type).element_type)
        array = Array(math.prod(shape), element, kind, number)
        self.places[value] = Place(array, 0, dense(shape))
        return self.places[value]

    def add(self, unit: ir.Operation | Group) -> None:
        if isinstance(unit, Group):
            self.launch(unit)
        elif unit.name in RULES:
            RULES[unit.name](self, unit)
        elif unit.name not in NOTHING and math.prod(shape_of(unit.results[0])):
            raise CompileError(f"no kernel for {unit.name}")

    def launch(self, group: Group) -> None:
        """A kernel for a group, and a step that runs it."""
        inside = {m.op for m in group.members}
        for member in group.members:
            if any(u.owner.operation not in inside for u in member.result.uses):
                self.fresh(member.result)
        read = [self.place(v) for v in outside_of(group)]
        made = [self.places[m.result] for m in group.members
                if m.result in self.places]
        arrays = list(dict.fromkeys(p.array for p in (*read, *made)))
        if len(arrays) > MOST:
            raise UnsupportedError(
                f"one kernel would need {len(arrays)} arrays, and a GPU passes it "
                f"at most {MOST}; use np.concatenate")
        kind = kind_of(group, self.places, self.program.precision)
        if made and group.is_long:
            self.reduce_in_parts(group, kind, arrays)
        elif made:
            self.run(KERNELS[kind](group, self.places, arrays), kind)

    def reduce_in_parts(self, group: Group, kind: str, arrays: list[Array]) -> None:
        """A kernel in which each block reduces a part, and one for their totals."""
        start = number_of(list(group.reduction.op.operands)[-1])
        size = math.prod(group.extents[:group.rows]) * parts_of(group)
        parts = Array(size, str(start.type), "scratch")
        for step in (f"parts of a {kind}", "total"):
            built = KERNELS[step](group, self.places, [*arrays, parts])
            self.run(built, step.partition(" ")[0])

    def run(self, built: Built, label: str) -> None:
        name = self.program.library.add(built, label)
        kernel = built.kernel
        self.steps.append(Run(name, built.grid, kernel.block, tuple(kernel.arrays)))

    def place(self, value: ir.Value) -> Place:
        """Where a tensor is; one that is full of a number is filled now."""
        if value not in self.places:
            self.copy(value, self.fresh(value))
        return self.places[value]

    def copy(self, value: ir.Value, target: Place) -> None:
        """Steps that bring the numbers of a tensor to another place."""
        source = self.places[value]
        if source is target:
            source = number_of(value)
        shape = shape_of(value)
        if source is not None and math.prod(shape):
            kind = "copy" if isinstance(source, Place) else "fill"
            self.run(copy_kernel(shape, source, target), kind)

    def keep_old(self, value: ir.Value) -> None:
        """Several who read an argument that will be overwritten read a copy."""
        if len(readers(value)) > 1:
            self.free.remove(value)
            new = self.fresh(value)
            built = copy_kernel(shape_of(value), self.goals[value], new)
            self.run(built, "copy")

    def changed(self, value: ir.Value, result: ir.Value) -> Place:
        """Where a tensor is turned into another: where it is, if nobody else
        reads it."""
        if value in self.free and len(readers(value)) == 1:
            self.places[result] = self.places[value]
        else:
            self.place(value)
            self.copy(value, self.fresh(result))
        self.free.add(result)
        return self.places[result]

    def dense(self, value: ir.Value) -> Place:
        """A place at the start of an array, without gaps; copies if it has to."""
        place, shape = self.place(value), shape_of(value)
        if place.offset == 0 and place.strides == dense(shape):
            return place
        element, size = place.array.element, math.prod(shape)
        target = Place(Array(size, element, "scratch"), 0, dense(shape))
        self.copy(value, target)
        return target

    def given(self, i: int, value: ir.Value) -> Array:
        """The array of a result; a value that is somewhere else is copied."""
        maker = made_by(value)
        if maker and maker.name == INTO and self.results[value] == i:
            return self.goals[maker.operands[1]].array
        place, shape = self.place(value), shape_of(value)
        own = (place.array.kind, place.array.number) == ("result", i)
        if own and place == Place(place.array, 0, dense(shape)):
            return place.array
        array = Array(math.prod(shape), place.array.element, "result", i)
        self.copy(value, Place(array, 0, dense(shape)))
        return array


# %% 08_gpu.md § Views (1)
RULES: dict[str, Callable[[Walker, ir.Operation], None]] = {}
NOTHING = {"arith.constant", "tensor.empty", "linalg.fill", "func.return",
           "linalg.generic"}


@rule(RULES, "tensor.extract_slice")
def slice_(w: Walker, op: ir.Operation) -> None:
    """The same array, from another offset on, with longer strides."""
    place, result = w.place(op.operands[0]), op.results[0]
    offsets, sizes, steps = (list(op.attributes[f"static_{what}"])
                             for what in ("offsets", "sizes", "strides"))
    offset = place.offset + sum(o * s for o, s in zip(offsets, place.strides))
    strides = [a * b for a, b in zip(place.strides, steps)]
    w.places[result] = Place(place.array, offset, tuple(
        kept_strides(sizes, strides, shape_of(result))))


def kept_strides(sizes: Sequence[int], strides: Sequence[int], shape: Sequence[int]
                 ) -> list[int]:
    """The strides of the axes that are left when some of length one are dropped."""
    pairs, kept = list(zip(sizes, strides)), []
    for length in shape:
        while pairs[0][0] != length:
            pairs.pop(0)
        kept.append(pairs.pop(0)[1])
    return kept


# %% 08_gpu.md § Views (2)
@rule(RULES, "tensor.expand_shape")
def expand(w: Walker, op: ir.Operation) -> None:
    """An axis that becomes several: the last of them takes the old steps."""
    place, shape = w.place(op.operands[0]), shape_of(op.results[0])
    strides: list[int] = []
    for stride, group in zip(place.strides, op.attributes["reassociation"]):
        lengths = [shape[ir.IntegerAttr(i).value] for i in ir.ArrayAttr(group)]
        strides += [stride * step for step in dense(lengths)]
    strides += dense(shape[len(strides):])
    w.places[op.results[0]] = Place(place.array, place.offset, tuple(strides))


@rule(RULES, "tensor.reshape", "tensor.collapse_shape", "tensor.cast")
def reshape(w: Walker, op: ir.Operation) -> None:
    """The same numbers in the same order, if there are no gaps between them."""
    place = w.dense(op.operands[0])
    w.places[op.results[0]] = Place(place.array, 0, dense(shape_of(op.results[0])))


# %% 08_gpu.md § Views (3)
@rule(RULES, "tensor.insert_slice")
def insert(w: Walker, op: ir.Operation) -> None:
    """Part of an array is written; if others need it as it was, it is copied."""
    part, whole, result = op.operands[0], op.operands[1], op.results[0]
    before = made_by(whole)
    began = before and before.name == "tensor.insert_slice"
    if began and len(list(whole.uses)) == 1:
        w.places[result] = w.places[whole]
    else:
        w.fresh(result)
        if not before or before.name != "tensor.empty":
            w.place(whole)
            w.copy(whole, w.places[result])
    place, sizes = w.places[result], list(op.attributes["static_sizes"])
    offsets, steps = (list(op.attributes[f"static_{what}"])
                      for what in ("offsets", "strides"))
    offset = place.offset + sum(o * s for o, s in zip(offsets, place.strides))
    strides = [a * b for a, b in zip(place.strides, steps)]
    w.place(part)
    w.copy(part, Place(place.array, offset, tuple(
        kept_strides(sizes, strides, shape_of(part)))))


# %% 08_gpu.md § Views (4)
@rule(RULES, INTO)
def into_argument(w: Walker, op: ir.Operation) -> None:
    """The numbers of a tensor, in the array of an argument."""
    value, target = op.operands
    w.place(value)
    w.copy(value, w.goals[target])
    w.places[op.results[0]] = w.goals[target]


# %% 08_gpu.md § Views (5)
@rule(RULES, "func.call")
def call(w: Walker, op: ir.Operation) -> None:
    """The steps of the function, on the arrays of this call."""
    routine = w.program.routine(ir.FlatSymbolRefAttr(op.attributes["callee"]).value)
    takes = dict(zip(map(id, routine.takes), op.operands))
    known = {key: w.dense(v).array for key, v in takes.items()}
    for value, array in zip(op.results, routine.gives):
        given = takes.get(id(array))
        place = w.changed(given, value) if given else w.fresh(value)
        known[id(array)] = place.array

    def own(array: Array) -> Array:
        """The array in this call: temporary ones are new each time."""
        return known.setdefault(id(array), replace(array))

    for step in routine.steps:
        w.steps.append(replace(step, arrays=tuple(map(own, step.arrays))))
