# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § Zeros (1)
"""Is a part of a matrix blank? Is it finite? (chapter 3)"""
from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from mlir import ir
from mlir.dialects import arith, memref, scf, vector

from tinymlir.flow import either
from tinymlir.lanes import as_matrix, matrix, zeros
from tinymlir.scalars import index

ZERO, OTHER, NAN = (getattr(arith.CmpFPredicate, x) for x in ("OEQ", "UNE", "UNO"))


def truth(value: bool) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(1), int(value))


def opposite(x: ir.Value) -> ir.Value:
    """Not x, for a truth value or a mask."""
    number = isinstance(x.type, ir.IntegerType)
    ones = truth(True) if number else vector.broadcast(x.type, truth(True))
    return arith.xori(x, ones)


def any_lane(kind: ir.VectorType, count: ir.Value, step: int,
             odd: Callable[[ir.Value], list[ir.Value]]) -> ir.Value:
    """Is a lane of a mask in `odd(at)` set, for some at = 0, step, ... < count?"""
    bits = ir.VectorType.get(kind.shape, ir.IntegerType.get_signless(1))
    loop = scf.ForOp(index(0), count, index(step), [zeros(bits)])
    with ir.InsertionPoint(loop.body):
        masks = odd(loop.induction_variable)
        scf.YieldOp([reduce(arith.ori, masks, loop.inner_iter_args[0])])
    either_of_them = ir.Attribute.parse("#vector.kind<or>")
    return vector.reduction(bits.element_type, either_of_them, loop.results[0])


# %% 03_passes.md § Zeros (2)
def side_by_side(a: ir.Value) -> ir.Value:
    """The same matrix, once it is known that its columns lie side by side."""
    memory, start, rows, columns, *steps = memref.extract_strided_metadata(a)
    kind = matrix(str(ir.MemRefType(a.type).element_type), "?, 1")
    return as_matrix(kind, memory, start, (rows, columns), steps)


def perhaps_zeros(a: ir.Value, lanes: int, lines: list[ir.Value], k: ir.Value,
                  depth: ir.Value) -> ir.Value:
    """Are the corners zeros, and can the lines be read as whole vectors?"""
    last = arith.addi(k, arith.subi(depth, index(1)))
    corners = [memref.load(a, [line, column]) for line in (lines[0], lines[-1])
               for column in (k, last)]
    zero = arith.constant(corners[0].type, 0.0)
    *_, step = memref.extract_strided_metadata(a)
    same, rest = arith.CmpIPredicate.eq, arith.remui(depth, index(lanes))
    return reduce(arith.andi, [
        arith.cmpi(same, step, index(1)), arith.cmpi(same, rest, index(0)),
        *(arith.cmpf(ZERO, x, zero) for x in corners)])


def only_zeros(a: ir.Value, kind: ir.VectorType, lines: list[ir.Value], k: ir.Value,
               depth: ir.Value) -> ir.Value:
    """Do these lines of `a` hold only zeros, in `depth` columns from k on?

    It may also say no if they cannot be read as whole vectors."""
    none, lanes = zeros(kind), kind.shape[0]
    perhaps = perhaps_zeros(a, lanes, lines, k, depth)

    def look() -> list[ir.Value]:
        flat = side_by_side(a)

        def filled(at: ir.Value) -> list[ir.Value]:
            places = ([line, arith.addi(k, at)] for line in lines)
            return [arith.cmpf(OTHER, vector.load(kind, flat, place), none)
                    for place in places]

        return [opposite(any_lane(kind, depth, lanes, filled))]

    return either(perhaps, look, lambda: [truth(False)], [perhaps.type])[0]


# %% 03_passes.md § Zeros (3)
def only_finite(panel: ir.Value, kind: ir.VectorType, depth: ir.Value) -> ir.Value:
    """Are the first `depth` rows of the panel without infinity and NaN?"""
    def odd(at: ir.Value) -> list[ir.Value]:
        wide, lanes = ir.MemRefType(panel.type).shape[1], kind.shape[0]
        row = [vector.load(kind, panel, [at, index(j)])
               for j in range(0, wide, lanes)]
        nothing = [arith.subf(x, x) for x in row]
        return [arith.cmpf(NAN, x, x) for x in nothing]

    return opposite(any_lane(kind, depth, 1, odd))


# %% 03_passes.md § Zeros (4)
UNKNOWN, YES, NO = range(3)


def byte(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(8), value)


def forget(note: ir.Value) -> None:
    """A new panel: nothing is known about it."""
    memref.store(byte(UNKNOWN), note, [])


def known_finite(note: ir.Value, panel: ir.Value, kind: ir.VectorType,
                 depth: ir.Value) -> ir.Value:
    """`only_finite`, found out once and noted."""
    def is_(value: int) -> ir.Value:
        same = arith.CmpIPredicate.eq
        return arith.cmpi(same, memref.load(note, []), byte(value))

    def look() -> None:
        found = only_finite(panel, kind, depth)
        memref.store(arith.select(found, byte(YES), byte(NO)), note, [])

    either(is_(UNKNOWN), look, lambda: None)
    return is_(YES)
