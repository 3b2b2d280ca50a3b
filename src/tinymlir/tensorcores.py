# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Tensor cores (1)
"""Products of float32 matrices on tensor cores, in TF32 (chapter 8)."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, memref, scf, vector

from tinymlir.expr import rule
from tinymlir.factors import Tile
from tinymlir.groups import Group
from tinymlir.kernels import (
    KERNELS, UNROLL, WARP, Array, Built, Kernel, Place, block_id, plus, scaled,
    split, thread_id)
from tinymlir.lanes import zeros
from tinymlir.scalars import index
from tinymlir.tiles import FULLY, Pipeline, Product, write_piece


# %% 08_gpu.md § Tensor cores (2)
TILE = Tile(64, 64, 16, 8, 4)  # four warps, each with a square of SIDE
SIDE = 32
ROWS, COLUMNS, DEPTH = 16, 8, 8  # of one instruction


def lanes() -> tuple[ir.Value, ir.Value, list[ir.Value]]:
    """This thread's place among eight and among four, and where its warp begins."""
    thread = thread_id("x")
    lane, warp = (f(thread, index(WARP)) for f in (arith.remui, arith.divui))
    across = index(TILE.columns // SIDE)
    corner = [scaled(f(warp, across), SIDE) for f in (arith.divui, arith.remui)]
    return (*(f(lane, index(4)) for f in (arith.divui, arith.remui)), corner)


def pieces() -> Iterator[tuple[int, int]]:
    """The corners of the small products that a warp's square consists of."""
    return ((i, j) for i in range(0, SIDE, ROWS) for j in range(0, SIDE, COLUMNS))


# %% 08_gpu.md § Tensor cores (3)
class TensorProduct(Product):
    """Rows of shared memory that are eight numbers longer: no two threads of a warp
    read from the same bank."""

    @property
    def pitches(self) -> tuple[int, int]:
        return self.tile.rows + 8, self.tile.columns + 8


@dataclass(eq=False)
class TensorPipeline(Pipeline):
    """The pipeline of a product, with one instruction for 16 x 8 x 8 products."""

    def start(self) -> list[ir.Value]:
        square = ir.VectorType.get([2, 2], ir.F32Type.get())
        return [zeros(square) for _ in pieces()]

    def multiply(self, half: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        boards, pitches = self.kernel.shared, self.p.pitches
        starts = [self.board(half, pitch) for pitch in pitches]
        eighth, fourth, corner = lanes()
        loop = scf.ForOp(index(0), index(TILE.depth), index(DEPTH), sums)
        loop.operation.attributes[UNROLL] = ir.Attribute.parse(FULLY)
        with ir.InsertionPoint(loop.body):
            k = plus(loop.induction_variable, fourth)
            bases = [plus(s, scaled(k, pitch), c, eighth)
                     for s, pitch, c in zip(starts, pitches, corner)]
            a = {i: numbers(boards[0], bases[0], [
                i, i + 8, i + 4 * pitches[0], i + 8 + 4 * pitches[0]])
                for i in range(0, SIDE, ROWS)}
            b = {j: numbers(boards[1], bases[1], [j, j + 4 * pitches[1]])
                 for j in range(0, SIDE, COLUMNS)}
            scf.YieldOp([multiply_small(a[i], b[j], total) for (i, j), total
                         in zip(pieces(), loop.inner_iter_args)])
        return list(loop.results)


def numbers(board: ir.Value, base: ir.Value, offsets: Sequence[int]) -> ir.Value:
    """Numbers of shared memory as the operand of an instruction."""
    total = zeros(ir.VectorType.get([len(offsets), 1], ir.F32Type.get()))
    for i, offset in enumerate(offsets):
        x = memref.load(board, [plus(base, offset)])
        total = vector.insert(x, total, [], [i, 0])
    return total


def multiply_small(a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
    """total + a @ b, by all threads of the warp together."""
    word = ir.IntegerType.get_signless(64)
    shape = [ir.IntegerAttr.get(word, n) for n in (ROWS, COLUMNS, DEPTH)]
    how = {"mmaShape": ir.ArrayAttr.get(shape), "tf32Enabled": ir.UnitAttr.get()}
    made = ir.Operation.create("nvgpu.mma.sync", [total.type], [a, b, total], how)
    return made.result


# %% 08_gpu.md § Tensor cores (4)
@rule(KERNELS, "tensor")
def tensor_kernel(group: Group, places: dict[ir.Value, Place],
                  arrays: Sequence[Array]) -> Built:
    """C = A @ B with factors cut to 11 bits, and what follows in float32."""
    p = TensorProduct(group, places, TILE)
    sizes = [2 * TILE.depth * pitch for pitch in p.pitches]
    kernel = Kernel(arrays, (TILE.threads, 1, 1), [(size, "f32") for size in sizes])
    with kernel.body:
        *stack, column, row = split(block_id("x"), p.blocks)
        i0, j0 = scaled(row, TILE.rows), scaled(column, TILE.columns)
        sums = TensorPipeline(p, kernel, stack, (i0, j0)).run()
        eighth, fourth, (down, right) = lanes()
        for (i, j), total in zip(pieces(), sums):
            for lower in range(2):
                pair = [vector.extract(total, [], [lower, e]) for e in range(2)]
                at = [plus(i0, down, eighth, i + 8 * lower),
                      plus(j0, right, scaled(fourth, 2), j)]
                write_piece(p, kernel, [*stack, *at], pair)
    return Built(kernel, (math.prod(p.blocks), 1, 1))
