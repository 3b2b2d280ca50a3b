# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § The driver's functions (1)
"""A device that is not there, behind the driver's functions (chapter 9)."""
from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np

from tinymlir import simt
from tinymlir.driver import cuda_for, number_of, version_of
from tinymlir.ptx import PTXError, kernels
from tinymlir.vram import CUresult, Memory, Refused

CUdevice_attribute = IntEnum("CUdevice_attribute", {
    f"CU_DEVICE_ATTRIBUTE_{name}": code for name, code in {
        "MULTIPROCESSOR_COUNT": 16, "COMPUTE_CAPABILITY_MAJOR": 75,
        "COMPUTE_CAPABILITY_MINOR": 76, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97,
    }.items()})
CUstreamCaptureMode = IntEnum("CUstreamCaptureMode", {
    "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1})
CUjit_option = IntEnum("CUjit_option", {
    "CU_JIT_ERROR_LOG_BUFFER": 5, "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES": 6})
CUfunction_attribute = IntEnum("CUfunction_attribute", {
    "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8})
CUpointer_attribute = IntEnum("CUpointer_attribute", {
    "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL": 9})


# %% 09_cuda.md § The driver's functions (2)
FREE = {"cuInit", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceGetAttribute",
        "cuDriverGetVersion", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"}
CAPTURED = {"cuMemAlloc", "cuMemFree", "cuStreamSynchronize", "cuMemcpyDtoHAsync",
            "cuEventSynchronize"}  # what must not happen during a capture


FUNCTIONS: dict[str, Callable] = {}


def function(method: Callable) -> Callable:
    """Make this a function of the driver."""
    FUNCTIONS[method.__name__] = method
    return method


class StandIn:
    """What `cuda.bindings.driver` is, for a device made of NumPy.

    `fail` maps a function's name to (n, status): its n-th call returns that."""

    CUdevice_attribute, CUjit_option = CUdevice_attribute, CUjit_option
    CUstreamCaptureMode = CUstreamCaptureMode
    CUfunction_attribute = CUfunction_attribute
    CUpointer_attribute = CUpointer_attribute

    def __init__(self, capability: tuple[int, int] = (9, 0),
                 cuda: tuple[int, int] = (13, 0), memory: int = 1 << 30,
                 devices: int = 1, fail: dict[str, tuple[int, str]] | None = None
                 ) -> None:
        self.capability, self.cuda, self.devices = capability, cuda, devices
        self.memory, self.fail, self.calls = Memory(memory), fail or {}, {}
        self.lock, self.number = threading.RLock(), itertools.count(1)
        self.here = threading.local()  # the stack of contexts of each thread
        self.ready, self.broken = False, ""
        self.queue: list[Callable[[], None]] = []
        self.drawing: list[Callable[[], None]] | None = None
        self.handles: dict[int, Any] = {}
        self.clock = 0  # counts finished pieces of work

    def __getattr__(self, name: str) -> Callable:
        if name not in FUNCTIONS:
            raise AttributeError(name)
        return partial(self.enter, name)

    def enter(self, name: str, *args: Any) -> tuple:
        """What a function of the driver returns: the status, then its values."""
        with self.lock:
            self.calls[name] = self.calls.get(name, 0) + 1
            try:
                self.gate(name)
                made = FUNCTIONS[name](self, *args)
            except Refused as error:
                return error.status, None
            values = made if isinstance(made, tuple) else (made,)
            return CUresult.CUDA_SUCCESS, *(() if made is None else values)

    def gate(self, name: str) -> None:
        when, status = self.fail.get(name, (0, ""))
        if self.calls[name] == when:
            raise Refused(status)
        if self.broken:
            raise Refused(self.broken)
        if name != "cuInit" and not self.ready:
            raise Refused("NOT_INITIALIZED")
        if name not in FREE and not getattr(self.here, "stack", []):
            raise Refused("INVALID_CONTEXT")
        if name in CAPTURED and self.drawing is not None:
            self.drawing = None
            raise Refused("STREAM_CAPTURE_UNSUPPORTED")

    def handle(self, what: Any) -> int:
        number = next(self.number)
        self.handles[number] = what
        return number

    def known(self, handle: int, kind: type) -> Any:
        found = self.handles.get(handle)
        if not isinstance(found, kind):
            raise Refused("INVALID_HANDLE")
        return found

    def enqueue(self, work: Callable[[], None]) -> None:
        """Into the stream, or into the graph that is being drawn."""
        (self.queue if self.drawing is None else self.drawing).append(work)

    def drain(self) -> None:
        """Do what was asked for; a fault is for ever."""
        while self.queue:
            try:
                self.queue.pop(0)()
            except simt.Fault as error:
                self.fault, self.broken = error, "ILLEGAL_ADDRESS"
                self.queue.clear()
                raise Refused(self.broken) from None
            self.clock += 1


# %% 09_cuda.md § The driver's functions (3)
@function
def cuInit(d, flags):
    if not d.devices:
        raise Refused("NO_DEVICE")
    d.ready = True


@function
def cuDriverGetVersion(d):
    return d.cuda[0] * 1000 + d.cuda[1] * 10


@function
def cuDeviceGetCount(d):
    return d.devices


@function
def cuDeviceGetName(d, length, device):
    return b"stand-in".ljust(length, b"\0")


@function
def cuDeviceGetAttribute(d, attribute, device):
    return {75: d.capability[0], 76: d.capability[1], 16: 1,
            97: 99 << 10}[CUdevice_attribute(attribute)]


@function
def cuDevicePrimaryCtxRetain(d, device):
    if device >= d.devices:
        raise Refused("INVALID_DEVICE")
    return 1


@function
def cuCtxPushCurrent(d, context):
    d.here.stack = [*getattr(d.here, "stack", []), context]


@function
def cuCtxPopCurrent(d):
    return d.here.stack.pop()


@function
def cuMemAlloc(d, nbytes):
    return d.memory.alloc(nbytes)


@function
def cuMemFree(d, address):
    d.drain()
    d.memory.free(int(address))


@function
def cuMemGetInfo(d):
    total = len(d.memory.bytes)
    return total - sum(d.memory.blocks.values()), total


@function
def cuPointerGetAttribute(d, attribute, address):
    return d.memory.view(address, 1) is None or 0


# %% 09_cuda.md § The driver's functions (4)
@function
def cuStreamCreate(d, flags):
    return d.handle("stream")


@function
def cuStreamSynchronize(d, stream):
    d.known(int(stream), str)
    d.drain()


@function
def cuMemcpyHtoDAsync(d, target, source, nbytes, stream):
    data = np.frombuffer(ctypes.string_at(source, nbytes), np.uint8)
    room = d.memory.view(target, nbytes)
    d.enqueue(lambda: np.copyto(room, data))


@function
def cuMemcpyDtoDAsync(d, target, source, nbytes, stream):
    given, room = (d.memory.view(p, nbytes) for p in (source, target))
    d.enqueue(lambda: np.copyto(room, given))


@function
def cuMemcpyDtoHAsync(d, target, source, nbytes, stream):
    d.drain()
    ctypes.memmove(target, d.memory.view(source, nbytes).ctypes.data, nbytes)


@function
def cuStreamBeginCapture(d, stream, mode):
    d.known(int(stream), str)
    d.drawing = []


@function
def cuStreamEndCapture(d, stream):
    if d.drawing is None:
        raise Refused("STREAM_CAPTURE_INVALIDATED")
    drawn, d.drawing = d.drawing, None
    return d.handle(drawn)


@function
def cuGraphInstantiate(d, graph, flags):
    return d.handle(tuple(d.known(graph, list)))


@function
def cuGraphDestroy(d, graph):
    d.known(graph, list)
    del d.handles[graph]


@function
def cuGraphExecDestroy(d, graph):
    d.known(graph, tuple)
    del d.handles[graph]


@function
def cuGraphLaunch(d, graph, stream):
    for work in d.known(graph, tuple):
        d.enqueue(work)


@function
def cuEventCreate(d, flags):
    return d.handle([None])


@function
def cuEventRecord(d, event, stream):
    mark = d.known(event, list)
    d.enqueue(lambda: mark.__setitem__(0, d.clock))


@function
def cuEventSynchronize(d, event):
    d.drain()


@function
def cuEventElapsedTime(d, start, end):
    first, last = (d.known(e, list)[0] for e in (start, end))
    if first is None or last is None:
        raise Refused("NOT_READY")
    return float(last - first)


@function
def cuEventDestroy(d, event):
    d.known(event, list)
    del d.handles[event]


# %% 09_cuda.md § The driver's functions (5)
@function
def cuModuleLoadDataEx(d, image, count, options, values):
    text = ctypes.string_at(image).decode()
    target = re.search(r"^\.target (sm_\w+)", text, re.M)
    if not any(version_of(text)) or not target:
        log(values, "ptxas fatal: no version or no target")
    if cuda_for(version_of(text)) > d.cuda:
        raise Refused("UNSUPPORTED_PTX_VERSION")
    if number_of(target[1]) > d.capability:
        log(values, "ptxas fatal: SM version specified by .target is higher "
                         "than default SM version assumed")
    try:
        return d.handle(kernels(text))
    except PTXError as error:
        log(values, f"ptxas fatal: {error}")


def log(values, text):
    buffer, size = values
    raw = text.encode()[:size - 1] + b"\0"
    buffer[:len(raw)] = raw
    raise Refused("INVALID_PTX")


@function
def cuModuleUnload(d, module):
    d.known(module, dict)
    d.drain()
    del d.handles[module]


@function
def cuModuleGetFunction(d, module, name):
    found = d.known(module, dict).get(name.decode())
    if found is None:
        raise Refused("NOT_FOUND")
    return d.handle({"kernel": found, "shared": 48 << 10})


@function
def cuFuncSetAttribute(d, function, attribute, value):
    if value > 99 << 10:
        raise Refused("INVALID_VALUE")
    d.known(function, dict)["shared"] = value


@function
def cuLaunchKernel(d, function, *rest):
    *sizes, shared, stream, pointers, extra = rest
    found, grid, block = d.known(function, dict), sizes[:3], sizes[3:]
    kernel = found["kernel"]
    threads = block[0] * block[1] * block[2]
    room = found["shared"] - kernel.sizes.get("shared", 0)
    if (min(sizes) < 1 or threads > kernel.threads or shared > room
            or max(grid[1:]) > 65535):
        raise Refused("INVALID_VALUE")
    places = (ctypes.c_uint64 * len(kernel.params)).from_address(
        pointers or ctypes.addressof(ctypes.c_uint64()))
    params = {name: np.frombuffer(ctypes.string_at(at, size), f"u{size}")[0]
              for (name, size), at in zip(kernel.params.items(), places)}
    d.enqueue(lambda: simt.run(kernel, d.memory, grid, block, shared, params))
