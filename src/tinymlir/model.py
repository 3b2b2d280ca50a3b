# Tangled from notebooks/05_gpt2.md: edit the chapter, not this file.

# %% 05_gpt2.md § The model (1)
"""GPT-2 from a checkpoint: one compiled function for each sublayer (chapter 5)."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinymlir import ops
from tinymlir.checkpoint import Config, Params, read_checkpoint
from tinymlir.errors import (
    ArgumentError, DTypeError, GenerationError, OutOfRangeError, UnsupportedError)
from tinymlir.jit import DTYPES, PRECISIONS, TARGETS, Jitted, jit


# %% 05_gpt2.md § The model (2)
class Sublayers(NamedTuple):
    """The four functions of a forward pass."""

    embed: Callable[..., np.ndarray]
    attention: Callable[..., np.ndarray]
    feed_forward: Callable[..., np.ndarray]
    logits: Callable[..., np.ndarray]


PLAIN = Sublayers(
    ops.embed, ops.attention_sublayer, ops.feed_forward_sublayer, ops.logits)


@cache
def compiled(target: str, dtype: str | None, precision: str) -> Sublayers:
    """The four functions, compiled as these options of `jit` say."""
    return Sublayers(*(
        jit(f, target=target, dtype=dtype, precision=precision) for f in PLAIN))


COMPILED = compiled("cpu", None, "float32")


# %% 05_gpt2.md § The model (3)
@dataclass(frozen=True)
class Model:
    """A GPT-2. `model(ids)` gives the logits of the next token."""

    config: Config
    params: Params
    run: Sublayers = COMPILED
    dtype: str | None = None  # what is computed in; None for NumPy's promotion
    weights: Params | None = None  # the same, where `run` wants them: on a GPU, say

    def __call__(self, ids: Any, trace: dict[str, Any] | None = None) -> np.ndarray:
        """Token ids (N,) -> logits (1, V); `trace` receives every residual by name.

        Raises GenerationError, DTypeError or OutOfRangeError for ids that are none.
        """
        ids = check_ids(ids, self.config.vocabulary)
        check_length(len(ids), 0, self.config.context)
        prepare(self, len(ids))
        for name, value in residuals(self, ids):
            if trace is not None:
                trace[name] = np.asarray(value)  # it may be on a device
        return np.asarray(value)


# %% 05_gpt2.md § The model (4)
def residuals(model: Model, ids: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The forward pass: every residual in network order, and last the logits."""
    run, params = model.run, model.weights or model.params
    x = run.embed(ids, params.words, params.positions)
    yield "embedding", x
    for i, b in enumerate(params.blocks):
        x = run.attention(x, b.norm_1, b.qkv, b.out, heads=model.config.heads)
        yield f"block {i} attention", x
        x = run.feed_forward(x, b.norm_2, b.up, b.down)
        yield f"block {i} feed-forward", x
    yield "logits", run.logits(x[-1:], *params.norm, params.words)


# %% 05_gpt2.md § The model (5)
prepared: set[tuple[Config, Sublayers, int]] = set()


def prepare(model: Model, n: int) -> None:
    """Compile the sublayers for n tokens, if that was not done before."""
    key = model.config, model.run, n
    if not isinstance(model.run.embed, Jitted) or key in prepared:
        return
    run, params, block = model.run, model.params, model.params.blocks[0]
    heads = {"heads": model.config.heads}
    types = np.float32, model.dtype or np.float64
    first, later = (np.zeros((n, model.config.width), t) for t in types)
    jobs = [
        (run.attention, (first, block.norm_1, block.qkv, block.out), heads),
        (run.attention, (later, block.norm_1, block.qkv, block.out), heads),
        (run.feed_forward, (later, block.norm_2, block.up, block.down), {}),
        (run.embed, (np.zeros(n, int), params.words, params.positions), {}),
    ]
    with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        list(pool.map(lambda job: job[0].compile(*job[1], **job[2]), jobs))
    prepared.add(key)


