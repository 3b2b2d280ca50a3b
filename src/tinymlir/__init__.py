"""tinymlir: a tensor compiler that is a book (see notebooks/).

    from tinymlir import jit, load_model, generate

This file is hand-written and lazy (PEP 562): a name is looked up in the module of its
chapter when it is used.  It must not import a chapter's module by itself, because a
chapter's notebook builds that module cell by cell (see `tinymlir.literate`).
"""
from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinymlir import errors
    from tinymlir.expr import Expr
    from tinymlir.jit import jit
    from tinymlir.model import generate, load_model

__version__ = "0.1.0"
__all__ = ["Expr", "errors", "generate", "jit", "load_model"]

HOMES = {"Expr": "expr", "jit": "jit", "load_model": "model", "generate": "model"}
WITH = {"jit": "outline"}  # a later chapter's module that teaches this name more


def __getattr__(name: str) -> Any:
    if name in HOMES:
        if name in WITH:
            import_module(f"tinymlir.{WITH[name]}")
        return getattr(import_module(f"tinymlir.{HOMES[name]}"), name)
    if name == "errors":
        return import_module("tinymlir.errors")
    raise AttributeError(f"module 'tinymlir' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing a submodule binds it on its package; where a public function has the
    submodule's name (`tinymlir.jit`), the function keeps the name."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in HOMES and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
