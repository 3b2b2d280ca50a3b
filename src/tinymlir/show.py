"""Listings: text that knows its language (hand-written; no chapter owns it).

A `Listing` prints as it is in a terminal, and is highlighted in Jupyter and in the book.
"""
from __future__ import annotations

import difflib
import re


class Listing:
    """`text` in a language that Pygments, or the book's MLIR lexer, can highlight."""

    def __init__(self, text: object, language: str = "mlir") -> None:
        self.text, self.language = str(text).rstrip(), language

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        ticks = max(map(len, re.findall(r"`+", self.text)), default=0)
        fence = "`" * max(3, ticks + 1)
        return f"{fence}{self.language}\n{self.text}\n{fence}"


def mlir(module: object) -> Listing:
    """A module, an operation or a string of MLIR."""
    return Listing(module, "mlir")


def llvm(text: object) -> Listing:
    """LLVM IR."""
    return Listing(text, "llvm")


def ptx(text: object) -> Listing:
    """PTX, the assembly language of NVIDIA's virtual machine."""
    return Listing(text, "ptx")


def asm(text: object) -> Listing:
    """The host's assembly language."""
    return Listing(text, "gas")


def diff(before: object, after: object, context: int = 3) -> Listing:
    """What changed from one listing to the next, as a unified diff without its header."""
    old, new = str(before).splitlines(), str(after).splitlines()
    lines = list(difflib.unified_diff(old, new, n=context, lineterm=""))[2:]
    return Listing("\n".join(lines) or "(no change)", "diff")
