# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § Arrays that stay (1)
"""Arrays in the memory of a GPU, ours and those of others (chapter 9)."""
from __future__ import annotations

import ctypes
import math
import operator
import sys
from typing import Any

import numpy as np

from tinymlir import compiler
from tinymlir.device import CLEANERS, Device, device, upload
from tinymlir.driver import DeviceError
from tinymlir.errors import (
    ArgumentError, DTypeError, UnsupportedError)
from tinymlir.expr import supported


# %% 09_cuda.md § Arrays that stay (2)
class DeviceArray:
    """An array on the GPU, row after row. Only a call that it is given away to
    changes its contents (chapter 10); `owner` keeps the memory alive."""

    __array_ufunc__ = None  # NumPy's functions refuse it

    def __init__(self, home: Device, address: int, shape: tuple[int, ...],
                 dtype: np.dtype, owner: Any, writeable: bool = True) -> None:
        self.device, self.address, self.owner = home, address, owner
        self.shape, self.dtype, self.writeable = shape, dtype, writeable

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    nbytes = property(lambda self: self.size * self.dtype.itemsize)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype})"

    def __len__(self) -> int:
        if not self.shape:
            raise ArgumentError("len() of an array without axes")
        return self.shape[0]

    def refuse(self, *other: Any) -> None:
        """What would need the numbers. Raises UnsupportedError."""
        raise UnsupportedError("an array on the GPU cannot be compared or asked "
                               "for its truth; take x.numpy()")

    __bool__ = __eq__ = __ne__ = refuse
    __hash__ = object.__hash__

    def numpy(self) -> np.ndarray:
        """A copy on the host; waits until the array is computed."""
        made = np.empty(self.shape, self.dtype)
        if made.size:
            with self.device.current():
                self.device.stream.copy_out(
                    made.ctypes.data, self.address, made.nbytes)
        return made

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ArgumentError("an array on the GPU cannot become a NumPy array "
                                "without a copy")
        made = self.numpy()
        return made if dtype is None else made.astype(dtype)

    def __array_function__(self, function, types, args, keywords):
        return NotImplemented

    def __getitem__(self, key: Any) -> DeviceArray:
        """Rows that lie side by side: `x[a:b]`, the same memory."""
        if not isinstance(key, slice) or key.step not in (None, 1):
            raise UnsupportedError("an array on the GPU has only slices of rows, "
                                   "x[a:b]; fetch it with np.asarray(x) first")
        start, stop, _ = key.indices(len(self))
        row = self.nbytes // max(len(self), 1)
        shape = (max(stop - start, 0), *self.shape[1:])
        return DeviceArray(self.device, self.address + start * row, shape,
                           self.dtype, self.owner, self.writeable)


# %% 09_cuda.md § Arrays that stay (3)
def put(array: Any) -> DeviceArray:
    """A host array, copied to the GPU.

    Raises DTypeError, UnsupportedError or DeviceError."""
    if isinstance(array, DeviceArray):
        return array
    given = array if isinstance(array, np.ndarray) else np.asarray(array)
    plain = compiler.take(given, "array")
    home = device()
    with home.current():
        memory = upload(home, plain)
    return DeviceArray(home, memory.address, given.shape, plain.dtype, memory)


# %% 09_cuda.md § Arrays of others (1)
def lend(array: DeviceArray) -> dict[str, Any]:
    """The description of an array that is computed."""
    with array.device.current():
        array.device.stream.wait()
    return {"shape": array.shape, "typestr": array.dtype.str, "strides": None,
            "data": (array.address if array.size else 0, True), "version": 3,
            "stream": None}


DeviceArray.__cuda_array_interface__ = property(lend)


