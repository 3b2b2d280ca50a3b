# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § The plan (1)
"""What a GPU program needs at run time, as data (chapter 8).

Nothing here imports MLIR: a plan is made on one machine and run on another."""
from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass

RULES: list[str] = []  # modules of later chapters with more kernels
ALIGNMENT = 256  # bytes: where buffers and temporary arrays may start
BYTES = {"f32": 4, "f64": 8, "i32": 4, "i64": 8, "i8": 1}  # of MLIR's types


@dataclass(frozen=True)
class Buffer:
    """A piece of device memory that starts at a multiple of ALIGNMENT."""

    nbytes: int
    kind: str  # "argument", "result", "constant" or "scratch"
    index: int  # among those of its kind


@dataclass(frozen=True)
class Pointer:
    """A place in device memory: a byte of a buffer."""

    buffer: int
    offset: int = 0


# %% 08_gpu.md § The plan (2)
@dataclass(frozen=True)
class Launch:
    """One run of a kernel: grid x block threads, all with the same arguments."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int  # bytes of dynamic shared memory, for each block
    arguments: tuple[Pointer, ...]


@dataclass(frozen=True)
class Copy:
    """Bytes from one place in device memory to another."""

    source: Pointer
    target: Pointer
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """A compiled program: its kernels and how to launch them."""

    chip: str  # the oldest chip that can run it, such as "sm_80"
    ptx: str  # every kernel; empty if there is none
    buffers: tuple[Buffer, ...]
    constants: tuple[bytes, ...]
    steps: tuple[Launch | Copy, ...]

    def of_kind(self, kind: str) -> list[int]:
        """The numbers of the buffers of a kind, in the order of their index."""
        found = [i for i, b in enumerate(self.buffers) if b.kind == kind]
        return sorted(found, key=lambda i: self.buffers[i].index)

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(s for s in self.steps if isinstance(s, Launch))

    def to_json(self) -> str:
        """Text that `from_json` reads back."""
        data = asdict(self)
        data["constants"] = [base64.b64encode(c).decode() for c in self.constants]
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        data = json.loads(text)
        buffers = tuple(Buffer(**b) for b in data["buffers"])
        constants = tuple(base64.b64decode(c) for c in data["constants"])
        steps = tuple(map(step_of, data["steps"]))
        return cls(data["chip"], data["ptx"], buffers, constants, steps)


# %% 08_gpu.md § The plan (3)
def step_of(data: dict) -> Launch | Copy:
    """A step from its JSON."""
    if "kernel" not in data:
        return Copy(Pointer(**data["source"]), Pointer(**data["target"]),
                    data["nbytes"])
    return Launch(data["kernel"], tuple(data["grid"]), tuple(data["block"]),
                  data["shared"], tuple(Pointer(**p) for p in data["arguments"]))
