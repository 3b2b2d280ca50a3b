# Tangled from notebooks/92_pictures.md: edit the chapter, not this file.

# %% 92_pictures.md § What it looks at (1)
"""Pictures of what a model does with a sentence (appendix)."""
from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinymlir.jit import jit
from tinymlir.ops import (
    Array, LayerNorm, Linear, causal_mask, layer_norm, linear, softmax, split_heads)


@jit
def attention_weights(x: Array, norm: LayerNorm, qkv: Linear, *,
                      heads: int) -> Array:
    """How much each token looks at each: (N, E) -> (H, N, N)."""
    parts = np.split(linear(layer_norm(x, *norm), *qkv), 3, axis=-1)
    q, k, _ = (split_heads(part, heads) for part in parts)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    return softmax(scores + causal_mask(x.shape[0], x.dtype))


# %% 92_pictures.md § What it looks at (2)
def all_weights(model: Any, residuals: dict[str, np.ndarray]) -> np.ndarray:
    """The weights of all heads of all blocks: (blocks, H, N, N)."""
    names = ["embedding"] + [
        f"block {i} feed-forward" for i in range(model.config.blocks - 1)]
    return np.stack([
        attention_weights(residuals[name], block.norm_1, block.qkv,
                          heads=model.config.heads)
        for name, block in zip(names, model.params.blocks)])


# %% 92_pictures.md § Drawing (1)
INK, GROUND, HOT = "#1f2937", "#ffffff", "#0f766e"
SHADES = 20  # that a weight is rounded to


@dataclass(frozen=True)
class Picture:
    """SVG of a size, and what it shows in words."""

    width: int
    height: int
    alt: str
    body: str

    def __repr__(self) -> str:
        return f"<picture: {self.alt}>"

    def _repr_html_(self) -> str:
        alt = html.escape(self.alt)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'aria-label="{alt}" width="{self.width}" '
            f'viewBox="0 0 {self.width} {self.height}" '
            f'font-family="sans-serif" font-size="11" fill="{INK}">'
            f'<title>{alt}</title>'
            f'<rect width="100%" height="100%" fill="{GROUND}"/>{self.body}</svg>')


# %% 92_pictures.md § Drawing (2)
def squares(table: np.ndarray, x: float, y: float, size: float) -> str:
    """A square for each number from 0 to 1, the darker the larger: (N, M)."""
    shade = np.rint(np.clip(table, 0, 1) * SHADES).astype(int)
    paths = []
    for level in range(1, SHADES + 1):
        places = np.argwhere(shade == level)
        if len(places):
            d = "".join(f"M{x + column * size:g} {y + row * size:g}h{size:g}"
                        f"v{size:g}h-{size:g}z" for row, column in places)
            paths.append(f'<path fill="{HOT}" fill-opacity="{level / SHADES:g}" '
                         f'd="{d}"/>')
    return "".join(paths)


def words(x: float, y: float, text: str, anchor: str = "start",
          extra: str = "") -> str:
    """A line of text."""
    return (f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {extra}>'
            f'{html.escape(text)}</text>')


def visible(token: str) -> str:
    """A token with a sign for its space, and for the end of a line."""
    return token.replace(" ", "·").replace("\n", "⏎")


# %% 92_pictures.md § Drawing (3)
def draw_heads(weights: np.ndarray, size: int = 84) -> Picture:
    """All heads of all blocks, a row for each block: (blocks, H, N, N)."""
    blocks, heads, n, _ = weights.shape
    body = []
    for head in range(heads):
        body.append(words(44 + head * (size + 8) + size / 2, 12, f"head {head}",
                          "middle"))
    for block in range(blocks):
        top = 18 + block * (size + 8)
        body.append(words(2, top + size / 2, f"block {block}"))
        for head in range(heads):
            left = 44 + head * (size + 8)
            body.append(f'<rect x="{left}" y="{top}" width="{size}" '
                        f'height="{size}" fill="none" stroke="#cbd5e1"/>')
            body.append(squares(weights[block, head], left, top, size / n))
    alt = (f"Attention weights of {blocks} blocks with {heads} heads on {n} "
           f"tokens; each is a lower triangle")
    return Picture(44 + heads * (size + 8), 18 + blocks * (size + 8), alt,
                   "".join(body))