# %% 09_cuda.md § Arrays of others (2)
def described(array: Any, path: str) -> dict[str, Any]:
    """What an array says about itself. Raises ArgumentError for nonsense."""
    try:
        told = array.__cuda_array_interface__
    except AttributeError:  # PyTorch's tensors have it, but those on the host lie
        raise ArgumentError(f"{path}: this {type(array).__name__} is not on the "
                            f"GPU; pass it as a NumPy array") from None
    try:
        shape = tuple(map(operator.index, told["shape"]))
        address, fixed = told["data"]
        address, kind = operator.index(address or 0), np.dtype(told["typestr"])
        stream, strides = told.get("stream"), told.get("strides")
        if strides is not None:
            strides = tuple(map(operator.index, strides))
        if stream is not None and operator.index(stream) == 0:
            raise ValueError("stream 0 is ambiguous")
        if min(shape, default=0) < 0 or len(strides or shape) != len(shape):
            raise ValueError(f"shape {shape}, strides {strides}")
    except (LookupError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ArgumentError(f"{path}: its __cuda_array_interface__ cannot be "
                            f"understood ({why})") from None
    return dict(shape=shape, address=address, fixed=fixed, strides=strides,
                stream=stream, kind=kind, mask=told.get("mask"))


def borrow(array: Any, path: str = "array") -> DeviceArray:
    """Another library's array on the GPU, without a copy.

    Raises ArgumentError, DTypeError, UnsupportedError or DeviceError."""
    told = described(array, path)
    shape, address, kind = told["shape"], told["address"], told["kind"]
    try:
        dtype = supported(kind)
    except DTypeError as error:
        raise DTypeError(f"{path}: {error}") from None
    if kind != dtype:
        raise DTypeError(f"{path}: the bytes are in another order than the GPU's")
    if told["mask"] is not None or not side_by_side(told["strides"], shape, dtype):
        raise UnsupportedError(f"{path}: expected an array whose rows lie side by "
                               f"side; make a contiguous copy of it first")
    home = device()
    found = DeviceArray(home, address, shape, dtype, array, not told["fixed"])
    with home.current():
        check_home(found, path)
        if told["stream"] is not None:
            home.driver.call("cuStreamSynchronize", told["stream"])
    return found


# %% 09_cuda.md § Arrays of others (3)
def row_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next along each axis."""
    return tuple(itemsize * math.prod(shape[i + 1:]) for i in range(len(shape)))


def side_by_side(strides: tuple[int, ...] | None, shape: tuple[int, ...],
                 dtype: np.dtype) -> bool:
    """Is there no gap? Where there is one element, a stride means nothing."""
    ours = row_strides(shape, dtype.itemsize)
    return strides is None or not math.prod(shape) or all(
        n == 1 or a == b for n, a, b in zip(shape, strides, ours))


def check_home(array: DeviceArray, path: str) -> None:
    """Raises DeviceError unless its first byte and its last are on our device."""
    home, start = array.device, array.address
    if array.size and start % array.dtype.itemsize:
        raise DeviceError(f"{path}: its address is not a multiple of "
                          f"{array.dtype.itemsize} bytes")
    ends = (start, start + array.nbytes - 1) if array.size else ()
    if any(number_at(home, end) != home.number for end in ends):
        raise DeviceError(f"{path}: its memory is not that of GPU {home.number}, "
                          f"which runs the kernels, or not all of it is")


def number_at(home: Device, address: int) -> int | None:
    """Whose memory it is: the number of a device; None if it is no device's."""
    if not 0 <= address < 1 << 64:
        return None
    kind = home.driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    try:
        return home.driver.call("cuPointerGetAttribute", kind, address)
    except DeviceError:
        return None


# %% 09_cuda.md § Arrays of others (4)
class Tensor(ctypes.Structure):
    """DLManagedTensor of the specification, field by field."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p)]


CUDA, NAME, USED = 2, b"dltensor", b"used_dltensor"
CODES = {"i": 0, "u": 1, "f": 2, "b": 6}  # kind of a dtype -> DLPack's code
KINDS = {code: kind for kind, code in CODES.items()}
capsules = ctypes.pythonapi
capsule, address, name = ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p
for word, result, *given in (
        ("New", capsule, address, name, address),
        ("GetPointer", address, capsule, name),
        ("IsValid", ctypes.c_int, capsule, name),
        ("SetName", ctypes.c_int, capsule, name)):
    function = getattr(capsules, f"PyCapsule_{word}")
    function.restype, function.argtypes = result, given


# %% 09_cuda.md § Arrays of others (5)
lent: dict[int, tuple[Any, ...]] = {}  # address of a Tensor -> what it needs
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@DELETER
def delete(address: int) -> None:
    lent.pop(address, None)


def holders(entry: tuple[Any, ...]) -> int:
    """How many refer to the capsule that an entry begins with."""
    return sys.getrefcount(entry[0])


ALONE = holders((object(),))  # nobody but the entry


def sweep() -> None:
    """Forget the tensors that nobody has taken, and nobody can take any more."""
    for place, entry in list(lent.items()):
        if holders(entry) <= ALONE and capsules.PyCapsule_IsValid(entry[0], NAME):
            lent.pop(place, None)


CLEANERS.append(sweep)


def check_request(stream: Any, dl_device: Any, copy: bool | None, number: int
                  ) -> None:
    """Raises TypeError or BufferError, as the specification says."""
    if stream is not None and type(stream) is not int:
        raise ArgumentError(f"stream: expected an int or None, got {stream!r}")
    if stream is not None and (stream == 0 or stream < -1):
        raise BufferError(f"stream {stream} means nothing for CUDA")
    if copy or dl_device not in (None, (CUDA, number)):
        raise BufferError("an array on the GPU is lent where it is, without a "
                          "copy; x.numpy() is a copy on the host")


def dlpack(array: DeviceArray, *, stream: Any = None, max_version: Any = None,
           dl_device: Any = None, copy: bool | None = None) -> Any:
    """A capsule; the array is computed, so no stream has to wait for it.

    Raises ArgumentError or BufferError for what cannot be lent in that way."""
    check_request(stream, dl_device, copy, array.device.number)
    address = lend(array)["data"][0]
    n, itemsize = array.ndim, array.dtype.itemsize
    steps = [step // itemsize for step in row_strides(array.shape, itemsize)]
    numbers = ctypes.c_int64 * n
    shape, strides = numbers(*array.shape), numbers(*steps)
    tensor = Tensor(address or None, CUDA, array.device.number, n,
                    CODES[array.dtype.kind], itemsize * 8, 1, shape, strides, 0,
                    None, ctypes.cast(delete, ctypes.c_void_p))
    place = ctypes.addressof(tensor)
    capsule = capsules.PyCapsule_New(place, NAME, None)
    lent[place] = capsule, array, tensor, shape, strides
    return capsule


DeviceArray.__dlpack__ = dlpack
DeviceArray.__dlpack_device__ = lambda self: (CUDA, self.device.number)


# %% 09_cuda.md § Arrays of others (6)
class Loan:
    """A tensor that was taken out of a capsule; its lender hears of the end."""

    def __init__(self, place: int) -> None:
        self.place, self.tensor = place, Tensor.from_address(place)

    def __del__(self) -> None:
        if self.tensor.deleter:
            DELETER(self.tensor.deleter)(self.place)


def from_dlpack(array: Any, path: str = "array") -> DeviceArray:
    """Another library's array on the GPU, without a copy.

    Raises DTypeError, UnsupportedError or DeviceError."""
    home = device()
    if tuple(array.__dlpack_device__()) != (CUDA, home.number):
        raise DeviceError(f"{path}: its memory is not that of GPU {home.number}")
    capsule = array.__dlpack__(stream=int(home.stream.handle))
    loan = Loan(capsules.PyCapsule_GetPointer(capsule, NAME))
    capsules.PyCapsule_SetName(capsule, USED)
    t = loan.tensor
    shape = tuple(t.shape[:t.ndim])
    dtype = supported(np.dtype(f"{KINDS.get(t.code, 'V')}{t.bits // 8}"))
    steps = t.strides and tuple(dtype.itemsize * n for n in t.strides[:t.ndim])
    if t.lanes != 1 or not side_by_side(steps or None, shape, dtype):
        raise UnsupportedError(f"{path}: expected an array whose rows lie side by "
                               f"side; make a contiguous copy of it first")
    return DeviceArray(home, (t.data or 0) + t.byte_offset, shape, dtype, loan)
