# Tangled from notebooks/06_fused.md: edit the chapter, not this file.

# %% 06_fused.md § The whole model as one module (1)
"""GPT-2 as one compiled function (chapter 6)."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import tinymlir.outline  # noqa: F401  adds its rewrites
from tinymlir.checkpoint import Config, Params
from tinymlir.jit import Jitted, jit
from tinymlir.model import check_ids, check_length, placed
from tinymlir.reference import forward


def after_last(ids: Any, last: Any, params: Params, *, heads: int, residuals: bool
               ) -> tuple[Any, list[Any]]:
    """The logits (V,) after token `last` and, if asked for, every residual."""
    kept: list[Any] = []
    logits = forward(ids, params, heads, kept)[last]
    return logits, kept if residuals else []


@cache
def compiled(target: str, dtype: str | None, precision: str) -> Jitted:
    """The function above, compiled as these options of `jit` say."""
    return jit(after_last, target=target, dtype=dtype, precision=precision)


last_logits = compiled("cpu", None, "float32")


# %% 06_fused.md § The whole model as one module (2)
def padded(ids: np.ndarray, context: int) -> np.ndarray:
    """The ids, followed by zeros up to a power of two or the context."""
    length = min(1 << (len(ids) - 1).bit_length(), context)
    return np.concatenate([ids, np.zeros(length - len(ids), ids.dtype)])


@dataclass(frozen=True)
class FusedModel:
    """A GPT-2 as one function. `model(ids)` gives the logits of the next token."""

    config: Config
    params: Params
    run: Jitted = last_logits
    dtype: str | None = None
    weights: Params | None = None  # the same, where `run` wants them

    def __call__(self, ids: Any, trace: dict[str, Any] | None = None) -> np.ndarray:
        """Token ids (N,) -> logits (1, V); `trace` receives every residual by name.

        Raises GenerationError, DTypeError or OutOfRangeError for ids that are
        none."""
        ids = check_ids(ids, self.config.vocabulary)
        check_length(len(ids), 0, self.config.context)
        logits, kept = self.run(
            padded(ids, self.config.context), np.array(len(ids) - 1),
            self.weights or self.params,
            heads=self.config.heads, residuals=trace is not None)
        logits = np.asarray(logits)  # it may be on a device
        if trace is not None:
            names = residual_names(self.config.blocks)
            trace |= {name: np.asarray(x)[:len(ids)]
                      for name, x in zip(names, kept)}
            trace["logits"] = logits[None]
        return logits[None]


def residual_names(blocks: int) -> list[str]:
    """What `Model` calls the residuals, in network order."""
    halves = [f"block {i} {half}" for i in range(blocks)
              for half in ("attention", "feed-forward")]
    return ["embedding", *halves]


def build(config: Config, params: Params, target: str, dtype: str | None,
          precision: str = "float32") -> FusedModel:
    """What load_model(fused=True) makes."""
    run = compiled(target, dtype, precision)
    return FusedModel(config, params, run, dtype, placed(params, target))