# %% 05_gpt2.md § The model (6)
def check_ids(ids: Any, vocabulary: int) -> np.ndarray:
    """Token ids as an int64 array (N,).

    Raises GenerationError if there are none, DTypeError if they are not a row of
    integers, OutOfRangeError if one is not in the vocabulary.
    """
    array = np.asarray(ids)
    if array.size == 0:
        raise GenerationError("token ids: expected one or more, got none")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DTypeError(
            f"token ids: expected a row of integers, got {array.dtype} of shape "
            f"{array.shape}; pass what the tokenizer returns")
    outside = np.flatnonzero((array < 0) | (array >= vocabulary))
    if len(outside):
        raise OutOfRangeError(
            f"token id {array[outside[0]]} at position {outside[0]}: expected 0 to "
            f"{vocabulary - 1}; use the tokenizer that belongs to the model")
    return array.astype(np.int64)


# %% 05_gpt2.md § The model (7)
def check_length(prompt: int, new: int, context: int) -> None:
    """Raises GenerationError if a prompt and what follows do not fit the model."""
    if prompt + new > context:
        raise GenerationError(
            f"a prompt of {prompt} tokens and {new} new ones do not fit a context "
            f"of {context}; shorten the prompt or ask for less")


# %% 05_gpt2.md § The model (8)
PLACES = {"gpu": "tinymlir.cuda"}  # targets with a memory of their own (chapter 9)


def placed(params: Params, target: str) -> Params | None:
    """The weights in the memory of the target, if it has one."""
    if target not in PLACES:
        return None
    return import_module(PLACES[target]).place(params)


def build(config: Config, params: Params, target: str, dtype: str | None,
          precision: str = "float32") -> Model:
    """The model of this chapter."""
    run = compiled(target, dtype, precision)
    return Model(config, params, run, dtype, placed(params, target))


KINDS = {  # (fused, cache): the module that builds it
    (False, False): "tinymlir.model",
    (True, False): "tinymlir.fused",  # chapter 6
    (False, True): "tinymlir.cache", (True, True): "tinymlir.cache",  # chapter 10
}


def load_model(directory: str | Path, target: str = "cpu", fused: bool = False,
               dtype: str | None = None, cache: bool = False, cast: bool = False,
               precision: str = "float32") -> tuple[Any, Any]:
    """The model and the tokenizer in a folder; `fused` makes it one function.

    With dtype="float32" everything is computed in float32; `cast` converts weights
    of 16 bits to it. `precision` is that of products, as in `jit`. Raises
    CheckpointError if the folder does not hold a GPT-2, UnsupportedError for an
    option that there is not, and ArgumentError if the target does not have it.
    """
    options: dict[str, tuple[Any, Any]] = {  # name -> value, what there is
        "target": (target, TARGETS), "dtype": (dtype, DTYPES),
        "precision": (precision, PRECISIONS),
        "fused": (fused, {f for f, _ in KINDS}),
        "cache": (cache, {c for _, c in KINDS})}
    for name, (value, known) in options.items():
        if value not in known:
            raise UnsupportedError(
                f"load_model: {name}={value!r} is not supported; expected "
                f"{' or '.join(map(repr, known))}")
    config, params, tokenizer = read_checkpoint(directory, cast)
    module = import_module(KINDS[fused, cache])
    return module.build(config, params, target, dtype, precision), tokenizer


# %% 05_gpt2.md § From logits to text (1)
def greedy(scores: np.ndarray) -> int:
    """The token with the best score; of equal ones, the lowest: (V,) -> id."""
    return int(np.argmax(scores))


def steps(model: Model, ids: list[int], tokens: int, stop: bool,
          pick: Callable[[np.ndarray], int]) -> Iterator[int]:
    """Token after token; the ids must have been checked."""
    for _ in range(tokens):
        scores = model(ids)[0]
        if not np.isfinite(scores).all():
            raise GenerationError(
                f"the logits after {len(ids)} tokens hold NaN or infinity, so none "
                f"is the best; the weights are damaged, get the checkpoint again")
        new = pick(scores)
        if stop and new == model.config.end:
            return
        ids.append(new)
        yield new


