# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § One function for every call (1)
"""NVIDIA's driver, one call at a time (chapter 9)."""
from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from tinymlir.errors import TinymlirError


class DeviceError(TinymlirError, RuntimeError):
    """A GPU that is missing, too old or broken, or a part of its software."""

    status = ""  # what the driver said, after CUDA_ERROR_


class DeviceMemoryError(DeviceError, MemoryError):
    """An array that does not fit into the memory of the device."""


def bindings() -> Any:
    """The module of NVIDIA's functions. Raises DeviceError if there is none."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise DeviceError("no GPU: the package cuda-bindings is not installed; "
                          "`pip install tinymlir[gpu]` brings it") from None
    return driver


# %% 09_cuda.md § One function for every call (2)
UPDATE = "update the NVIDIA driver"
REASONS = {  # status of the driver, after CUDA_ERROR_ -> what to say
    "NO_DEVICE": "no GPU: the driver sees no device; "
                 "CUDA_VISIBLE_DEVICES may hide it",
    "DEVICE_UNAVAILABLE": "the GPU is used by another process, and by it alone",
    "SYSTEM_DRIVER_MISMATCH": "the two halves of the driver differ in version; "
                              "restart the machine",
    "COMPAT_NOT_SUPPORTED_ON_DEVICE": f"the driver is too old; {UPDATE}",
    "LAUNCH_OUT_OF_RESOURCES": "a kernel needs more registers than a block has",
    "JIT_COMPILER_NOT_FOUND": "the driver has no PTX compiler (the library "
                              "libnvidia-ptxjitcompiler); install all of it",
}
STICKY = {
    "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "HARDWARE_STACK_ERROR", "ASSERT",
    "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE",
    "INVALID_PC", "LAUNCH_FAILED", "ECC_UNCORRECTABLE"}
FORKED = ("this process was forked after the GPU was used, and CUDA does not allow "
          "that; start it with multiprocessing's method `spawn`")


# %% 09_cuda.md § One function for every call (3)
class Driver:
    """The driver's functions by name; their status becomes an exception."""

    def __init__(self, api: Any) -> None:
        """Raises DeviceError if there is no driver, or no device."""
        self.api, self.pid, self.broken = api, os.getpid(), ""
        self.call("cuInit", 0)
        if not self.call("cuDeviceGetCount"):
            raise DeviceError(REASONS["NO_DEVICE"])

    def call(self, name: str, *args: Any) -> Any:
        """What a function of the driver returns. Raises DeviceError."""
        if os.getpid() != self.pid:
            raise DeviceError(FORKED)
        if self.broken:
            raise DeviceError(self.broken)
        try:
            status, *values = getattr(self.api, name)(*args)
        except RuntimeError as error:
            self.missing(name, error)
        if status:
            self.refuse(name, status.name.removeprefix("CUDA_ERROR_"))
        return values[0] if len(values) == 1 else values

    def missing(self, name: str, error: Exception) -> NoReturn:
        """The package has found no driver, or no such function in it."""
        if name == "cuInit":
            raise DeviceError("no GPU: there is no NVIDIA driver on this machine "
                              "(libcuda was not found)") from None
        raise DeviceError(f"the driver has no {name}; {UPDATE}") from error

    def refuse(self, name: str, status: str) -> NoReturn:
        words = REASONS.get(status, status.lower().replace("_", " "))
        if status not in STICKY:
            error = DeviceError(words if status in REASONS else f"{name}: {words}")
            error.status = status
            raise error
        self.broken = (f"a kernel has failed ({words}), and the driver takes no "
                       f"more work from this process; start it again")
        raise DeviceError(f"{self.broken} (noticed by {name}, which is innocent)")


# %% 09_cuda.md § One function for every call (4)
@dataclass(frozen=True)
class Properties:
    """What a program has to know of a device."""

    name: str
    capability: tuple[int, int]  # (9, 0) for sm_90
    cuda: tuple[int, int]  # what the driver supports, (13, 0) say
    processors: int
    shared: int  # bytes of shared memory that a block may ask for

    @property
    def chip(self) -> str:
        return "sm_{}{}".format(*self.capability)


