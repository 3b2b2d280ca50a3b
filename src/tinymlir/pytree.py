# Tangled from notebooks/01_expr.md: edit the chapter, not this file.

# %% 01_expr.md § Pytrees (1)
"""Containers of arrays, taken apart and put together again (chapter 1)."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tinymlir.errors import ArgumentError
from tinymlir.expr import Expr

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type, np.dtype)
SPELLED: dict[type, Callable[[Any], Any]] = {  # where == is too generous
    float: repr, complex: repr, range: repr,
    frozenset: lambda value: frozenset(map(freeze, value)),
}
DEEPEST = 100  # containers in containers


def freeze(value: Any, depth: int = 0) -> tuple:
    """A hashable key that tells apart what a program could tell apart."""
    kind = type(value)
    if kind in SPELLED:
        return kind, SPELLED[kind](value)
    if isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    if isinstance(value, PLAIN):
        return kind, value
    if (split := children(value)) is not None:
        too_deep("a static argument", depth)
        return kind, *((freeze(k), freeze(part, depth + 1)) for k, part in split)
    if isinstance(value, np.ndarray) or kind.__hash__ is None:
        raise ArgumentError(
            f"a static argument has to be hashable, not {kind.__name__}; pass "
            f"arrays by position")
    return kind, value


def too_deep(path: str, depth: int) -> None:
    """Raise ArgumentError for a tree that has no end, or is much too deep."""
    if depth >= DEEPEST:
        raise ArgumentError(f"{path[:40]} contains itself, or is more than "
                            f"{DEEPEST} containers deep")


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
    parts: tuple[Structure, ...] | None = None  # of a container
    frozen: tuple = ()  # the static value, or the keys of a dict
    keys: tuple = dataclasses.field(default=(), compare=False)
    static: Any = dataclasses.field(default=None, compare=False)

    def fill(self, leaves: Iterator) -> Any:
        """The tree again, its leaves taken in order from the iterator."""
        if self.kind is Leaf:
            return next(leaves)
        if self.parts is None:
            return self.static
        parts = [part.fill(leaves) for part in self.parts]
        return join(self.kind, self.keys, parts)


class Leaf:
    """Stands for the type of an array in a structure."""


LEAF = Structure(Leaf)


def on_device(value: Any) -> bool:
    """Is this an array in the memory of a GPU?"""
    return hasattr(type(value), "__cuda_array_interface__")


# %% 01_expr.md § Pytrees (4)
def flatten(tree: Any, path: str, depth: int = 0
            ) -> tuple[list[tuple[str, Any]], Structure]:
    """All arrays of a tree with their paths, and the structure around them.

    Raises ArgumentError, with the path, for an object that is no pytree."""
    if isinstance(tree, (np.ndarray, Expr, np.generic)) or on_device(tree):
        return [(path, tree)], LEAF
    if isinstance(tree, PLAIN):
        return [], Structure(type(tree), frozen=freeze(tree), static=tree)
    split = children(tree)
    if split is None:
        raise ArgumentError(
            f"{path} is a {type(tree).__name__}; expected an array, a number, or a "
            f"tuple, list, dict, namedtuple or dataclass of them")
    too_deep(path, depth)
    attribute = type(tree) not in (list, tuple, dict)
    leaves, parts = [], []
    for key, part in split:
        name = f"{path}.{key}" if attribute else f"{path}[{key!r}]"
        found, structure = flatten(part, name, depth + 1)
        leaves += found
        parts.append(structure)
    keys = tuple(key for key, _ in split)
    frozen = tuple(map(freeze, keys)) if type(tree) is dict else ()
    return leaves, Structure(type(tree), tuple(parts), frozen, keys)


def flatten_all(args: Sequence[Any], names: Sequence[str]
                ) -> tuple[list[tuple[str, Any]], tuple[Structure, ...]]:
    """The arrays of several trees, with their paths, and the structures."""
    leaves, structures = [], []
    for name, arg in zip(names, args):
        found, structure = flatten(arg, name)
        leaves += found
        structures.append(structure)
    return leaves, tuple(structures)
