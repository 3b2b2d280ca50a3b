# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § The driver's functions (1)
"""The memory of a device that is not there, and its statuses (chapter 9)."""
from __future__ import annotations

from enum import IntEnum

import numpy as np

from tinymlir.simt import Fault

CUresult = IntEnum("CUresult", {f"CUDA_ERROR_{name}" if code else name: code
                                for name, code in {
    "CUDA_SUCCESS": 0, "INVALID_VALUE": 1, "OUT_OF_MEMORY": 2, "NOT_INITIALIZED": 3,
    "NO_DEVICE": 100, "INVALID_DEVICE": 101, "INVALID_CONTEXT": 201,
    "INVALID_PTX": 218, "UNSUPPORTED_PTX_VERSION": 222, "INVALID_HANDLE": 400,
    "NOT_FOUND": 500, "NOT_READY": 600, "ILLEGAL_ADDRESS": 700,
    "STREAM_CAPTURE_UNSUPPORTED": 900, "STREAM_CAPTURE_INVALIDATED": 901,
}.items()})


# %% 09_cuda.md § The driver's functions (2)
class Refused(Exception):
    """A function returns this status instead of 0."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = CUresult[f"CUDA_ERROR_{status}"]


class Memory:
    """Device memory: addresses that mean nothing to the host."""

    BASE, ALIGN = 1 << 40, 256

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)  # the system gives it page by page
        self.blocks: dict[int, int] = {}  # start -> bytes, in order of the starts

    def alloc(self, nbytes: int) -> int:
        """The first gap that is large enough; one granule stays between two."""
        start, need = 0, -(-nbytes // self.ALIGN) * self.ALIGN + self.ALIGN
        for there, size in sorted(self.blocks.items()):
            if there - start >= need:
                break
            start = -(-(there + size) // self.ALIGN) * self.ALIGN + self.ALIGN
        if not nbytes or start + need > len(self.bytes):
            raise Refused("OUT_OF_MEMORY" if nbytes else "INVALID_VALUE")
        self.blocks[start] = nbytes
        self.bytes[start:start + nbytes] = 0xFF  # NaN, for who reads before writing
        self.index()
        return self.BASE + start

    def free(self, address: int) -> None:
        if self.blocks.pop(address - self.BASE, None) is None:
            raise Refused("INVALID_VALUE")
        self.index()

    def index(self) -> None:
        self.starts = np.array(sorted(self.blocks), np.int64)
        self.ends = self.starts + [self.blocks[s] for s in self.starts.tolist()]

    def places(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        """Where these addresses are. Raises Fault if one is in no block."""
        at = np.asarray(addresses, np.int64) - self.BASE
        low, high = int(at.min(initial=1 << 62)), int(at.max(initial=0))
        block = int(np.searchsorted(self.starts, low, "right")) - 1
        if block >= 0 and high + nbytes <= self.ends[block]:
            return at
        blocks = np.searchsorted(self.starts, at, "right") - 1
        if np.any(blocks < 0) or np.any(at + nbytes > self.ends[blocks]):
            raise Fault("an address outside of every allocation")
        return at

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """A range of bytes. Raises Refused if it is in no block."""
        try:
            start = int(self.places(np.array(int(address)), nbytes))
        except (Fault, IndexError):
            raise Refused("INVALID_VALUE") from None
        return self.bytes[start:start + nbytes]
