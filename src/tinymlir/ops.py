# Tangled from notebooks/05_gpt2.md: edit the chapter, not this file.

# %% 05_gpt2.md § Four small functions (1)
"""GPT-2's operations, written as a NumPy user writes them (chapter 5).

Shapes: N tokens, E width, H heads, D = E / H, V tokens in the vocabulary.
Every function takes NumPy arrays, or the traced values that stand for them.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any  # an np.ndarray, or a traced value in its place
EPSILON = 1e-5


# %% 05_gpt2.md § Four small functions (2)
class Linear(NamedTuple):
    """A projection's weights: weight (inputs, outputs) and bias (outputs,)."""

    weight: Array
    bias: Array


class LayerNorm(NamedTuple):
    """A layer norm's weights: gain (E,) and bias (E,)."""

    gain: Array
    bias: Array


# %% 05_gpt2.md § Four small functions (3)
def linear(x: Array, weight: Array, bias: Array) -> Array:
    """Every row times a matrix, plus a bias: (N, inputs) -> (N, outputs)."""
    return x @ weight + bias


# %% 05_gpt2.md § Four small functions (4)
def layer_norm(x: Array, gain: Array, bias: Array) -> Array:
    """Each row to mean 0 and variance 1, scaled and shifted: (N, E) -> (N, E)."""
    mean = np.mean(x, axis=-1, keepdims=True)
    variance = np.var(x, axis=-1, keepdims=True)
    return gain * (x - mean) / np.sqrt(variance + EPSILON) + bias


# %% 05_gpt2.md § Four small functions (5)
def gelu(x: Array) -> Array:
    """The bend of the network, as GPT-2 approximates it: any shape to the same."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


# %% 05_gpt2.md § Four small functions (6)
def softmax(x: Array) -> Array:
    """Each row to weights that add up to 1: any shape to the same."""
    powers = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return powers / np.sum(powers, axis=-1, keepdims=True)


# %% 05_gpt2.md § Attention (1)
def causal_mask(n: int, dtype: Any) -> np.ndarray:
    """0 where a token may look, -inf where the other is later: (N, N)."""
    return np.triu(np.ones((n, n), dtype=dtype) * -np.inf, k=1)


# %% 05_gpt2.md § Attention (2)
def split_heads(x: Array, heads: int) -> Array:
    """(N, E) -> (H, N, D)."""
    n, width = x.shape
    return x.reshape(n, heads, width // heads).transpose(1, 0, 2)


def merge_heads(x: Array) -> Array:
    """(H, N, D) -> (N, E)."""
    heads, n, size = x.shape
    return x.transpose(1, 0, 2).reshape(n, heads * size)


# %% 05_gpt2.md § Attention (3)
def attention(x: Array, qkv: Linear, out: Linear, heads: int) -> Array:
    """A weighted mean of each token and those before it: (N, E) -> (N, E)."""
    parts = np.split(linear(x, *qkv), 3, axis=-1)
    q, k, v = (split_heads(part, heads) for part in parts)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    weights = softmax(scores + causal_mask(x.shape[0], x.dtype))
    return linear(merge_heads(weights @ v), *out)


# %% 05_gpt2.md § Feed-forward, and the four sublayers (1)
def feed_forward(x: Array, up: Linear, down: Linear) -> Array:
    """Two projections around a GELU, each token alone: (N, E) -> (N, E)."""
    return linear(gelu(linear(x, *up)), *down)


# %% 05_gpt2.md § Feed-forward, and the four sublayers (2)
def embed(ids: Array, words: Array, positions: Array) -> Array:
    """What is known before the first block: (N,) -> (N, E)."""
    return words[ids] + positions[:len(ids)]


def attention_sublayer(x: Array, norm: LayerNorm, qkv: Linear, out: Linear, *,
                       heads: int) -> Array:
    """The residual after the first half of a block: (N, E) -> (N, E)."""
    return x + attention(layer_norm(x, *norm), qkv, out, heads)


def feed_forward_sublayer(
        x: Array, norm: LayerNorm, up: Linear, down: Linear) -> Array:
    """The residual after the second half of a block: (N, E) -> (N, E)."""
    return x + feed_forward(layer_norm(x, *norm), up, down)


def logits(x: Array, gain: Array, bias: Array, words: Array) -> Array:
    """A score for each token of the vocabulary: (1, E) -> (1, V)."""
    return layer_norm(x, gain, bias) @ words.T


# %% 05_gpt2.md § Feed-forward, and the four sublayers (3)
class Example(NamedTuple):
    """A function and the arguments to try it on."""

    function: Callable[..., Array]
    arrays: tuple[Any, ...]
    static: dict[str, Any] = {}


def sample(*shape: int) -> np.ndarray:
    """An array of float32 without any pattern that a compiler could use."""
    return np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


X, NORM = sample(16, 64), LayerNorm(sample(64), sample(64))  # N = 16, E = 64
QKV, OUT = Linear(sample(64, 192), sample(192)), Linear(sample(64, 64), sample(64))
UP, DOWN = Linear(sample(64, 256), sample(256)), Linear(sample(256, 64), sample(64))
WORDS, POSITIONS = sample(128, 64), sample(32, 64)  # V = 128


# %% 05_gpt2.md § Feed-forward, and the four sublayers (4)
EXAMPLES = {
    "linear": Example(linear, (X, *OUT)),
    "layer_norm": Example(layer_norm, (X, *NORM)),
    "gelu": Example(gelu, (X,)),
    "softmax": Example(softmax, (X,)),
    "attention": Example(attention, (X, QKV, OUT), {"heads": 4}),
    "feed_forward": Example(feed_forward, (X, UP, DOWN)),
    "embed": Example(embed, (np.arange(16), WORDS, POSITIONS)),
    "attention_sublayer": Example(
        attention_sublayer, (X, NORM, QKV, OUT), {"heads": 4}),
    "feed_forward_sublayer": Example(feed_forward_sublayer, (X, NORM, UP, DOWN)),
    "logits": Example(logits, (X[-1:], *NORM, WORDS)),
}
