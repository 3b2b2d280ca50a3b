# Tangled from notebooks/01_expr.md: edit the chapter, not this file.

# %% 01_expr.md § Pytrees (1)
"""Containers of arrays, taken apart and put together again (chapter 1)."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tinymlir.errors import ArgumentError
from tinymlir.expr import Expr

PLAIN = (type(None), bool, int, str, bytes, complex, range, type, np.dtype)


def freeze(value: Any) -> tuple:
    """A hashable key that tells apart what a program could tell apart."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()  # tells -0.0 from 0.0, and nan equals nan
    if isinstance(value, PLAIN):
        return kind, value
    if isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    if (split := children(value)) is not None:
        return kind, *((key, freeze(part)) for key, part in split)
    if isinstance(value, np.ndarray) or kind.__hash__ is None:
        raise ArgumentError(
            f"a static argument has to be hashable, not {kind.__name__}; pass arrays "
            f"by position")
    return kind, value


# %% 01_expr.md § Pytrees (2)
def children(tree: Any) -> list[tuple[Any, Any]] | None:
    """(key, part) pairs of a container; None if it is not one."""
    if type(tree) in (list, tuple):
        return list(enumerate(tree))
    if type(tree) is dict:
        return list(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Expr)):
        return [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    return None


def join(kind: type, keys: tuple, parts: list) -> Any:
    """The inverse of `children`."""
    if kind in (list, tuple):
        return kind(parts)
    if kind is dict:
        return dict(zip(keys, parts))
    if issubclass(kind, tuple):
        return kind(*parts)
    new = object.__new__(kind)
    for key, part in zip(keys, parts):
        object.__setattr__(new, key, part)  # works for frozen dataclasses too
    return new


# %% 01_expr.md § Pytrees (3)
@dataclasses.dataclass(frozen=True)
class Structure:
    """A tree without its arrays: equal structures take equal code paths."""

    kind: type
    keys: tuple = ()
    parts: tuple[Structure, ...] = ()
    frozen: tuple = ()
    static: Any = dataclasses.field(default=None, compare=False)

    def fill(self, leaves: Iterator) -> Any:
        """The tree again, its leaves taken in order from the iterator."""
        if self.kind is Leaf:
            return next(leaves)
        if self.frozen:
            return self.static
        return join(self.kind, self.keys, [part.fill(leaves) for part in self.parts])


class Leaf:
    """Stands for the type of an array in a structure."""


LEAF = Structure(Leaf)


# %% 01_expr.md § Pytrees (4)
def flatten(tree: Any, path: str) -> tuple[list[tuple[str, Any]], Structure]:
    """All arrays of a tree with their paths, and the structure around them.

    Raises ArgumentError, with the path, for an object that is no pytree."""
    if isinstance(tree, (np.ndarray, Expr, np.generic)):
        return [(path, tree)], LEAF
    if isinstance(tree, (*PLAIN, float)):
        return [], Structure(type(tree), frozen=freeze(tree), static=tree)
    split = children(tree)
    if split is None:
        raise ArgumentError(
            f"{path} is a {type(tree).__name__}; expected an array, a number, or a "
            f"tuple, list, dict, namedtuple or dataclass of them")
    attribute = type(tree) not in (list, tuple, dict)
    leaves, parts = [], []
    for key, part in split:
        name = f"{path}.{key}" if attribute else f"{path}[{key!r}]"
        found, structure = flatten(part, name)
        leaves += found
        parts.append(structure)
    keys = tuple(key for key, _ in split)
    return leaves, Structure(type(tree), keys, tuple(parts))