# %% 05_gpt2.md § From logits to text (2)
def iterate_ids(model: Model, ids: Any, tokens: int, stop: bool = False,
                pick: Callable[[np.ndarray], int] = greedy) -> Iterator[int]:
    """An iterator over new ids, chosen by `pick`; `stop` ends it at end-of-text.

    Raises what `Model` raises, and GenerationError or ArgumentError for a request
    that cannot be met.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)):
        raise ArgumentError(f"tokens: expected an integer, got {tokens!r}")
    if tokens < 0:
        raise GenerationError(f"tokens: expected 0 or more, got {tokens}")
    if stop and model.config.end is None:
        raise GenerationError("stop: the model's config.json has no eos_token_id")
    prompt = check_ids(ids, model.config.vocabulary).tolist()
    check_length(len(prompt), int(tokens), model.config.context)
    return steps(model, prompt, int(tokens), stop, pick)


def generate_ids(
        model: Model, ids: Any, tokens: int, stop: bool = False) -> list[int]:
    """Exactly `tokens` new ids, greedily; fewer only with `stop`."""
    return list(iterate_ids(model, ids, tokens, stop))


# %% 05_gpt2.md § From logits to text (3)
def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The token ids of a prompt. Raises GenerationError if there are none."""
    if not isinstance(prompt, str):
        raise ArgumentError(f"prompt: expected a str, got {type(prompt).__name__}")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise GenerationError(f"prompt: expected UTF-8, got {prompt!r}") from None
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise GenerationError("the prompt is empty; give a word to go on from")
    return ids


def generate(model: Model, tokenizer: Any, prompt: str, tokens: int) -> str:
    """The text that follows the prompt: encode, choose greedily, decode."""
    new = generate_ids(model, encode(tokenizer, prompt), tokens)
    return tokenizer.decode(new, skip_special_tokens=False)


# %% 05_gpt2.md § Piece by piece (1)
def stream(tokenizer: Any, ids: Iterable[int]) -> Iterator[str]:
    """Text as soon as it is whole: a character split between tokens waits."""
    held: list[int] = []
    for new in ids:
        held.append(new)
        text = tokenizer.decode(held, skip_special_tokens=False)
        if not text.endswith("\ufffd"):
            yield text
            held.clear()
    if held:
        yield tokenizer.decode(held, skip_special_tokens=False)


# %% 05_gpt2.md § Throwing dice (1)
def check_dice(temperature: Any, top_k: Any, seed: Any) -> None:
    """Raises ArgumentError for what is no number, GenerationError for odds."""
    asked = {"temperature": (temperature, Real, "a number"),
             "top_k": (1 if top_k is None else top_k, Integral, "an integer"),
             "seed": (seed, Integral, "an integer")}
    for name, (value, kind, words) in asked.items():
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ArgumentError(f"{name}: expected {words}, got {value!r}")
    if not 0 < temperature < float("inf"):
        raise GenerationError(f"temperature: expected above 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise GenerationError(f"top_k: expected 1 or more, got {top_k}")
    if seed < 0:
        raise GenerationError(f"seed: expected 0 or more, got {seed}")


# %% 05_gpt2.md § Throwing dice (2)
def sampler(temperature: float = 1.0, top_k: int | None = None,
            seed: int = 0) -> Callable[[np.ndarray], int]:
    """A `pick` that throws dice.

    Raises ArgumentError or GenerationError for odds that are none.
    """
    check_dice(temperature, top_k, seed)
    dice = np.random.default_rng(seed)

    def pick(scores: np.ndarray) -> int:
        best = np.argsort(-scores, kind="stable")[:top_k]
        behind = scores[best].astype(np.float64) - float(scores[best[0]])
        with np.errstate(over="ignore"):
            odds = np.cumsum(ops.softmax(behind / temperature))
        place = np.searchsorted(odds, dice.random() * odds[-1], side="right")
        return int(best[place])

    return pick
