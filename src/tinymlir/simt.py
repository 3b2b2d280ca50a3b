# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § Threads that part (1)
"""PTX executed by NumPy: one array for each register (chapter 9)."""
from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tinymlir.ptx import Instruction, Kernel, PTXError
from tinymlir.ptxops import COMPUTE, TYPES, WIDER, compare, convert


class Fault(Exception):
    """What a GPU calls a sticky error."""


# %% 09_cuda.md § Threads that part (2)
CHUNK = 1 << 14  # threads that are simulated at once


class Threads:
    """A number of blocks of a launch, all their threads side by side."""

    def __init__(self, kernel: Kernel, memory: Any, blocks: np.ndarray,
                 grid: Sequence[int], block: Sequence[int], shared: int,
                 params: dict[str, Any]) -> None:
        self.kernel, self.memory, self.params = kernel, memory, params
        per = block[0] * block[1] * block[2]
        self.count, self.per = len(blocks) * per, per
        tid = np.tile(np.arange(per, dtype="u4"), len(blocks))
        self.block = np.repeat(np.arange(len(blocks)), per)
        ctaid = np.repeat(blocks.astype("u4"), per)
        self.tid = tid
        self.special = {"%laneid": tid % 32, "%warpid": tid // 32}
        for flat, extent, where, size in ((tid, block, "%tid", "%ntid"),
                                          (ctaid, grid, "%ctaid", "%nctaid")):
            places = (flat % extent[0], flat // extent[0] % extent[1],
                      flat // (extent[0] * extent[1]))
            for axis, place, n in zip("xyz", places, extent):
                self.special[f"{where}.{axis}"] = place.astype("u4")
                self.special[f"{size}.{axis}"] = np.uint32(n)
        self.sizes = {"shared": kernel.sizes.get("shared", 0) + shared,
                      "local": kernel.sizes.get("local", 0)}
        owners = {"shared": len(blocks), "local": self.count}
        self.own = {space: np.zeros(owners[space] * size + 16, np.uint8)
                    for space, size in self.sizes.items()}
        self.registers: dict[str, Any] = {}
        self.lanes: Any = slice(None)  # those that are running

    def run(self) -> None:
        """All threads, from the first instruction to the last."""
        ready, waiting = {0: np.arange(self.count)}, {}
        while ready or waiting:
            if not ready:  # all have come to the barrier
                if len(waiting) > 1:
                    raise Fault("threads of a block wait at different barriers")
                ready, waiting = waiting, {}
            at = min(ready)
            self.go(at, ready.pop(at), ready, waiting)

    def go(self, at: int, lanes: np.ndarray, ready: dict, waiting: dict) -> None:
        """Run a group until it ends, parts, waits or meets another."""
        everybody = len(lanes) == self.count
        self.lanes = slice(None) if everybody else lanes
        while at < len(self.kernel.code) and at not in ready:
            ins = self.kernel.code[at]
            at += 1
            if ins.name[0] in ("bra", "brx", "ret", "exit"):
                self.part(ins, at, lanes, ready)
                return
            if ins.name[0] in ("bar", "barrier") and "warp" not in ins.name:
                join(waiting, at, lanes)
                return
            self.step(ins, lanes)
        if at < len(self.kernel.code):
            join(ready, at, lanes)

    def part(self, ins: Instruction, at: int, lanes: np.ndarray, ready: dict
             ) -> None:
        """A branch or an end; those who do not obey the guard go on at `at`."""
        taken = self.who(ins, lanes)
        gone = lanes if taken is None else lanes[taken]
        rest = lanes[:0] if taken is None else lanes[~taken]
        if ins.name[0] in ("bra", "brx"):
            for label, some in self.targets(ins, lanes, gone):
                join(ready, self.kernel.labels[label], some)
        if len(rest):
            join(ready, at, rest)

    def targets(self, ins: Instruction, lanes: np.ndarray, gone: np.ndarray
                ) -> Iterator[tuple[str, np.ndarray]]:
        """The labels of a branch, each with the threads that go there."""
        if ins.name[0] == "bra":
            yield from [(ins.operands[0], gone)] if len(gone) else []
            return
        which = self.read(ins.operands[0], TYPES["u32"])
        which = np.broadcast_to(which, len(lanes))[np.isin(lanes, gone)]
        for i in np.unique(which):
            yield self.kernel.tables[ins.operands[1]][i], gone[which == i]

    def who(self, ins: Instruction, lanes: np.ndarray) -> np.ndarray | None:
        """Which of the running threads obey the guard; None is all of them."""
        if not ins.guard:
            return None
        told = np.broadcast_to(self.read(ins.guard, TYPES["pred"]), len(lanes))
        return told ^ ins.negated

    def step(self, ins: Instruction, lanes: np.ndarray) -> None:
        """One instruction that is no branch."""
        before, taken = self.lanes, self.who(ins, lanes)
        if taken is not None and not taken.any():
            return
        if taken is not None and not taken.all():
            self.lanes = lanes[taken]
        EXECUTE.get(ins.name[0], compute)(self, ins)
        self.lanes = before

    def read(self, operand: str, dtype: np.dtype) -> Any:
        """An operand, as that type, in the running threads."""
        if operand in self.special:
            value = self.special[operand]
        elif operand in self.registers:
            value = self.registers[operand]
        else:
            return self.literal(operand, dtype)
        if dtype != value.dtype and dtype.itemsize != value.dtype.itemsize:
            value = value.astype(f"u{dtype.itemsize}")  # a part of a register
        value = value.view(dtype)
        return value[self.lanes] if value.ndim else value

    def literal(self, text: str, dtype: np.dtype) -> Any:
        if text in self.kernel.arrays:
            return dtype.type(self.kernel.arrays[text][1])
        if text[:2] in ("0f", "0d", "0F", "0D"):
            size = "I" if text[1] in "fF" else "Q"
            raw = struct.pack(f"<{size}", int(text[2:], 16))
            return np.frombuffer(raw, "f4" if size == "I" else "f8")[0].view(dtype)
        value = int(text.rstrip("U"), 0)
        bits = value & (1 << dtype.itemsize * 8) - 1
        return np.array(bits, f"u{dtype.itemsize}").view(dtype)[()]

    def write(self, register: str, value: Any) -> None:
        """Into the running threads."""
        value = np.asarray(value)
        if value.dtype.kind != "b":
            value = value.view(f"u{value.dtype.itemsize}")
        if isinstance(self.lanes, slice):
            self.registers[register] = value
            return
        old = self.registers.get(register, np.zeros((), value.dtype))
        if old.dtype != value.dtype:
            old = np.zeros((), value.dtype)
        new = np.array(np.broadcast_to(old, self.count))
        new[self.lanes] = value
        self.registers[register] = new


def join(groups: dict[int, np.ndarray], at: int, lanes: np.ndarray) -> None:
    """Threads come to a place where others may be."""
    there = groups.get(at)
    groups[at] = lanes if there is None else np.sort(np.concatenate([there, lanes]))


# %% 09_cuda.md § Threads that part (3)
def types_of(ins: Instruction, count: int) -> list[np.dtype]:
    """The types of an instruction's source operands."""
    name = ins.name
    own = TYPES["f32" if name[-1] == "tf32" else name[-1]]
    kinds = [own] * count
    if name[0] in ("shl", "shr", "bfe"):
        kinds[1:] = [TYPES["u32"]] * (count - 1)
    if name[0] == "selp":
        kinds[2] = TYPES["pred"]
    if name[0] == "mad" and "wide" in name:
        kinds[2] = TYPES[WIDER[name[-1]]]
    return kinds


def compute(threads: Threads, ins: Instruction) -> None:
    """An instruction that computes one register from others."""
    if ins.name[0] not in COMPUTE:
        raise PTXError(f"unknown instruction {'.'.join(ins.name)}")
    target, *sources = ins.operands
    kinds = types_of(ins, len(sources))
    values = [threads.read(s, kind) for s, kind in zip(sources, kinds)]
    made = COMPUTE[ins.name[0]](*values, ins.name)
    if "sat" in ins.name:
        made = np.fmin(np.fmax(made, 0), 1).astype(made.dtype)
    threads.write(target, made)


def move(threads: Threads, ins: Instruction) -> None:
    """`mov`, also between a register and the halves of it."""
    target, source = ins.operands
    kind = TYPES[ins.name[-1]]
    many = parts(target if target[0] == "{" else source)
    whole = np.dtype(f"u{kind.itemsize}")
    half = np.dtype(f"u{kind.itemsize // len(many)}")
    places = [whole.type(8 * half.itemsize * i) for i in range(len(many))]
    if target[0] == "{":
        value = threads.read(source, whole)
        for name, at in zip(many, places):
            threads.write(name, (value >> at).astype(half))
    elif source[0] == "{":
        values = [threads.read(name, half).astype(whole) << at
                  for name, at in zip(many, places)]
        threads.write(target, np.bitwise_or.reduce(np.broadcast_arrays(*values)))
    else:
        threads.write(target, threads.read(source, kind))


def parts(operand: str) -> list[str]:
    """The registers of `{a, b}`, or of a single one."""
    return [name.strip() for name in operand.strip("{}").split(",")]


JOIN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def set_predicate(threads: Threads, ins: Instruction) -> None:
    """`setp.how.type p, a, b` and `setp.how.and.type p, a, b, q`"""
    target, a, b, *more = ins.operands
    kind = TYPES[ins.name[-1]]
    made = compare(ins.name[1], threads.read(a, kind), threads.read(b, kind))
    if more:
        other = threads.read(more[0].lstrip("!"), TYPES["pred"])
        made = JOIN[ins.name[2]](made, other ^ (more[0][0] == "!"))
    first, _, second = target.partition("|")
    threads.write(first, np.asarray(made, bool))
    if second:
        threads.write(second, ~np.asarray(made, bool))


def convert_register(threads: Threads, ins: Instruction) -> None:
    target, source = ins.operands
    given = threads.read(source, TYPES[ins.name[-1]])
    threads.write(target, convert(given, ins.name))


# %% 09_cuda.md § Threads that part (4)
SPACES = ("global", "shared", "local")
PLACE = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]")


def place(threads: Threads, ins: Instruction, operand: str, nbytes: int
          ) -> tuple[np.ndarray, Any]:
    """The memory, and where in it each running thread looks."""
    base, offset = PLACE.fullmatch(operand).groups()
    space = next((s for s in SPACES if s in ins.name), "global")
    local = space != "global"
    # a shared address may be held in 32 bits or in 64
    held = threads.registers[base].dtype if base[0] == "%" else TYPES["u64"]
    at = threads.read(base, held).astype("i8") + int(offset or 0)
    if np.any(at % nbytes):
        raise Fault("misaligned address")
    if not local:
        return threads.memory.bytes, threads.memory.places(at, nbytes)
    size = threads.sizes[space]
    if np.any((at < 0) | (at + nbytes > size)):
        raise Fault(f"an address outside of the {size} bytes of {space} memory")
    owner = threads.block if space == "shared" else np.arange(threads.count)
    return threads.own[space], at + owner[threads.lanes] * size


def load(threads: Threads, ins: Instruction) -> None:
    target, source = ins.operands
    kind, targets = TYPES[ins.name[-1]], parts(target)
    if "param" in ins.name:
        name = source.strip("[]")
        given = threads.params.get(name)
        threads.write(target, threads.read(name, kind) if given is None else given)
        return
    memory, at = place(threads, ins, source, kind.itemsize * len(targets))
    values = memory[:len(memory) // 16 * 16].view(kind)
    for i, name in enumerate(targets):
        threads.write(name, extended(name, values[at // kind.itemsize + i]))


WIDTHS = {"%rs": 2, "%r": 4, "%f": 4, "%rd": 8, "%fd": 8}  # bytes of a register


def extended(register: str, value: Any) -> Any:
    """A loaded integer, with its sign, as wide as the register."""
    width = WIDTHS.get(register.rstrip("0123456789_"), value.dtype.itemsize)
    wider = width > value.dtype.itemsize and value.dtype.kind != "f"
    return value.astype(f"{value.dtype.kind}{width}") if wider else value


def store(threads: Threads, ins: Instruction) -> None:
    target, source = ins.operands
    kind, sources = TYPES[ins.name[-1]], parts(source)
    if "param" in ins.name:
        threads.write(target.strip("[]"), threads.read(source, kind))
        return
    memory, at = place(threads, ins, target, kind.itemsize * len(sources))
    values = memory[:len(memory) // 16 * 16].view(kind)
    for i, name in enumerate(sources):
        value = threads.read(name, kind)
        where, value = np.broadcast_arrays(at // kind.itemsize + i, value)
        values[where] = value  # of several threads at one place, the last one's


# %% 09_cuda.md § Threads that part (5)
SHUFFLE = {  # how -> lane to read, from own lane, amount, first and last lane
    "bfly": lambda lane, by, low, high: lane ^ by,
    "down": lambda lane, by, low, high: lane + by,
    "up": lambda lane, by, low, high: lane - by,
    "idx": lambda lane, by, low, high: low + by,
}


def shuffle(threads: Threads, ins: Instruction) -> None:
    """`shfl.sync.how.b32 d|p, a, by, clamp, members`"""
    target, source, by, clamp, _ = ins.operands
    how, lanes = ins.name[2], threads.lanes
    lane = (threads.tid[lanes] % 32).astype("i8")
    signed = TYPES["s32"]
    amount, limit = (threads.read(x, signed).astype("i8") for x in (by, clamp))
    cut = limit >> 8 & 31
    low = lane & cut
    high = low | limit & 31 & ~cut
    other = SHUFFLE[how](lane, amount, low, high)
    valid = other >= high if how == "up" else other <= high
    other = np.where(valid, other, lane)
    values = np.broadcast_to(threads.registers[source], threads.count)
    here = np.arange(threads.count)[lanes]
    there = here + (other - lane)
    running = np.zeros(threads.count, bool)
    running[lanes] = True
    inside = there - here + threads.tid[lanes] < threads.per
    if not np.all(inside) or not np.all(running[there]):
        raise Fault("a shuffle reads from a thread that is not there")
    first, _, second = target.partition("|")
    threads.write(first, values[there])
    if second:
        threads.write(second, np.broadcast_to(valid, len(here)))


# %% 09_cuda.md § Threads that part (6)
def fragment(threads: Threads, operand: str) -> np.ndarray:
    """The registers of an operand: (warps, registers, 32), as float32."""
    values = [np.broadcast_to(threads.registers[name], threads.count)[threads.lanes]
              for name in parts(operand)]
    return np.stack([v.view("f4").reshape(-1, 32) for v in values], axis=1)


def multiply(threads: Threads, ins: Instruction) -> None:
    """A product of matrices on the tensor cores: `mma.sync`, TF32 to float32."""
    if ins.name[3:] not in [(shape, "row", "col", "f32", "tf32", "tf32", "f32")
                            for shape in ("m16n8k4", "m16n8k8")]:
        raise PTXError(f"unknown instruction {'.'.join(ins.name)}")
    k, lane = int(ins.name[3][-1]), np.arange(32)
    row, column = lane // 4, lane % 4
    a, b, c = (fragment(threads, operand) for operand in ins.operands[1:])
    left, right = np.zeros((len(a), 16, k)), np.zeros((len(a), k, 8))
    for i in range(k // 2):
        left[:, row + i % 2 * 8, column + i // 2 * 4] = short(a[:, i])
    for i in range(k // 4):
        right[:, column + i * 4, row] = short(b[:, i])
    made = left @ right
    for i, name in enumerate(parts(ins.operands[0])):
        sums = made[:, row + i // 2 * 8, column * 2 + i % 2] + c[:, i]
        threads.write(name, sums.astype("f4").ravel())


def short(x: np.ndarray) -> np.ndarray:
    """The first nineteen bits of each number."""
    return (x.view("u4") & np.uint32(0xffffe000)).view("f4")


EXECUTE: dict[str, Callable[[Threads, Instruction], None]] = {
    "mov": move, "setp": set_predicate, "cvt": convert_register, "ld": load,
    "st": store, "shfl": shuffle, "mma": multiply,
    "membar": lambda threads, ins: None,
    "fence": lambda threads, ins: None, "bar": lambda threads, ins: None,
}


def run(kernel: Kernel, memory: Any, grid: Sequence[int], block: Sequence[int],
        shared: int, params: dict[str, Any]) -> None:
    """A launch. Raises Fault for what a GPU would not survive."""
    blocks = np.arange(grid[0] * grid[1] * grid[2])
    few = max(1, CHUNK // (block[0] * block[1] * block[2]))
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), few):
            Threads(kernel, memory, blocks[start:start + few], grid, block, shared,
                    params).run()