# %% 92_pictures.md § Drawing (4)
def draw_head(weights: np.ndarray, tokens: Sequence[str]) -> Picture:
    """One head with the tokens beside it: (N, N)."""
    n, size, left, top = len(tokens), 26, 84, 78
    body = [squares(weights, left, top, size)]
    for i, token in enumerate(tokens):
        middle = i * size + size / 2 + 4
        body.append(words(left - 6, top + middle, visible(token), "end"))
        place = left + middle, top - 6
        turned = f'transform="rotate(-60 {place[0]:g} {place[1]:g})"'
        body.append(words(*place, visible(token), "start", turned))
        most = visible(tokens[int(np.argmax(weights[i]))])
        body.append(words(left + n * size + 8, top + middle, f"looks at {most}"))
    frame = (f'<rect x="{left}" y="{top}" width="{n * size}" height="{n * size}" '
             f'fill="none" stroke="#cbd5e1"/>')
    alt = "Where each token looks most: " + "; ".join(
        f"{token} at {tokens[int(np.argmax(row))]}"
        for token, row in zip(tokens, weights))
    return Picture(left + n * size + 150, top + n * size + 8, alt,
                   frame + "".join(body))


# %% 92_pictures.md § What it would say (1)
@jit
def lens(x: Array, gain: Array, bias: Array, table: Array) -> tuple[Array, Array]:
    """Scores if the network ended here, and their softmax: (N, E) -> (N, V)."""
    scores = layer_norm(x, gain, bias) @ table.T
    return scores, softmax(scores)


def stations(residuals: dict[str, np.ndarray]) -> list[str]:
    """The residuals between blocks, in network order."""
    return [name for name in residuals
            if name == "embedding" or name.endswith("feed-forward")]


def read_lens(model: Any, residuals: dict[str, np.ndarray]
              ) -> tuple[np.ndarray, np.ndarray]:
    """The best token after each block at each place, and how sure it is."""
    best, sure = [], []
    for name in stations(residuals):
        scores, odds = lens(residuals[name], *model.params.norm, model.params.words)
        best.append(scores.argmax(-1))
        sure.append(odds.max(-1))
    return np.stack(best), np.stack(sure)


# %% 92_pictures.md § What it would say (2)
def draw_lens(best: Iterable[Sequence[str]], sure: np.ndarray,
              tokens: Sequence[str]) -> Picture:
    """A row for each block, from the last at the top to the embedding."""
    rows, wide, high, left = list(best), 62, 22, 66
    body = []
    for i, row in enumerate(reversed(rows)):
        block = len(rows) - 1 - i
        top = 4 + i * high
        name = f"block {block - 1}" if block else "embedding"
        body.append(words(2, top + 15, name))
        for j, word in enumerate(row):
            shade = np.rint(sure[block, j] * SHADES) / SHADES * 0.6
            body.append(f'<rect x="{left + j * wide}" y="{top}" width="{wide - 2}" '
                        f'height="{high - 2}" fill="{HOT}" '
                        f'fill-opacity="{shade:g}"/>')
            body.append(words(left + j * wide + wide / 2 - 1, top + 15,
                              visible(word[:11]), "middle"))
    foot = 4 + len(rows) * high + 16
    body.append(words(2, foot, "it read"))
    for j, token in enumerate(tokens):
        body.append(words(left + j * wide + wide / 2 - 1, foot, visible(token),
                          "middle", 'font-weight="bold"'))
    alt = "What the model would say next after each block; at the end: "
    alt += ", ".join(
        f"after {token} {word}" for token, word in zip(tokens, rows[-1]))
    return Picture(left + len(tokens) * wide, foot + 8, alt, "".join(body))
