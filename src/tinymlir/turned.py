# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Turned around (1)
"""Kernels that read along one axis and write along another (chapter 8)."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import gpu

from tinymlir.expr import rule
from tinymlir.groups import Group, Linear, Member
from tinymlir.kernels import (
    KERNELS, Array, Built, Kernel, Numbers, Place, Scope, at, below, block_id, both,
    guarded, load, plus, scaled, split, store, thread_id)


# %% 08_gpu.md § Turned around (2)
SIDE = 32  # of a square of numbers
PITCH = SIDE + 1  # from row to row in shared memory: a column is in all banks
TALL = 8  # threads; each has a number in every eighth row
ENOUGH = 16  # an axis that is shorter is not worth a square
MOST = 4  # squares in shared memory


def turned_reads(group: Group, places: dict[ir.Value, Place]
                 ) -> tuple[int, dict[Linear, Array]]:
    """A loop along which some reads find neighbours, while the last one does not;
    and those reads: what they read, by formula."""
    found: dict[int, dict[Linear, Array]] = {}
    for member in group.members:
        for value, map_ in member.reads:
            if value not in places or group.maker(value):
                continue
            formula = member.in_order(places[value].address(map_))
            for g in neighbours(formula, group.extents):
                found.setdefault(g, {})[formula] = places[value].array
    best = max(found, key=lambda g: len(found[g]), default=0)
    return best, dict(list(found.get(best, {}).items())[:MOST])


def neighbours(formula: Linear, extents: Sequence[int]) -> list[int]:
    """The loop with neighbours in memory, if it is not the last, and is long."""
    if not extents or formula.steps[-1] in (0, 1) or extents[-1] < ENOUGH:
        return []
    return [g for g, step in enumerate(formula.steps[:-1])
            if step == 1 and extents[g] >= ENOUGH]


# %% 08_gpu.md § Turned around (3)
@dataclass(eq=False)
class Turned(Numbers):
    """Numbers of which some have been brought to shared memory."""

    boards: dict[Linear, ir.Value] | None = None  # formula -> a square
    place: ir.Value | None = None  # in it

    def load(self, place: Place, map_: ir.AffineMap, member: Member
             ) -> list[ir.Value]:
        board = self.boards.get(member.in_order(place.address(map_)))
        if board is None:
            return super().load(place, map_, member)
        return load(board, self.place, 1)


@dataclass(eq=False)
class Square:
    """A square of the points of a group: loop `down`, and the last loop."""

    group: Group
    down: int
    corner: list[ir.Value]  # a point of the group

    def points(self, along_last: bool) -> Iterator[tuple]:
        """(point, is it there, place in shared memory) for each of this thread's
        numbers; neighbouring threads follow the last loop, or the other one."""
        for turn in range(0, SIDE, TALL):
            slow, fast = plus(thread_id("y"), turn), thread_id("x")
            down, last = (slow, fast) if along_last else (fast, slow)
            point = list(self.corner)
            point[self.down] = plus(point[self.down], down)
            point[-1] = plus(point[-1], last)
            inside = both(*(
                below(point[g], self.group.extents[g])
                if self.group.extents[g] % SIDE else None for g in (self.down, -1)))
            yield point, inside, plus(scaled(last, PITCH), down)


# %% 08_gpu.md § Turned around (4)
@rule(KERNELS, "turned")
def turned_kernel(group: Group, places: dict[ir.Value, Place],
                  arrays: Sequence[Array]) -> Built:
    """What is read across goes through shared memory, a square for each block."""
    down, reads = turned_reads(group, places)
    tiles = [-(-n // SIDE) if g in (down, len(group.extents) - 1) else n
             for g, n in enumerate(group.extents)]
    shared = [(SIDE * PITCH, array.element) for array in reads.values()]
    kernel = Kernel(arrays, (SIDE, TALL, 1), shared)
    with kernel.body:
        corner = split(block_id("x"), tiles)
        for g in (down, -1):
            corner[g] = scaled(corner[g], SIDE)
        square = Square(group, down, corner)
        boards = dict(zip(reads, kernel.shared))
        bring(square, kernel, reads)
        gpu.barrier()
        scope = Scope(group, places, kernel)
        for point, inside, where in square.points(along_last=True):
            with guarded(inside):
                numbers = Turned(scope, point, 1, None, boards, where)
                for member in group.members:
                    if member.result in places:
                        numbers.store(member.result)
    return Built(kernel, (math.prod(tiles), 1, 1))


def bring(square: Square, kernel: Kernel, reads: dict[Linear, Array]) -> None:
    """Squares of the arrays into shared memory, each along its rows."""
    for point, inside, where in square.points(along_last=False):
        with guarded(inside):
            for (formula, array), board in zip(reads.items(), kernel.shared):
                pointer = kernel.pointers[id(array)]
                store(load(pointer, at(formula, point), 1), board, where)
