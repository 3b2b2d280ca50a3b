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
from tinymlir.watch import watched

TOLERANCE = 3e-4  # absolute, and relative to the reference


# %% 07_parity.md § When are two numbers equal? (2)
@dataclass(frozen=True)
class Row:
    """How far an array is from the reference's; later, the worst of all steps."""

    name: str
    dtype: np.dtype  # the reference's, as the shape
    shape: tuple[int, ...]
    largest: float  # absolute difference
    ulps: float  # the same, in ulps of the reference's largest element
    step: int  # of the largest difference
    ok: bool
    note: str = ""


# %% 07_parity.md § When are two numbers equal? (3)
def compare(name: str, step: int, ours: np.ndarray, want: np.ndarray,
            tolerance: float = TOLERANCE) -> Row:
    """Equal dtype, equal shape, and every element within the tolerance?"""
    if (ours.dtype, ours.shape) != (want.dtype, want.shape):
        note = f"got {ours.dtype} {ours.shape}"
        return Row(name, want.dtype, want.shape, np.inf, np.inf, step, False, note)
    x, y = ours.astype(np.float64), want.astype(np.float64)
    with np.errstate(all="ignore"):
        gap = np.where(x == y, 0.0, np.abs(x - y))
        gap = np.where(np.isnan(gap), np.inf, gap)
        ok = (gap < np.inf) & (gap <= tolerance * (1 + np.abs(y)))
        largest = float(np.max(gap))
        ulps = float(largest / np.spacing(np.max(np.abs(want)))) if largest else 0.0
    ulps = np.inf if np.isnan(ulps) else ulps
    return Row(name, want.dtype, want.shape, largest, ulps, step, bool(np.all(ok)))


def worse(a: Row, b: Row) -> Row:
    """Two steps of one tensor as one row: the worse one, with the later shape."""
    worst = max(a, b, key=lambda row: (not row.ok, row.largest))
    return replace(worst, shape=b.shape, ulps=max(a.ulps, b.ulps))


# %% 07_parity.md § Step by step (1)
class Step(NamedTuple):
    """What a reference made of a row of tokens."""

    residuals: dict[str, np.ndarray]  # and the logits, by name, in network order
    token: int  # the next one
    text: str | None = None  # so far, if it has a tokenizer of its own


class Reference(Protocol):
    """Whatever else can run the model."""

    about: str

    def __call__(self, prompt: str, ids: list[int], tokens: int) -> Iterator[Step]:
        """Go on from `ids`, the tokens of `prompt`, for so many steps."""


# %% 07_parity.md § Step by step (2)
@dataclass(frozen=True)
class ByNumPy:
    """The forward pass of chapter 6, as it is written."""

    params: Params
    heads: int
    dtype: str | None = None  # as in load_model
    about: str = "tinymlir.reference, run by NumPy"

    def __call__(self, prompt: str, ids: list[int], tokens: int) -> Iterator[Step]:
        ids, names = list(ids), residual_names(len(self.params.blocks))
        number = np.dtype(self.dtype or np.float64).type
        for _ in range(tokens):
            kept: list[np.ndarray] = []
            with watched("NumPy"):  # it may take seconds
                logits = forward(
                    np.array(ids), self.params, self.heads, kept, number)[-1:]
            ids.append(greedy(logits[0]))
            yield Step({**dict(zip(names, kept)), "logits": logits}, ids[-1])


# %% 07_parity.md § Step by step (3)
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


# %% 07_parity.md § Step by step (4)
@dataclass(frozen=True)
class Report:
    """What `verify` has found."""

    reference: str
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


# %% 07_parity.md § Step by step (5)
def compare_step(model: Any, ids: list[int], number: int, step: Step
                 ) -> tuple[int, list[Row]]:
    """Our next token, and a row for each residual, the logits and the token."""
    got: dict[str, np.ndarray] = {}
    token = greedy(model(ids, trace=got)[0])
    rows = [compare(name, number, got[name], want)
            for name, want in step.residuals.items()]
    chosen = compare("token", number, np.array(token), np.array(step.token), 0)
    return token, [*rows, chosen]


def check_request(model: Any, tokenizer: Any, prompt: str, tokens: int
                  ) -> list[int]:
    """The tokens of the prompt. Raises GenerationError."""
    if tokens < 1:
        raise GenerationError(f"tokens: expected 1 or more, got {tokens}")
    ids = encode(tokenizer, prompt)
    check_length(len(ids), tokens, model.config.context)
    return ids


