# Tangled from notebooks/10_cache.md: edit the chapter, not this file.

# %% 10_cache.md § One step at any position (1)
"""GPT-2 that remembers the keys and values of its tokens (chapter 10)."""
from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

import tinymlir.outline  # noqa: F401  adds its rewrites
from tinymlir.checkpoint import Config, Params
from tinymlir.fused import residual_names
from tinymlir.jit import Bound, Jitted, jit
from tinymlir.model import check_ids, check_length, placed
from tinymlir.ops import merge_heads, split_heads
from tinymlir.reference import expand, normalise
from tinymlir.updates import attend, update

Array = Any  # an np.ndarray, or a traced value in its place


def attend_to_all(x: Array, block: Any, keys: Array, values: Array, position: Array,
                  heads: int) -> tuple[Array, Array, Array]:
    """Attention of new tokens (N, E) to all so far, and the buffers with them."""
    qkv = x @ block.qkv.weight + block.qkv.bias
    q, k, v = np.split(qkv, 3, axis=-1)
    keys, values = update(keys, k, position), update(values, v, position)
    scale = np.sqrt(x.shape[-1] // heads)
    mixed = attend(split_heads(q, heads), keys, values, position, scale)
    return merge_heads(mixed) @ block.out.weight + block.out.bias, keys, values


# %% 10_cache.md § One step at any position (2)
def step(ids: Array, position: Array, last: Array, params: Params,
         keys: tuple[Array, ...], values: tuple[Array, ...], *, heads: int,
         residuals: bool) -> tuple[Array, list[Array], tuple, tuple]:
    """Tokens (N,) that follow `position` others: the logits (V,) after number
    `last` of them, their residuals if asked for, and the buffers."""
    x = params.words[ids] + params.positions[position + np.arange(len(ids))]
    kept, new = [x], []
    for block, *old in zip(params.blocks, keys, values):
        h = normalise(x, *block.norm_1)
        mixed, *buffers = attend_to_all(h, block, *old, position, heads)
        x = x + mixed
        kept.append(x)
        h = normalise(x, *block.norm_2)
        x = x + expand(h, block.up, block.down, np.float64)
        kept.append(x)
        new.append(buffers)
    logits = (normalise(x, *params.norm) @ params.words.T)[last]
    return logits, kept if residuals else [], *(tuple(b) for b in zip(*new))


@cache
def compiled(target: str, dtype: str | None, precision: str) -> Jitted:
    """The step, compiled as these options of `jit` say."""
    return jit(step, target=target, dtype=dtype, precision=precision,
               donate=("keys", "values"))


# %% 10_cache.md § A model that remembers (1)
def buffers(config: Config, dtype: str | None) -> tuple[np.ndarray, ...]:
    """Room for a row a token, for each block, in the dtype of its projection."""
    types = [np.dtype(np.float32), *[np.dtype(dtype or np.float64)] * config.blocks]
    shape = config.context, config.width
    return tuple(np.zeros(shape, t) for t in types[:config.blocks])


def there(arrays: Any, target: str) -> Any:
    """The arrays where the target wants them: on a GPU, say (chapter 9)."""
    return placed(arrays, target) or arrays


class Memory:
    """What a model knows of the tokens that it has seen; one call at a time."""

    def __init__(self, config: Config, dtype: str | None, target: str) -> None:
        self.lock = threading.Lock()
        self.keys, self.values = (
            there(buffers(config, dtype), target) for _ in range(2))
        self.ids = np.zeros(0, np.int64)  # the tokens whose rows are in the buffers
        self.traced = 0  # how many of them have left their residuals
        self.residuals: list[np.ndarray] = []
        self.steps: dict[tuple[int, bool], Bound] = {}

    def fill(self, keys: tuple[np.ndarray, ...], values: tuple[np.ndarray, ...]
             ) -> None:
        """Take the new buffers, where a step did not work in place."""
        for old, new in zip((*self.keys, *self.values), (*keys, *values)):
            if new is not old:
                old[:] = new


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements two rows have in common at their beginning."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


# %% 10_cache.md § A model that remembers (2)
def window(ids: np.ndarray, first: int, context: int) -> tuple[int, np.ndarray]:
    """Where to begin, and the tokens from there on, followed by zeros.

    Their number is a power of two, or the context. If that is too many for the
    room that is left, they begin earlier: those rows are computed once more."""
    n = min(1 << (len(ids) - first - 1).bit_length(), context)
    first = min(first, context - n)
    rows = np.zeros(n, np.int64)
    rows[:len(ids) - first] = ids[first:first + n]
    return first, rows


# %% 10_cache.md § A model that remembers (3)
@dataclass(frozen=True)
class CachedModel:
    """A GPT-2 that does not compute a token twice. `model(ids)` is as always."""

    config: Config
    params: Params
    run: Jitted
    dtype: str | None = None
    weights: Params | None = None  # the same, where `run` wants them
    memory: Memory = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        memory = Memory(self.config, self.dtype, self.run.target)
        object.__setattr__(self, "memory", memory)

    def __call__(self, ids: Any, trace: dict[str, Any] | None = None) -> np.ndarray:
        """Token ids (N,) -> logits (1, V); `trace` receives every residual by name.

        Raises GenerationError, DTypeError or OutOfRangeError for ids that are
        none."""
        ids = check_ids(ids, self.config.vocabulary)
        check_length(len(ids), 0, self.config.context)
        with self.memory.lock:
            logits = self.advance(ids, trace is not None)
            if trace is not None:
                names = residual_names(self.config.blocks)
                rows = (x[:len(ids)].copy() for x in self.memory.residuals)
                trace |= dict(zip(names, rows), logits=logits)
        return logits

    def advance(self, ids: np.ndarray, residuals: bool) -> np.ndarray:
        """The logits (1, V); computes what is not remembered."""
        memory = self.memory
        known = common(ids, memory.ids)
        first = min(known, len(ids) - 1)  # the last row is always computed
        if residuals:
            first = min(first, memory.traced)
        memory.ids, memory.traced = ids[:first], min(known, memory.traced)
        first, rows = window(ids, first, self.config.context)
        logits, kept, *new = self.bound(len(rows), residuals)(
            rows, np.array(first), np.array(len(ids) - 1 - first))
        memory.fill(*new)
        memory.ids = ids
        if residuals:
            self.keep(first, kept)
            memory.traced = len(ids)
        return np.asarray(logits)[None]  # it may be on a device

    def bound(self, n: int, residuals: bool) -> Bound:
        """The step for n tokens at any position; all that stays is bound to it."""
        steps = self.memory.steps
        if (n, residuals) not in steps:  # after a prefill comes a step of one token
            new = sorted(m for m in {n, 1} if (m, residuals) not in steps)
            with ThreadPoolExecutor(len(new)) as pool:
                made = pool.map(lambda m: self.compile(m, residuals), new)
                steps |= {(m, residuals): bound for m, bound in zip(new, made)}
        return steps[n, residuals]

    def compile(self, n: int, residuals: bool) -> Bound:
        """Trace and compile, or load from disk, and bind."""
        place, stay = np.array(0), {
            "params": self.weights or self.params, "keys": self.memory.keys,
            "values": self.memory.values}
        compiled = self.run.compile(
            np.zeros(n, np.int64), place, place, *stay.values(),
            heads=self.config.heads, residuals=residuals)
        return compiled.bind(**stay)

    def case(self, place: Any) -> Any:
        """What `blame` looks into: the step that made a wrong residual."""
        return case_of(self, place)

    def keep(self, first: int, rows: list[np.ndarray]) -> None:
        """Put the residuals of tokens from `first` on next to the earlier ones."""
        memory = self.memory
        if not memory.residuals:
            shape = self.config.context, self.config.width
            memory.residuals = [np.zeros(shape, x.dtype) for x in rows]
        for whole, new in zip(memory.residuals, rows):
            whole[first:first + len(new)] = np.asarray(new)


def build(config: Config, params: Params, target: str, dtype: str | None,
          precision: str = "float32") -> CachedModel:
    """What load_model(cache=True) makes."""
    weights = placed(params, target)
    return CachedModel(config, params, compiled(target, dtype, precision), dtype,
                       weights)


# %% 10_cache.md § A model that remembers (4)
def case_of(model: CachedModel, place: Any) -> Any:
    """The case of chapter 7 for a residual (a Place) of this model."""
    from tinymlir.blame import Case, arrays_of
    again = build(model.config, model.params, "cpu", model.dtype)
    ids, memory = np.array(place.ids), again.memory
    known = 0 if place.step == 1 else len(ids) - 1
    if known:
        again(ids[:known])
    first, rows = window(ids, known, model.config.context)
    args = (rows, np.array(first), np.array(len(ids) - 1 - first), model.params,
            memory.keys, memory.values)
    graph = model.run.compile(
        *args, heads=model.config.heads, residuals=True).graph
    names = residual_names(model.config.blocks)
    logits, *kept = graph.outputs[:len(names) + 1]
    row = [*names, "logits"].index(place.name)
    return Case(graph, arrays_of(args), [*kept, logits][row], tuple(kept[:row]))
