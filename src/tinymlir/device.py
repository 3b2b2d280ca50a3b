# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § Memory (1)
"""One GPU: its memory, its queue, and what is on it already (chapter 9)."""
from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from tinymlir.driver import (
    DeviceError, DeviceMemoryError, Driver, Module, Stream, bindings, properties)

GRAIN = 512  # bytes: the least that is asked for


def rounded(nbytes: int) -> int:
    """A size that many requests share; at most an eighth is wasted."""
    step = max(GRAIN, (1 << (nbytes - 1).bit_length()) >> 4)
    return -(-max(nbytes, 1) // step) * step


# %% 09_cuda.md § Memory (2)
class Memory:
    """A piece of device memory. When nobody refers to it, the pool has it again."""

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.address, self.size = address, size
        end = weakref.finalize(self, pool.free.append, (size, address))
        end.atexit = False  # the end of the process frees everything


class Pool:
    """Device memory to be used again."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.free: deque[tuple[int, int]] = deque()  # appended to by any thread
        self.kept: dict[int, list[int]] = {}  # size -> addresses

    def sort(self) -> None:
        """What was freed since goes to its size."""
        while self.free:
            size, address = self.free.popleft()
            self.kept.setdefault(size, []).append(address)

    def take(self, nbytes: int) -> Memory:
        """Room for so many bytes. Raises DeviceMemoryError."""
        self.sort()
        size = rounded(nbytes)
        if self.kept.get(size):
            return Memory(self, self.kept[size].pop(), size)
        address = self.ask(size)
        if address is None:
            self.trim()
            address = self.ask(size)
        if address is None:
            free, total = self.driver.call("cuMemGetInfo")
            raise DeviceMemoryError(
                f"out of GPU memory: {nbytes:,} bytes asked for, {free:,} of "
                f"{total:,} are free; use a shorter text or a smaller model, or "
                f"end what else uses the GPU")
        return Memory(self, address, size)

    def ask(self, size: int) -> int | None:
        """The driver's answer; None if it has not that much."""
        try:
            return int(self.driver.call("cuMemAlloc", size))
        except DeviceError as error:
            if error.status != "OUT_OF_MEMORY":
                raise
            return None

    def trim(self) -> None:
        """Give the driver back what nobody uses."""
        self.sort()
        for addresses in self.kept.values():
            while addresses:
                self.driver.call("cuMemFree", addresses.pop())


# %% 09_cuda.md § The device (1)
CLEANERS: list[Callable[[], None]] = []  # who else looks for what nobody wants


class Device:
    """A GPU, ready for work."""

    def __init__(self, api: Any, number: int = 0) -> None:
        """Raises DeviceError if there is none."""
        self.driver, self.number = Driver(api), number
        self.properties = properties(self.driver, number)
        self.context = self.driver.call("cuDevicePrimaryCtxRetain", number)
        self.lock = threading.RLock()
        self.pool = Pool(self.driver)
        self.rubbish: deque[tuple[str, Any]] = deque()
        self.uploads: dict[int, tuple[weakref.ref, Memory]] = {}
        self.driver.call("cuCtxPushCurrent", self.context)
        try:
            self.stream = Stream(self.driver)
        finally:
            self.driver.call("cuCtxPopCurrent")

    @contextmanager
    def current(self) -> Iterator[None]:
        """This thread alone may use the device."""
        with self.lock:
            self.driver.call("cuCtxPushCurrent", self.context)
            try:
                self.tidy()
                yield
            finally:
                with suppress(DeviceError):  # an error of the block comes first
                    self.driver.call("cuCtxPopCurrent")

    def tidy(self) -> None:
        """Destroy what nobody refers to, once no kernel can be using it."""
        for clean in CLEANERS:
            clean()
        if self.rubbish:
            self.stream.wait()
        while self.rubbish:
            self.driver.call(*self.rubbish.popleft())

    def later(self, owner: Any, function: str, handle: Any) -> None:
        """Call a function of the driver once the owner is gone."""
        end = weakref.finalize(owner, self.rubbish.append, (function, handle))
        end.atexit = False

    def module(self, ptx: str) -> Module:
        """The kernels of a text, which go when the module does."""
        made = Module(self.driver, ptx)
        self.later(made, "cuModuleUnload", made.handle)
        return made


# %% 09_cuda.md § What is uploaded once (1)
def frozen(array: np.ndarray) -> bool:
    """Can nobody write to this memory through NumPy, now or later?"""
    root: Any = array
    while isinstance(root, np.ndarray):
        if root.flags.writeable:
            return False
        root = root.base
    return isinstance(root, bytes) or (
        isinstance(root, mmap.mmap) and memoryview(root).readonly)


def upload(device: Device, array: np.ndarray) -> Memory:
    """The bytes of a plain array, on the device."""
    memory = device.pool.take(array.nbytes)
    device.stream.copy_in(memory.address, array.ctypes.data, array.nbytes)
    return memory


def uploaded(device: Device, array: np.ndarray) -> Memory:
    """The same; an array that cannot change is uploaded once."""
    if not frozen(array):
        return upload(device, array)
    reference, memory = device.uploads.get(id(array), (None, None))
    if reference is None or reference() is not array:
        memory = upload(device, array)
        forget = weakref.ref(array, Forget(device.uploads, id(array)))
        device.uploads[id(array)] = forget, memory
    return memory


class Forget:
    """Takes an array out of the table when it dies, unless its place was taken."""

    def __init__(self, table: dict, key: int) -> None:
        self.table, self.key = table, key

    def __call__(self, reference: weakref.ref) -> None:
        if self.table.get(self.key, (None,))[0] is reference:
            del self.table[self.key]


# %% 09_cuda.md § What is uploaded once (2)
chosen: list[Device] = []
choosing = threading.Lock()


def device() -> Device:
    """The GPU of this process. Raises DeviceError if there is none."""
    with choosing:
        if not chosen:
            chosen.append(Device(bindings()))
        return chosen[0]


def use(api: Any = None) -> None:
    """Another driver from now on; None is NVIDIA's.

    Arrays and kernels of the old one are of no use to the new one."""
    with choosing:
        chosen[:] = [] if api is None else [Device(api)]


def available() -> bool:
    """Is there a GPU?"""
    with suppress(DeviceError):
        return bool(device())
    return False