# %% 07_parity.md § Step by step (6)
def verify(model: Any, tokenizer: Any, prompt: str, tokens: int,
           reference: Reference | None = None, known: Text | None = None) -> Report:
    """Compare every residual of every step with the reference's.

    `known` is a text that has to come out as well. Raises GenerationError for a
    request that cannot be met, and what the reference raises if it cannot run."""
    ids = check_request(model, tokenizer, prompt, tokens)
    reference = reference or ByNumPy(
        model.params, model.config.heads, model.dtype)
    rows: dict[str, Row] = {}
    ours, theirs, first, text = [], [], None, None
    for number, step in enumerate(reference(prompt, ids, tokens), 1):
        before = [*ids, *theirs]
        token, found = compare_step(model, before, number, step)
        bad = [row.name for row in found if not row.ok]
        if bad and first is None:
            first = Place(bad[0], number, before)
        rows |= {row.name: worse(rows.get(row.name, row), row) for row in found}
        ours, theirs, text = [*ours, token], [*theirs, step.token], step.text
    texts = [decoded(tokenizer, "tinymlir", ours),
             decoded(tokenizer, "the reference", theirs, text), known]
    return Report(reference.about, tuple(rows.values()),
                  tuple(text for text in texts if text), first)


# %% 07_parity.md § Step by step (7)
def decoded(tokenizer: Any, author: str, tokens: list[int], text: str | None = None
            ) -> Text:
    """The text of the tokens, unless the author has said what it is."""
    if text is None:
        text = tokenizer.decode(tokens, skip_special_tokens=False)
    return Text(author, tokens, text)


# %% 07_parity.md § Step by step (8)
def digits(x: float) -> str:
    return f"{x:.1e}" if x else "0"


def table(report: Report, number: Callable[[float], str] = digits) -> str:
    """The rows of a report as text, in network order."""
    cells = [("tensor", "dtype", "shape", "max abs", "max ulp", "")]
    for row in report.rows:
        shape = "(" + ", ".join(map(str, row.shape)) + ")"
        verdict = "OK" if row.ok else " ".join(["NOT OK", row.note]).strip()
        cells.append((row.name, str(row.dtype), shape, number(row.largest),
                      number(row.ulps), verdict))
    widths = [max(map(len, column)) for column in zip(*cells)]
    sides = (str.ljust, str.ljust, str.ljust, str.rjust, str.rjust, str.ljust)
    lines = ([side(cell, width) for side, cell, width in zip(sides, line, widths)]
             for line in cells)
    return "\n".join("  ".join(line).rstrip() for line in lines)


# %% 07_parity.md § Step by step (9)
def summary(report: Report, number: Callable[[float], str] = digits) -> str:
    """The worst difference, the tokens and the text."""
    worst, (ours, *others) = report.worst, report.texts
    lines = [f"reference: {report.reference}",
             f"worst: {worst.name}, step {worst.step}: {number(worst.largest)}",
             f"tokens: {ours.tokens}", f"text: {ours.text!r}"]
    for other in others:
        if other[1:] != ours[1:]:
            lines += [f"but {other.author} has {other.tokens}, {other.text!r}"]
    return "\n".join(lines)


# %% 07_parity.md § The command (1)
class Known(NamedTuple):
    """A checkpoint whose text for a prompt is known."""

    digest: str  # SHA-256 of model.safetensors
    prompt: str
    text: Text


# %% 07_parity.md § The command (2)
TALE = "Once upon a time there was a"
KNOWN = [Known(
    "248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707",
    "Alan Turing theorized that computers would one day become",
    Text("the tutorial", [262, 749, 3665, 8217, 319, 262, 5440, 13, 198, 198],
         " the most powerful machines on the planet.\n\n"))]


# %% 07_parity.md § The command (3)
def choose_prompt(checkpoint: Path, prompt: str | None, tokens: int
                  ) -> tuple[str, Text | None]:
    """The prompt, by default one that suits the model; the text, if it is known."""
    weights, digest = checkpoint / "model.safetensors", ""
    if weights.exists():  # it may be in parts
        with weights.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    known = next((known for known in KNOWN if known.digest == digest), None)
    if known is None:
        return TALE if prompt is None else prompt, None
    asked = known.prompt if prompt is None else prompt
    same = (asked, tokens) == (known.prompt, len(known.text.tokens))
    return asked, known.text if same else None
