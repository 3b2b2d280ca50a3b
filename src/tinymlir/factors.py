# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Products (1)
"""How a block copies the tiles of a matrix product (chapter 8)."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, memref

from tinymlir.groups import Linear
from tinymlir.kernels import Array, at, below, guarded, load, plus, scaled, store
from tinymlir.lanes import widen
from tinymlir.plan import BYTES
from tinymlir.scalars import index, like


# %% 08_gpu.md § Products (2)
@dataclass(frozen=True)
class Tile:
    """Sizes of a block's tile (rows, columns, depth) and of a thread's."""

    rows: int
    columns: int
    depth: int
    thread_rows: int
    thread_columns: int
    slices: int = 1  # of k: each has threads of its own, and their sums are added

    @property
    def threads(self) -> int:
        """Of a slice."""
        down, across = self.thread_rows, self.thread_columns
        return (self.rows // down) * (self.columns // across)


TILES = {  # bytes of a number -> tiles, from the largest
    4: (Tile(128, 128, 8, 8, 8), Tile(64, 64, 16, 4, 4), Tile(32, 64, 16, 4, 4),
        Tile(16, 32, 16, 2, 4, slices=4), Tile(16, 16, 16, 2, 4, slices=8)),
    8: (Tile(64, 64, 16, 4, 4), Tile(32, 64, 16, 4, 4),
        Tile(16, 32, 8, 2, 4, slices=4), Tile(16, 16, 8, 2, 2, slices=8)),
}
ENOUGH = 128  # blocks that keep a large GPU busy


def choose(rows: int, columns: int, stack: int, nbytes: int) -> Tile:
    """The largest tile that leaves enough blocks and is not much too tall."""
    tiles = [t for t in TILES[nbytes] if t.rows < 2 * rows] or [TILES[nbytes][-1]]
    for tile in tiles:
        blocks = stack * -(-rows // tile.rows) * -(-columns // tile.columns)
        if blocks >= ENOUGH:
            return tile
    return tiles[-1]


# %% 08_gpu.md § From memory to shared memory (1)
@dataclass(frozen=True)
class Factor:
    """A or B: where its numbers are, and how a block copies a tile of them."""

    array: Array
    formula: Linear  # over (stack, across, k), where across is i or j
    across: int  # extent of i or j
    depth: int  # extent of k
    width: int  # of a tile, along i or j
    steps: int  # of a tile, along k
    together: int  # of all slices' tiles, along k

    @property
    def along_k(self) -> bool:
        """Are neighbours in memory neighbours along k?"""
        *_, across, k = self.formula.steps
        return k == 1 and across != 1

    @property
    def lanes(self) -> int:
        """How many numbers are loaded at once: 16 bytes, or one number."""
        *outer, across, k = self.formula.steps
        fast, slow, extent = ((k, across, self.depth) if self.along_k
                              else (across, k, self.across))
        lanes = 16 // BYTES[self.array.element]
        others = (*outer, slow, self.formula.offset, extent)
        return lanes if fast == 1 and all(n % lanes == 0 for n in others) else 1

    @property
    def vectors(self) -> int:
        return self.width * self.steps // self.lanes


# %% 08_gpu.md § From memory to shared memory (2)
@dataclass(eq=False)
class Fetch:
    """One thread's share of a tile, on its way from global to shared memory."""

    factor: Factor
    threads: int
    pointer: ir.Value
    stack: list[ir.Value]
    first: ir.Value  # of i or j, in this block
    kind: ir.Type  # of the numbers in shared memory
    thread: ir.Value

    def places(self) -> Iterator[tuple[ir.Value, ir.Value, ir.Value | None]]:
        """(across, k, is it there) in the tile, of each vector of this thread."""
        f = self.factor
        short = f.steps // f.lanes if f.along_k else f.width // f.lanes
        for turn in range(-(-f.vectors // self.threads)):
            number = plus(self.thread, turn * self.threads)
            more = (turn + 1) * self.threads > f.vectors
            there = below(number, f.vectors) if more else None
            slow = arith.divui(number, index(short))
            fast = scaled(arith.remui(number, index(short)), f.lanes)
            yield (slow, fast, there) if f.along_k else (fast, slow, there)

    def load(self, k0: ir.Value) -> list[list[ir.Value]]:
        """Numbers from global memory: zeros beyond k, any others beyond an edge."""
        f, loaded = self.factor, []
        for across, k, _ in self.places():
            i, deep = plus(self.first, across), plus(k0, k)
            inside = below(deep, f.depth)
            if f.across % f.width or f.vectors % self.threads:
                last = f.across - (1 if f.along_k else f.lanes)
                i = arith.minui(i, index(last))
            last = f.depth - (f.lanes if f.along_k else 1)
            deep = arith.minui(deep, index(last))
            where = at(f.formula, [*self.stack, i, deep])
            numbers = load(self.pointer, where, f.lanes)
            wide = [widen(x, self.kind) for x in numbers]
            if f.depth % f.together:
                zero = like(wide[0], 0)
                wide = [arith.select(inside, x, zero) for x in wide]
            loaded.append(wide)
        return loaded

    def save(self, loaded: list[list[ir.Value]], board: ir.Value, base: ir.Value,
             pitch: int) -> None:
        """Numbers into shared memory: a row of the tile for each k."""
        f = self.factor
        for (across, k, there), numbers in zip(self.places(), loaded):
            with guarded(there):
                where = plus(base, scaled(k, pitch), across)
                if f.along_k:
                    for lane, x in enumerate(numbers):
                        memref.store(x, board, [plus(where, lane * pitch)])
                else:
                    store_all(numbers, board, where)


# %% 08_gpu.md § From memory to shared memory (3)
def store_all(numbers: Sequence[ir.Value], board: ir.Value, where: ir.Value
              ) -> None:
    """Neighbours into shared memory, 16 bytes at a time."""
    lanes = 16 // BYTES[str(numbers[0].type)]
    for i in range(0, len(numbers), lanes):
        store(numbers[i:i + lanes], board, plus(where, i))