def properties(driver: Driver, number: int) -> Properties:
    """Of a device, by its number."""
    names = driver.api.CUdevice_attribute

    def ask(name: str) -> int:
        attribute = getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}")
        return driver.call("cuDeviceGetAttribute", attribute, number)

    name = driver.call("cuDeviceGetName", 96, number).partition(b"\0")[0].decode()
    version = driver.call("cuDriverGetVersion")
    capability = ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")
    return Properties(
        name, capability, (version // 1000, version % 1000 // 10),
        ask("MULTIPROCESSOR_COUNT"), ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"))


# %% 09_cuda.md § A stream (1)
class Stream:
    """A queue of work for the device."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.handle = driver.call("cuStreamCreate", 1)  # waits for no other stream

    def call(self, name: str, *args: Any) -> Any:
        return self.driver.call(name, *args, self.handle)

    def copy_in(self, target: int, source: int, nbytes: int) -> None:
        """Bytes from the host to the device."""
        self.call("cuMemcpyHtoDAsync", target, source, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Bytes from one place on the device to another."""
        self.call("cuMemcpyDtoDAsync", target, source, nbytes)

    def copy_out(self, target: int, source: int, nbytes: int) -> None:
        """Bytes from the device to the host; waits for all work before."""
        self.call("cuMemcpyDtoHAsync", target, source, nbytes)
        self.wait()

    def wait(self) -> None:
        """Until all work is done. Its errors, too, come up here."""
        self.call("cuStreamSynchronize")

    def launch(self, function: Any, grid: Sequence[int], block: Sequence[int],
               shared: int, pointers: int) -> None:
        """Run a kernel; `pointers` is where the addresses of its arguments are."""
        self.driver.call("cuLaunchKernel", function, *grid, *block, shared,
                         self.handle, pointers, 0)


# %% 09_cuda.md § A stream (2)
class Recording:
    """`with Recording(stream) as r: ...` captures work; `r.graph` can run it.

    If an exception leaves the block, the capture is ended and thrown away."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.graph = stream, None

    def __enter__(self) -> Recording:
        driver = self.stream.driver
        modes = driver.api.CUstreamCaptureMode  # other threads may go on as usual
        driver.call("cuStreamBeginCapture", self.stream.handle,
                    modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        driver = self.stream.driver
        if kind is not None:
            with suppress(DeviceError):
                drawn = driver.call("cuStreamEndCapture", self.stream.handle)
                driver.call("cuGraphDestroy", drawn)
            return
        drawn = driver.call("cuStreamEndCapture", self.stream.handle)
        try:
            self.graph = driver.call("cuGraphInstantiate", drawn, 0)
        finally:
            driver.call("cuGraphDestroy", drawn)


# %% 09_cuda.md § A stream (3)
class Mark:
    """A mark in a stream; `later - earlier` is the time between in milliseconds."""

    def __init__(self, stream: Stream) -> None:
        self.driver = stream.driver
        self.handle = self.driver.call("cuEventCreate", 0)
        try:
            self.driver.call("cuEventRecord", self.handle, stream.handle)
        except DeviceError:
            self.forget()
            raise

    def __sub__(self, earlier: Mark) -> float:
        self.driver.call("cuEventSynchronize", self.handle)
        return self.driver.call("cuEventElapsedTime", earlier.handle, self.handle)

    def forget(self) -> None:
        self.driver.call("cuEventDestroy", self.handle)


# %% 09_cuda.md § Kernels (1)
VERSION = re.compile(r"^\.version (\d+)\.(\d+)", re.MULTILINE)
CUDA_OF = {  # version of PTX -> the first CUDA that reads it
    (8, 0): (12, 0), (8, 1): (12, 1), (8, 2): (12, 2), (8, 3): (12, 3),
    (8, 4): (12, 4), (8, 5): (12, 5), (8, 6): (12, 7), (8, 7): (12, 8),
    (8, 8): (12, 9), (9, 0): (13, 0), (9, 1): (13, 1)}


def number_of(chip: str) -> tuple[int, int]:
    """(9, 0) for "sm_90" and "sm_90a"."""
    digits = re.fullmatch(r"sm_(\d+)(\d)[af]?", chip)
    if digits is None:
        raise DeviceError(f"chip {chip!r}: expected a name such as sm_90")
    return int(digits[1]), int(digits[2])


def check_chip(chip: str, device: Properties) -> None:
    """Raises DeviceError if the device cannot run code for this chip."""
    exact = chip[-1] in "af"  # uses what only this very chip has
    wrong = (number_of(chip) != device.capability if exact
             else number_of(chip) > device.capability)
    if wrong:
        raise DeviceError(f"the kernels are for {chip}, and {device.name} is "
                          f"{device.chip}; compile them with --chip {device.chip}")


# %% 09_cuda.md § Kernels (2)
def version_of(ptx: str) -> tuple[int, int]:
    """Of the language, as the text says."""
    found = VERSION.search(ptx)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def cuda_for(version: tuple[int, int]) -> tuple[int, int]:
    """The first CUDA that reads this PTX; what we do not know is too new or old."""
    return CUDA_OF.get(version, version if version > max(CUDA_OF) else (0, 0))


def check_version(ptx: str, device: Properties) -> None:
    """Raises DeviceError if the driver is older than the PTX."""
    version = version_of(ptx)
    needed = cuda_for(version)
    if needed > device.cuda:
        words = ("the kernels are PTX {}.{}, which needs CUDA {}.{}, and the "
                 "driver is of CUDA {}.{}; ")
        raise DeviceError(words.format(*version, *needed, *device.cuda) + UPDATE)


class Module:
    """The kernels of a PTX text, on the device."""

    def __init__(self, driver: Driver, ptx: str) -> None:
        """Raises DeviceError, with what the driver's compiler says."""
        self.driver, options, log = driver, driver.api.CUjit_option, bytearray(2000)
        keys = [options.CU_JIT_ERROR_LOG_BUFFER,
                options.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        text = ctypes.create_string_buffer(ptx.encode())
        try:
            self.handle = driver.call("cuModuleLoadDataEx", ctypes.addressof(text),
                                      2, keys, [log, len(log)])
        except DeviceError as error:
            said = log.partition(b"\0")[0].decode(errors="replace")
            told = " ".join(said.split())
            raise DeviceError(f"{error}; {told}" if told else str(error)) from None

    def function(self, name: str, shared: int) -> Any:
        """A kernel, allowed to use so many bytes of dynamic shared memory."""
        found = self.driver.call("cuModuleGetFunction", self.handle, name.encode())
        names = self.driver.api.CUfunction_attribute
        if shared > 48 << 10:  # more than this has to be asked for
            self.driver.call(
                "cuFuncSetAttribute", found,
                names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        return found
