# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Calling a kernel (1)
"""Matrix products of a module become calls of kernels (chapter 3)."""
from __future__ import annotations

from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, func, llvm, memref

from tinymlir.library import in_parallel
from tinymlir.scalars import index
from tinymlir.schedule import Kernel


def find(module: ir.Module, *names: str) -> list[ir.Operation]:
    """All operations of these names, in order."""
    found = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name in names:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


@dataclass
class Matrix:
    """A factor: its buffer, and which loop runs along each of its dimensions."""

    value: ir.Value
    loops: list[int]

    def arguments(self, row: int, column: int, batch: ir.Value | None
                  ) -> list[ir.Value]:
        """What a kernel takes: address, offset, sizes and strides of a matrix.

        `row` and `column` are loops; `batch` picks a matrix of a stack."""
        n, value = len(self.loops), self.value
        _, offset, *rest = memref.extract_strided_metadata(value)
        number = memref.extract_aligned_pointer_as_index(value)
        wide = arith.index_cast(ir.IntegerType.get_signless(64), number)
        address = llvm.inttoptr(ir.Type.parse("!llvm.ptr"), wide)
        at = [self.loops.index(row), self.loops.index(column)]
        if batch is not None:
            step = rest[n + self.loops.index(0)]
            offset = arith.addi(offset, arith.muli(batch, step))
        return [address, address, offset, *(rest[i] for i in at),
                *(rest[n + i] for i in at)]


def factors_of(op: ir.Operation) -> list[Matrix]:
    """A, B and C of a product, with the loops of their indexing maps."""
    maps = (a.value for a in op.attributes["indexing_maps"])
    return [Matrix(value, [ir.AffineDimExpr(e).position for e in m.results])
            for value, m in zip(op.operands, maps)]


# %% 03_passes.md § Calling a kernel (2)
def kernel_for(a: Matrix, b: Matrix, c: Matrix, bits: int, parallel: bool
               ) -> Kernel:
    """Which kernel computes this product."""
    types = [ir.MemRefType(m.value.type) for m in (a, b, c)]
    strides, _ = types[0].get_strides_and_offset()
    k = len(c.loops)
    rows, columns = types[2].shape[-2], b.loops[-1] == k
    names = tuple(str(kind.element_type) for kind in types)
    if rows == 1 and columns and a.loops[-1] == k and strides[-1] == 1:
        return Kernel("dots", names, columns, bits, parallel)
    kind = "row" if rows == 1 and not columns else "matmul"
    return Kernel(kind, names, columns, bits, parallel)


PRODUCTS = "linalg.matmul", "linalg.batch_matmul", "linalg.contract"


def call_kernels(module: ir.Module, bits: int, parallel: bool) -> set[Kernel]:
    """Replace every matrix product by a call; returns the kernels called."""
    used = {}
    for op in find(module, *PRODUCTS):
        factors = factors_of(op)
        kernel = kernel_for(*factors, bits, parallel)
        used[kernel.symbol] = kernel
        fresh = sums_something(factors) and take_fill(op)
        with ir.InsertionPoint(op), op.location:
            call_kernel(kernel, factors, fresh)
        op.erase()
    address, number = ir.Type.parse("!llvm.ptr"), ir.IndexType.get()
    takes = [address, address, *[number] * 5] * 3 + [ir.IntegerType.get_signless(1)]
    kind = ir.FunctionType.get(takes, [])
    with ir.InsertionPoint.at_block_begin(module.body), ir.Location.unknown():
        for symbol in used:
            func.FuncOp(symbol, kind, visibility="private")
    return set(used.values())


def sums_something(factors: list[Matrix]) -> bool:
    """Is there at least one k? Else the zeros are the result."""
    a, _, c = factors
    size = ir.MemRefType(a.value.type).shape[a.loops.index(len(c.loops))]
    return size > 0  # an unknown size is a negative number


def call_kernel(kernel: Kernel, factors: list[Matrix], fresh: bool) -> None:
    """One call, or a loop of calls over the matrices of a stack."""
    a, b, c = factors
    k = len(c.loops)
    i, j = k - 2, k - 1

    def call(batch: ir.Value | None) -> None:
        flag = arith.constant(ir.IntegerType.get_signless(1), int(fresh))
        func.call([], kernel.symbol, [
            *a.arguments(i, k, batch), *b_as_stored(b, kernel, j, k, batch),
            *c.arguments(i, j, batch), flag])

    if k == 2:
        return call(None)
    in_parallel(memref.dim(c.value, index(0)), call)


def b_as_stored(b: Matrix, kernel: Kernel, j: int, k: int, batch: ir.Value | None
                ) -> list[ir.Value]:
    """B as it is stored: by rows of k, or by rows of j."""
    return b.arguments(*((j, k) if kernel.columns else (k, j)), batch)


# %% 03_passes.md § Calling a kernel (3)
def take_fill(op: ir.Operation) -> bool:
    """Remove the fill with zeros that only this product would read."""
    target = list(op.operands)[2]
    before = []
    for other in op.block:
        if other.operation == op:
            break
        if target in list(other.operands):
            before.append(other.operation)
    last = before[-1] if before else None
    renamed = any(isinstance(r.type, ir.MemRefType)
                  for other in before for r in other.results)
    if last is None or renamed or not is_zero_fill(last):
        return False
    last.erase()
    return True


def is_zero_fill(op: ir.Operation) -> bool:
    """Is this a linalg.fill with a constant 0?"""
    return op.name == "linalg.fill" and constant_of(op.operands[0]) == 0


def constant_of(value: ir.Value) -> float | None:
    """The number, if it is a constant."""
    made = value.owner  # an operation, or the block whose argument it is
    known = not isinstance(made, ir.Block) and made.name == "arith.constant"
    return made.attributes["value"].value if known else None
