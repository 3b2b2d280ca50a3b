# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Who writes what (1)
"""Which thread writes which number of a result, seen by running it (chapter 8)."""
from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinymlir.emulator import Block, Memory, Program, device_array
from tinymlir.kernels import WARP
from tinymlir.plan import Launch


# %% 08_gpu.md § Who writes what (2)
def owners(program: Program, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Block and thread that write each number of the first result in the last step
    of a plan: its shape, and a last axis of two. What nobody writes has -1."""
    made = [device_array(*kind) for kind in program.types]
    given = [a for a in (*arrays, *program.captured) if a.size]
    memory = Memory(program.plan, given, [a for a in made if a.size])
    *before, last = program.plan.launches
    for launch in before:
        program.device.run(launch, memory)
    found = np.full((made[0].size, 2), -1)
    bits = made[0].reshape(-1).view(np.uint8).reshape(len(found), -1)
    for number in range(math.prod(last.grid)):
        place = np.unravel_index(number, last.grid[::-1])[::-1]
        block = Block(program.device, last, memory, tuple(map(int, place)))
        while block.ended < block.kernel.threads:
            for thread in range(block.kernel.threads):
                old = bits.copy()
                block.step([thread])
                found[np.any(bits != old, axis=1)] = number, thread
    return found.reshape(*made[0].shape, 2)


# %% 08_gpu.md § Who writes what (3)
COLOURS = "#4c8bd9", "#d98b4c", "#5fae6b", "#b06fc4", "#c7524f", "#3ba3a0"
SHADES = 0.15, 0.6, 0.3, 0.75  # of the warps of a block
WIDTH = 640


@dataclass(frozen=True)
class Written:
    """A picture of a matrix: colours are blocks, shades are warps."""

    owners: np.ndarray  # (rows, columns, 2): block and thread
    launch: Launch

    @classmethod
    def by(cls, program: Program, arrays: Sequence[np.ndarray]) -> Written:
        """The first result of a program, which has to be a matrix."""
        return cls(owners(program, arrays), program.plan.launches[-1])

    def rectangles(self) -> list[tuple[int, int, int, int, int, int]]:
        """(row, column, height, width, block, warp) of what lies together."""
        warps = self.owners // (1, WARP)
        rows: list[tuple[int, int, list]] = []  # first row, height, pieces
        for i, row in enumerate(warps):
            ends = [*(np.flatnonzero(np.any(row[1:] != row[:-1], axis=1)) + 1)]
            starts = [0, *map(int, ends)]
            pieces = [(a, b - a, *map(int, row[a]))
                      for a, b in zip(starts, [*starts[1:], len(row)])]
            if rows and rows[-1][2] == pieces:
                rows[-1] = (rows[-1][0], rows[-1][1] + 1, pieces)
            else:
                rows.append((i, 1, pieces))
        return [(i, at, height, width, block, warp) for i, height, pieces in rows
                for at, width, block, warp in pieces]

    def __repr__(self) -> str:
        (rows, columns, _), launch = self.owners.shape, self.launch
        first = [(h, w) for _, _, h, w, *who in self.rectangles() if who == [0, 0]]
        sizes = " and ".join(f"{h} x {w}" for h, w in dict.fromkeys(first))
        return (f"{rows} x {columns} numbers, written by {math.prod(launch.grid)} "
                f"blocks of {math.prod(launch.block)} threads; the first warp "
                f"writes {len(first)} of {sizes}")

    def _repr_html_(self) -> str:
        rows, columns, _ = self.owners.shape
        side, alt = min(WIDTH / columns, 8), html.escape(repr(self))
        shapes = "".join(
            f'<rect x="{x * side:g}" y="{y * side:g}" width="{w * side:g}" '
            f'height="{h * side:g}" fill="{COLOURS[block % len(COLOURS)]}" '
            f'fill-opacity="{SHADES[warp % len(SHADES)]}" stroke="currentColor" '
            f'stroke-opacity="0.25"><title>block {block}, warp {warp}: threads '
            f'{warp * WARP} to {warp * WARP + WARP - 1}</title></rect>'
            for y, x, h, w, block, warp in self.rectangles())
        return (f'<div style="overflow-x:auto">'
                f'<svg xmlns="http://www.w3.org/2000/svg" '
                f'role="img" aria-label="{alt}" width="{columns * side:g}" '
                f'viewBox="-1 -1 {columns * side + 2:g} {rows * side + 2:g}" '
                f'style="max-width:100%"><title>{alt}</title>{shapes}</svg></div>')
