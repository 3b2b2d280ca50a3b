# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Every number on its own (1)
"""Kernels in which every number is on its own (chapter 8)."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mlir import ir

from tinymlir.expr import rule
from tinymlir.groups import Group, Linear, dense, number_of
from tinymlir.kernels import (
    KERNELS, WARP, Array, Built, Kernel, Numbers, Place, Scope, below, block_id,
    constant, guarded, last_step, load_lanes, plus, scaled, split, store_lanes,
    thread_id)
from tinymlir.plan import BYTES


# %% 08_gpu.md § Every number on its own (2)
THREADS = 256  # of a block


def outside_of(group: Group) -> list[ir.Value]:
    """The tensors that a group reads from memory."""
    read = [v for m in group.members for v in (*dict(m.reads), *m.captured)
            if m is group.product or number_of(v) is None]
    return [v for v in dict.fromkeys(read) if not group.maker(v)]


# %% 08_gpu.md § Every number on its own (3)
def formulas(group: Group, places: dict[ir.Value, Place]
             ) -> list[tuple[Linear, str]]:
    """Every access of a group to memory, and the type of what is there."""
    found = []
    for m in group.members:
        pairs = [*m.reads, (m.result, m.writes)]
        found += [(m.in_order(places[v].address(map_)), places[v].array.element)
                  for v, map_ in pairs if v in places]
    return found


def vector_lanes(extents: Sequence[int], accesses: Sequence[tuple[Linear, str]]
                 ) -> int:
    """How many neighbours a thread takes: 16 bytes of the widest numbers."""
    extent = extents[-1] if extents else 1
    widest = max((BYTES[e] for f, e in accesses if last_step(f) == 1), default=16)
    lanes = min(16 // widest, 8)
    while extent % lanes:
        lanes //= 2
    return lanes


# %% 08_gpu.md § Every number on its own (4)
def each_point(arrays: Sequence[Array], extents: Sequence[int], lanes: int,
               body: Callable[[Kernel, list[ir.Value]], None]) -> Built:
    """A thread for every point, or for so many neighbours along the last loop."""
    short = [*extents[:-1], extents[-1] // lanes] if extents else []
    total = math.prod(short)
    threads = min(THREADS, -(-total // WARP) * WARP)
    kernel = Kernel(arrays, (threads, 1, 1))
    with kernel.body:
        number = plus(scaled(block_id("x"), threads), thread_id("x"))
        with guarded(below(number, total) if total % threads else None):
            point = split(number, short)[:len(short)]
            if point:
                point[-1] = scaled(point[-1], lanes)
            body(kernel, point)
    return Built(kernel, (-(-total // threads), 1, 1))


# %% 08_gpu.md § Every number on its own (5)
def is_flat(group: Group, accesses: Sequence[tuple[Linear, str]]) -> bool:
    """Is every array walked from its first number to its last, or one number?

    Then the loops can be counted as one."""
    whole = dense(group.extents)
    return not any(m.counts for m in group.members) and all(
        f.steps == whole or not any(f.steps) for f, _ in accesses)


@rule(KERNELS, "map")
def map_kernel(group: Group, places: dict[ir.Value, Place], arrays: Sequence[Array]
               ) -> Built:
    """Every point on its own: neighbours in memory go to neighbouring threads."""
    accesses = formulas(group, places)
    flat = bool(group.extents) and is_flat(group, accesses)
    extents = [math.prod(group.extents)] if flat else group.extents
    lanes = vector_lanes(extents, accesses)

    def body(kernel: Kernel, point: list[ir.Value]) -> None:
        numbers = Numbers(Scope(group, places, kernel, flat), point, lanes)
        for member in group.members:
            if member.result in places:
                numbers.store(member.result)

    return each_point(arrays, extents, lanes, body)


# %% 08_gpu.md § Every number on its own (6)
def copy_kernel(shape: Sequence[int], source: Place | ir.Value, target: Place
                ) -> Built:
    """An array copied from place to place, or filled with a number."""
    loops = [i for i, n in enumerate(shape) if n > 1]
    extents = [shape[i] for i in loops]
    from_memory = isinstance(source, Place)
    ends = [source, target] if from_memory else [target]
    *read, write = [Linear(p.offset, tuple(p.strides[i] for i in loops))
                    for p in ends]
    element_ = target.array.element
    lanes = vector_lanes(extents, [(f, element_) for f in (*read, write)])

    def body(kernel: Kernel, point: list[ir.Value]) -> None:
        *pointer, goal = (kernel.pointers[id(p.array)] for p in ends)
        numbers = (load_lanes(*pointer, *read, point, lanes) if from_memory
                   else [constant(source)] * lanes)
        store_lanes(numbers, goal, write, point)

    arrays = list(dict.fromkeys(p.array for p in ends))
    return each_point(arrays, extents, lanes, body)
