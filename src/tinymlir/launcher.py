# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § A plan on the device (1)
"""Plans on a device: arguments, launches, CUDA graphs (chapter 9)."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tinymlir.devarray import DeviceArray
from tinymlir.device import Device, Memory, frozen, upload, uploaded
from tinymlir.driver import Recording, check_chip, check_version
from tinymlir.graph import Graph
from tinymlir.plan import ALIGNMENT, Copy, Launch, Plan, Pointer


def ends(plan: Plan) -> Iterator[tuple[Pointer, int]]:
    """Every pointer of a plan, and how many bytes behind it are surely used."""
    for step in plan.steps:
        if isinstance(step, Launch):
            yield from ((pointer, 1) for pointer in step.arguments)
        else:
            yield from ((step.source, step.nbytes), (step.target, step.nbytes))


def misfit(plan: Plan, graph: Graph) -> str:
    """What is wrong with a plan for this graph; empty if nothing is."""
    sizes = [buffer.nbytes for buffer in plan.buffers]
    for kind, wanted in (("argument", [x.type.nbytes for x in graph.arguments]),
                         ("result", [x.type.nbytes for x in graph.returned]),
                         ("constant", [len(data) for data in plan.constants])):
        if [sizes[i] for i in plan.of_kind(kind)] != wanted:
            return f"its {kind}s are of other sizes"
    for pointer, nbytes in ends(plan):
        inside = 0 <= pointer.buffer < len(sizes) and pointer.offset >= 0
        if not inside or pointer.offset + nbytes > sizes[pointer.buffer]:
            return "a pointer leaves its buffer"
    return ""


# %% 09_cuda.md § A plan on the device (2)
class Launches:
    """The kernels of a plan, and the arguments of all its launches."""

    def __init__(self, home: Device, plan: Plan) -> None:
        self.stream, self.steps = home.stream, plan.steps
        shared: dict[str, int] = {}
        for step in plan.launches:
            shared[step.kernel] = max(step.shared, shared.get(step.kernel, 0))
        self.module = home.module(plan.ptx) if shared else None
        self.kernels = {name: self.module.function(name, most)
                        for name, most in shared.items()}
        every = [p for step in plan.launches for p in step.arguments]
        self.buffers = np.array([p.buffer for p in every], int)
        self.offsets = np.array([p.offset for p in every], np.uint64)
        self.values = np.zeros(len(every), np.uint64)
        self.places = np.uint64(self.values.ctypes.data) + 8 * np.arange(
            len(every), dtype=np.uint64)  # the driver wants pointers to the values

    def enqueue(self, bases: Sequence[int]) -> None:
        """Every step of the plan, with its buffers at these addresses."""
        starts = np.array(bases, np.uint64)
        np.add(starts[self.buffers], self.offsets, out=self.values)
        at = self.places.ctypes.data

        def where(pointer: Pointer) -> int:
            return bases[pointer.buffer] + pointer.offset

        for step in self.steps:
            if isinstance(step, Copy):
                self.stream.copy(
                    where(step.target), where(step.source), step.nbytes)
                continue
            self.stream.launch(self.kernels[step.kernel], step.grid, step.block,
                               step.shared, at)
            at += 8 * len(step.arguments)


# %% 09_cuda.md § A plan on the device (3)
GRAPH_FROM = 24  # launches; a shorter plan is not worth a CUDA graph
GRAPHS = 8  # that are kept for a plan


class Loaded:
    """A plan on a device."""

    def __init__(self, home: Device, plan: Plan, captured: Sequence[np.ndarray]
                 ) -> None:
        """Raises DeviceError if the device or its driver is too old for it."""
        check_chip(plan.chip, home.properties)
        check_version(plan.ptx, home.properties)
        self.home, self.plan, self.launches = home, plan, Launches(home, plan)
        arguments = plan.of_kind("argument")
        self.inputs = arguments[:len(arguments) - len(captured)]
        fixed = [*zip(arguments[len(self.inputs):], captured),
                 *zip(plan.of_kind("constant"),
                      (np.frombuffer(data, np.uint8) for data in plan.constants))]
        self.fixed = {i: upload(home, array) for i, array in fixed}
        self.keeps = len(plan.launches) >= GRAPH_FROM
        self.rooms: dict[int, Memory] = {}
        self.graphs: dict[tuple[int, ...], Any] = {}
        self.last: tuple[int, ...] = ()

    def room(self, number: int) -> Memory:
        """Memory for a buffer of the plan."""
        if number in self.rooms:
            return self.rooms[number]
        memory = self.home.pool.take(self.plan.buffers[number].nbytes)
        if self.keeps:
            self.rooms[number] = memory
        return memory

    def argument(self, number: int, array: Any) -> tuple[int, Any]:
        """The address of an argument, and what keeps it there."""
        aligned = isinstance(array, DeviceArray) and array.address % ALIGNMENT == 0
        if aligned:
            return array.address, array.owner
        if isinstance(array, np.ndarray) and frozen(array):
            memory = uploaded(self.home, array)
            return memory.address, memory
        memory, stream = self.room(number), self.home.stream
        if isinstance(array, DeviceArray):  # a slice of rows may start anywhere
            stream.copy(memory.address, array.address, array.nbytes)
        else:
            stream.copy_in(memory.address, array.ctypes.data, array.nbytes)
        return memory.address, memory

    def hold(self, arrays: Sequence[Any]) -> list[tuple[int, Any]]:
        """The address of every buffer, and what keeps it there."""
        held = {i: (memory.address, memory) for i, memory in self.fixed.items()}
        for i, array in zip(self.inputs, arrays):
            held[i] = self.argument(i, array)
        for i in range(len(self.plan.buffers)):
            if i not in held:
                room = self.room(i)
                held[i] = room.address, room
        return [held[i] for i in range(len(held))]

    def run(self, arrays: Sequence[Any], changed: Sequence[int] = ()
            ) -> list[Memory]:
        """Enqueue the program; where its results will be. Some arguments are
        `changed` by it."""
        held = self.hold(arrays)
        self.launch(tuple(address for address, _ in held))
        for i in changed:
            self.bring_back(arrays[i], held[self.inputs[i]][0])
        return [held[i][1] for i in self.plan.of_kind("result")]

    def bring_back(self, array: Any, address: int) -> None:
        """An argument that was changed, from where it was to where it belongs."""
        if isinstance(array, np.ndarray):
            self.home.stream.copy_out(array.ctypes.data, address, array.nbytes)
        elif address != array.address:
            self.home.stream.copy(array.address, address, array.nbytes)

    def launch(self, bases: tuple[int, ...]) -> None:
        """By a CUDA graph, from the second call with the same addresses on."""
        again, self.last = self.keeps and bases == self.last, bases
        if not again and bases not in self.graphs:
            self.launches.enqueue(bases)
            return
        if bases not in self.graphs:
            with Recording(self.home.stream) as drawn:
                self.launches.enqueue(bases)
            self.home.later(drawn, "cuGraphExecDestroy", drawn.graph)
            self.graphs[bases] = drawn
            while len(self.graphs) > GRAPHS:
                del self.graphs[next(iter(self.graphs))]
        self.home.driver.call("cuGraphLaunch", self.graphs[bases].graph,
                              self.home.stream.handle)
