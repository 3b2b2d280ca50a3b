# Tangled from notebooks/07_parity.md: edit the chapter, not this file.

# %% 07_parity.md § When are two numbers equal? (1)
"""Our model against a reference, residual by residual (chapter 7)."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from tinymlir.checkpoint import Params
from tinymlir.errors import GenerationError
from tinymlir.fused import residual_names
from tinymlir.model import check_length, encode, greedy
from tinymlir.reference import forward

TOLERANCE = 3e-4  # absolute, and relative to the reference


@dataclass(frozen=True)
class Row:
    """How far an array is from the reference's; later, the worst of all steps."""

    name: str
    dtype: np.dtype  # the reference's, as the shape
    shape: tuple[int, ...]
    largest: float  # absolute difference
    ulps: float
    step: int  # of the largest difference
    ok: bool
    note: str = ""


# %% 07_parity.md § When are two numbers equal? (2)
def compare(name: str, step: int, ours: np.ndarray, want: np.ndarray,
            tolerance: float = TOLERANCE) -> Row:
    """Equal dtype, equal shape, and every element within the tolerance?"""
    if (ours.dtype, ours.shape) != (want.dtype, want.shape):
        note = f"got {ours.dtype} {ours.shape}"
        return Row(name, want.dtype, want.shape, np.inf, np.inf, step, False, note)
    x, y = ours.astype(np.float64), want.astype(np.float64)
    with np.errstate(all="ignore"):
        gap = np.nan_to_num(np.where(x == y, 0.0, np.abs(x - y)), nan=np.inf)
        ulps = gap / np.spacing(np.maximum(np.abs(ours), np.abs(want)))
        ok = (gap < np.inf) & (gap <= tolerance * (1 + np.abs(y)))
    ulps = np.nan_to_num(ulps, nan=np.inf)
    return Row(name, want.dtype, want.shape, float(np.max(gap)), float(np.max(ulps)),
               step, bool(np.all(ok)))


def worse(a: Row, b: Row) -> Row:
    """Two steps of one tensor as one row: the worse one, with the later shape."""
    worst = max(a, b, key=lambda row: (not row.ok, row.largest))
    return replace(worst, shape=b.shape, ulps=max(a.ulps, b.ulps))


# %% 07_parity.md § Step by step (1)
class Step(NamedTuple):
    """What a reference made of a row of tokens."""

    residuals: dict[str, np.ndarray]  # and the logits, by name, in network order
    token: int  # the next one
    text: str | None = None  # of its tokens so far, if it has a tokenizer of its own


class Reference(Protocol):
    """Whatever else can run the model."""

    about: str

    def __call__(self, prompt: str, ids: list[int], tokens: int) -> Iterator[Step]:
        """Go on from `ids`, the tokens of `prompt`, for so many steps."""


@dataclass(frozen=True)
class ByNumPy:
    """The forward pass of chapter 6, as it is written."""

    params: Params
    heads: int
    about: str = "tinymlir.reference, run by NumPy"

    def __call__(self, prompt: str, ids: list[int], tokens: int) -> Iterator[Step]:
        ids, names = list(ids), residual_names(len(self.params.blocks))
        for _ in range(tokens):
            kept: list[np.ndarray] = []
            logits = forward(np.array(ids), self.params, self.heads, kept)[-1:]
            ids.append(greedy(logits[0]))
            yield Step({**dict(zip(names, kept)), "logits": logits}, ids[-1])


# %% 07_parity.md § Step by step (2)
class Place(NamedTuple):
    """A residual of one step, and the tokens it was computed from."""

    name: str
    step: int
    ids: list[int]


class Text(NamedTuple):
    """What was written, and by whom."""

    author: str
    tokens: list[int]
    text: str


@dataclass(frozen=True)
class Report:
    """What `verify` has found."""

    rows: tuple[Row, ...]  # in network order
    texts: tuple[Text, ...]  # ours, then those that it has to equal
    first: Place | None  # the first residual that is not OK

    @property
    def ok(self) -> bool:
        same = all(text[1:] == self.texts[0][1:] for text in self.texts)
        return same and all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row:
        return max(self.rows, key=lambda row: (not row.ok, row.largest))


# %% 07_parity.md § Step by step (3)
def compare_step(model: Any, ids: list[int], number: int, step: Step
                 ) -> tuple[int, list[Row]]:
    """Our next token, and a row for each residual, the logits and the token."""
    got: dict[str, np.ndarray] = {}
    token = greedy(model(ids, trace=got)[0])
    rows = [compare(name, number, got[name], want)
            for name, want in step.residuals.items()]
    chosen = compare("token", number, np.array(token), np.array(step.token), 0)
    return token, [*rows, chosen]


def verify(model: Any, tokenizer: Any, prompt: str, tokens: int,
           reference: Reference | None = None, known: Text | None = None) -> Report:
    """Compare every residual of every step with the reference's.

    `known` is a text that has to come out as well. Raises GenerationError for a
    request that cannot be met, and what the reference raises if it cannot run."""
    ids = check_request(model, tokenizer, prompt, tokens)
    reference = reference or ByNumPy(model.params, model.config.heads)
    rows: dict[str, Row] = {}
    ours, theirs, first, text = [], [], None, None
    for number, step in enumerate(reference(prompt, ids, tokens), 1):
        token, found = compare_step(model, [*ids, *theirs], number, step)
        bad = [row.name for row in found if not row.ok]
        if bad and first is None:
            first = Place(bad[0], number, [*ids, *theirs])
        rows |= {row.name: worse(rows.get(row.name, row), row) for row in found}
        ours, theirs, text = [*ours, token], [*theirs, step.token], step.text
    mine, decoded = (tokenizer.decode(t, skip_special_tokens=False)
                     for t in (ours, theirs))
    others = [Text("the reference", theirs, decoded if text is None else text), known]
    texts = Text("tinymlir", ours, mine), *(other for other in others if other)
    return Report(tuple(rows.values()), texts, first)


# %% 07_parity.md § Step by step (4)
def check_request(model: Any, tokenizer: Any, prompt: str, tokens: int) -> list[int]:
    """The tokens of the prompt. Raises GenerationError."""
    if tokens < 1:
        raise GenerationError(f"tokens: expected 1 or more, got {tokens}")
    ids = encode(tokenizer, prompt)
    check_length(len(ids), tokens, model.config.context)
    return ids


# %% 07_parity.md § Step by step (5)
def table(report: Report, number: Callable[[float], str] = "{:.1e}".format) -> str:
    """The rows of a report as text, in network order."""
    cells = [("tensor", "dtype", "shape", "max abs", "max ulp", "")]
    for row in report.rows:
        shape = "(" + ", ".join(map(str, row.shape)) + ")"
        verdict = "OK" if row.ok else " ".join(["NOT OK", row.note]).strip()
        cells.append((row.name, str(row.dtype), shape, number(row.largest),
                      number(row.ulps), verdict))
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(
        cell.rjust(width) if 3 <= i <= 4 else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in cells)


def summary(report: Report, number: Callable[[float], str] = "{:.1e}".format) -> str:
    """The worst difference, the tokens and the text."""
    worst, (ours, *others) = report.worst, report.texts
    lines = [f"worst: {worst.name}, step {worst.step}: {number(worst.largest)}",
             f"tokens: {ours.tokens}", f"text: {ours.text!r}"]
    for other in others:
        if other[1:] != ours[1:]:
            lines += [f"but {other.author} has {other.tokens}, {other.text!r}"]
    return "\n".join(lines)
