# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Memory (1)
"""GPU kernels on the CPU, one thread after the other (chapter 8)."""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mlir import ir

from tinymlir import compiler, gpu, native, store
from tinymlir.coroutines import PASSES, to_llvm
from tinymlir.errors import CompileError
from tinymlir.graph import Graph
from tinymlir.plan import ALIGNMENT, Launch, Plan, Pointer
from tinymlir.onethread import SLOTS, Emulated

take, ready = compiler.take, compiler.ready
IN_PLACE = True


# %% 08_gpu.md § Memory (2)
def device_array(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array that starts as device memory does, at a multiple of ALIGNMENT."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(nbytes + ALIGNMENT, 255, np.uint8)  # what nobody wrote is NaN
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start:start + nbytes].view(dtype).reshape(shape)


def on_device(array: np.ndarray) -> np.ndarray:
    """The array, or a copy that starts as device memory does."""
    if array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = device_array(array.shape, array.dtype)
    copy[...] = array
    return copy


class Memory:
    """Device memory of a plan: the caller's arrays, and what nobody wrote yet."""

    def __init__(self, plan: Plan, arguments: Sequence[np.ndarray],
                 results: Sequence[np.ndarray]) -> None:
        constants = [np.frombuffer(c, np.uint8) for c in plan.constants]
        known = {"argument": arguments, "result": results, "constant": constants}
        self.arrays = [
            on_device(known[b.kind][b.index]) if b.kind in known
            else device_array((b.nbytes,), np.uint8) for b in plan.buffers]
        self.copies = {id(a): self.arrays[i] for a, i in zip(
            arguments, plan.of_kind("argument"))}

    def address(self, pointer: Pointer) -> int:
        return self.arrays[pointer.buffer].ctypes.data + pointer.offset

    def give_back(self, array: np.ndarray) -> None:
        """Bring the numbers of an argument back, if a copy of it was changed."""
        if self.copies[id(array)] is not array:
            array[...] = self.copies[id(array)]


# %% 08_gpu.md § Memory (3)
class Kernel:
    """A kernel that can be run: no MLIR is left in it."""

    def __init__(self, e: Emulated) -> None:
        self.name, self.waits, self.accesses = e.name, e.waits, e.accesses
        self.block, self.threads = e.block, e.threads
        self.shared = [(k.shape[0], NUMPY_TYPES[str(k.element_type)])
                       for k in e.shared]

    def room(self) -> list[np.ndarray]:
        """Shared memory; then what threads tell each other, and us."""
        shared = [device_array((size,), dtype) for size, dtype in self.shared]
        slots = np.zeros(self.threads * SLOTS, np.int64)
        return [*shared, slots, np.zeros(3, np.int64)]

    def check(self, state: np.ndarray) -> None:
        """Raise CompileError for what a GPU would not survive."""
        if state[1]:
            raise CompileError(f"{self.name}: outside of the array, or not "
                               f"aligned: {self.accesses[state[1] - 1]}")
        if state[2]:
            raise CompileError(f"{self.name}: {state[2]} of {self.threads} threads "
                               f"ended while others wait at a barrier")


NUMPY_TYPES = {"f32": np.float32, "f64": np.float64, "i32": np.int32,
               "i64": np.int64, "i8": np.int8}


# %% 08_gpu.md § Memory (4)
class Device:
    """The kernels of a module, as native code of this processor."""

    def __init__(self, module: ir.Module) -> None:
        with compiler.mlir_lock, compiler.context():
            text, kernels = to_llvm(module)
            self.kernels = {e.name: Kernel(e) for e in kernels}
        key = store.key_of(text)
        kept = store.read(key)
        if kept is None:
            kept = [], native.generate(text, passes=PASSES)
            store.write(key, *kept)
        self.code = native.Code(kept[1])

    def call(self, symbol: str, addresses: Sequence[int], numbers: Sequence[int]
             ) -> int | None:
        kinds = [ctypes.c_void_p] * len(addresses) + [ctypes.c_int64] * len(numbers)
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, *kinds)
        return kind(self.code.address(symbol))(*addresses, *numbers)

    def run(self, launch: Launch, memory: Memory, backwards: bool = False) -> None:
        """All blocks and all threads, first to last or last to first."""
        kernel = self.kernels[launch.kernel]
        room = kernel.room()
        addresses = [memory.address(p) for p in launch.arguments]
        addresses += [a.ctypes.data for a in room]
        self.call(f"{kernel.name}_run", addresses, [*launch.grid, int(backwards)])
        kernel.check(room[-1])


# %% 08_gpu.md § Memory (5)
class Block:
    """One block of a launch, run from one barrier to the next."""

    def __init__(self, device: Device, launch: Launch, memory: Memory,
                 number: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.device, self.kernel = device, device.kernels[launch.kernel]
        self.room, self.number = self.kernel.room(), number
        self.addresses = [memory.address(p) for p in launch.arguments]
        self.addresses += [a.ctypes.data for a in self.room]
        self.started: dict[int, int | None] = {}

    @property
    def shared(self) -> list[np.ndarray]:
        return self.room[:-2]

    @property
    def ended(self) -> int:
        """How many threads have come to their end."""
        return int(self.room[-1][0])

    def step(self, threads: Sequence[int] | None = None) -> Block:
        """Let threads run until they wait, or end."""
        for thread in range(self.kernel.threads) if threads is None else threads:
            self.turn(thread)
        self.kernel.check(self.room[-1])
        return self

    def turn(self, thread: int) -> None:
        """One thread, as far as it gets."""
        if thread in self.started:
            self.device.call("go_on", [self.started[thread]], [])
            return
        x, y, _ = self.kernel.block
        place = thread % x, thread // x % y, thread // (x * y)
        suffix = "_start" if self.kernel.waits else ""
        self.started[thread] = self.device.call(
            self.kernel.name + suffix, self.addresses, [*self.number, *place])


# %% 08_gpu.md § Memory and PTX (1)
class Program:
    """A graph, run by the emulator."""

    def __init__(self, graph: Graph, backwards: bool = False) -> None:
        gpu.check_chip(gpu.CHIP, graph.precision)
        with compiler.mlir_lock, compiler.context():
            lowered = gpu.lower(graph)
            self.plan = gpu.plan_of(lowered.routine, gpu.CHIP, "")
            self.device = Device(lowered.module)
        self.captured = [node.attrs["value"] for node in graph.arrays]
        self.in_place = graph.in_place
        self.types = [(node.shape, node.dtype) for node in graph.results]
        self.backwards = backwards

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run every step of the plan; results are fresh, or in place of arguments.

        Raises CompileError for what a GPU would not survive: an address outside of
        its array, threads that miss a barrier."""
        made = [arrays[self.in_place[i]] if i in self.in_place
                else device_array(*kind) for i, kind in enumerate(self.types)]
        given = [a for a in (*arrays, *self.captured) if a.size]
        memory = Memory(self.plan, given, [
            a for i, a in enumerate(made) if a.size and i not in self.in_place])
        for launch in self.plan.launches:
            self.device.run(launch, memory, self.backwards)
        for i in self.in_place.values():
            memory.give_back(arrays[i])
        return made

    def bind(self, arrays: Sequence[np.ndarray | None]) -> Callable[..., list]:
        """A function of the arrays that are None here; the others are kept."""
        return lambda rest: self(compiler.merged(arrays, rest))


load, texts = Program, gpu.texts
