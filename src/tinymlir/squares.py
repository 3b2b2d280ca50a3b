# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § The panel (1)
"""A square of numbers, turned over (chapter 3)."""
from __future__ import annotations

from mlir import ir
from mlir.dialects import vector


def turned(rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of a square of numbers: swap two corners, then the corners of
    each quarter, and so on."""
    rows, n = list(rows), len(rows)
    for half in (n >> i for i in range(1, n.bit_length())):
        for i in (i for i in range(n) if not i & half):
            pair = rows[i], rows[i + half]
            left = [x + n - half if x & half else x for x in range(n)]
            right = [x + n if x & half else x + half for x in range(n)]
            rows[i] = vector.shuffle(*pair, left)
            rows[i + half] = vector.shuffle(*pair, right)
    return rows
