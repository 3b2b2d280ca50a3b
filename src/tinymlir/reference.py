# Tangled from notebooks/06_fused.md: edit the chapter, not this file.

# %% 06_fused.md § The forward pass (1)
"""GPT-2 in plain NumPy: what every other way to run it is held to (chapter 6)."""
from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # an np.ndarray, or a traced value in its place


def normalise(x: Array, gain: Array, bias: Array) -> Array:
    """Layer norm over the last axis: (N, E) -> (N, E)."""
    mean = np.mean(x, axis=-1, keepdims=True)
    variance = np.var(x, axis=-1, keepdims=True)
    return gain * (x - mean) / np.sqrt(variance + 1e-5) + bias


def attend(x: Array, qkv: Any, out: Any, heads: int, number: type) -> Array:
    """Causal attention: (N, E) -> (N, E)."""
    n, width = x.shape
    parts = np.split(x @ qkv.weight + qkv.bias, 3, axis=-1)
    q, k, v = (part.reshape(n, heads, width // heads).transpose(1, 0, 2)
               for part in parts)
    mask = np.triu(np.ones((n, n), dtype=x.dtype) * -np.inf, k=1)
    scores = q @ k.transpose(0, 2, 1) / number(np.sqrt(width // heads)) + mask
    powers = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    mixed = powers / np.sum(powers, axis=-1, keepdims=True) @ v
    return mixed.transpose(1, 0, 2).reshape(n, width) @ out.weight + out.bias


# %% 06_fused.md § The forward pass (2)
def expand(x: Array, up: Any, down: Any, number: type) -> Array:
    """The feed-forward layer with its GELU: (N, E) -> (N, E)."""
    h = x @ up.weight + up.bias
    root = number(np.sqrt(2 / np.pi))
    h = 0.5 * h * (1 + np.tanh(root * (h + 0.044715 * h**3)))
    return h @ down.weight + down.bias


def forward(ids: Array, params: Any, heads: int,
            residuals: list[Array] | None = None, number: type = np.float64
            ) -> Array:
    """Token ids (N,) -> the logits after each of them (N, V).

    `residuals`, if given, receives the embedding and two residuals a block. The
    two square roots that promote to float64 are of the type `number`; with
    np.float32 everything is float32."""
    keep = residuals if residuals is not None else []
    x = params.words[ids] + params.positions[:len(ids)]
    keep.append(x)
    for block in params.blocks:
        h = normalise(x, *block.norm_1)
        x = x + attend(h, block.qkv, block.out, heads, number)
        keep.append(x)
        x = x + expand(normalise(x, *block.norm_2), block.up, block.down, number)
        keep.append(x)
    return normalise(x, *params.norm) @ params.words.T
