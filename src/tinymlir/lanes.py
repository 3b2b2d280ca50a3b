# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § The innermost loop (1)
"""Matrices and vectors, for code that builds kernels (chapter 3)."""
from __future__ import annotations

from collections.abc import Sequence

from mlir import ir
from mlir.dialects import arith, memref, vector


def matrix(element: str, strides: str) -> ir.MemRefType:
    """A matrix of unknown size, such as strides="?, 1"."""
    return ir.MemRefType(ir.Type.parse(
        f"memref<?x?x{element}, strided<[{strides}], offset: ?>>"))


def as_matrix(kind: ir.MemRefType, memory: ir.Value, start: ir.Value,
              sizes: Sequence[ir.Value], steps: Sequence[ir.Value]) -> ir.Value:
    """A matrix in this memory: where it begins, its sizes and its steps."""
    anywhere, unknown = (ir.ShapedType.get_dynamic_stride_or_offset(),
                         ir.ShapedType.get_dynamic_size())
    known, _ = kind.get_strides_and_offset()
    return memref.ReinterpretCastOp(
        kind, memory, [start], list(sizes),
        [step for step, k in zip(steps, known) if k == anywhere],
        [anywhere], [unknown] * 2, known).result


def window(x: ir.Value, top: ir.Value, left: ir.Value, rows: ir.Value,
           columns: ir.Value) -> ir.Value:
    """A part of a matrix."""
    memory, start, _, _, *steps = memref.extract_strided_metadata(x)
    for place, step in zip((top, left), steps):
        start = arith.addi(start, arith.muli(place, step))
    return as_matrix(ir.MemRefType(x.type), memory, start, (rows, columns), steps)


def widen(x: ir.Value, to: ir.Type) -> ir.Value:
    """The same numbers in a wider type (floats and integers)."""
    if x.type == to:
        return x
    kind = ir.VectorType(to).element_type if isinstance(to, ir.VectorType) else to
    return (arith.extsi if isinstance(kind, ir.IntegerType) else arith.extf)(to, x)


def multiply_add(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c on vectors: one rounding for floats."""
    if isinstance(ir.VectorType(c.type).element_type, ir.IntegerType):
        return arith.addi(arith.muli(a, b), c)
    return vector.fma(a, b, c)


def add(x: ir.Value, y: ir.Value) -> ir.Value:
    """The sum of two numbers, or of two vectors."""
    many = isinstance(x.type, ir.VectorType)
    kind = ir.VectorType(x.type).element_type if many else x.type
    return (arith.addi if isinstance(kind, ir.IntegerType) else arith.addf)(x, y)


def zeros(kind: ir.VectorType) -> ir.Value:
    number = kind.element_type
    zero = (ir.IntegerAttr if isinstance(number, ir.IntegerType) else ir.FloatAttr)
    splat = ir.DenseElementsAttr.get_splat(kind, zero.get(number, 0))
    return arith.constant(kind, splat)
