# Tangled from notebooks/05_gpt2.md: edit the chapter, not this file.

# %% 05_gpt2.md § The configuration (1)
"""Three files become a model; nothing in them is trusted (chapter 5)."""
from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinymlir.ops import EPSILON, LayerNorm, Linear
from tinymlir.weights import (
    AGAIN, FILES, PARTS, Entry, check_file, find_weights, map_tensors, read_json,
    refusal)
from tinymlir.weights import read_index as read_index  # chapter 7 needs it too


@dataclass(frozen=True)
class Config:
    """The sizes of a model, and the token that ends a text (or None)."""

    blocks: int
    width: int
    heads: int
    context: int
    vocabulary: int
    end: int | None = None
    inner: int | None = None  # width inside a feed-forward; None for 4 times width


# %% 05_gpt2.md § The configuration (2)
SIZES = {"blocks": "n_layer", "width": "n_embd", "heads": "n_head",
         "context": "n_positions", "vocabulary": "vocab_size"}
WRONG = "use the config.json that belongs to the weights"


def read_sizes(path: Path, data: dict[str, Any]) -> dict[str, int]:
    """The sizes by our names. Raises CheckpointError."""
    given = data.get("n_inner") is not None
    keys = SIZES | ({"inner": "n_inner"} if given else {})
    for key in keys.values():
        value = data.get(key)
        if type(value) is not int or not 0 < value < 2**31:
            got = reprlib.repr(value)
            raise refusal(f"{path}: {key}", "a positive integer", got, WRONG)
    return {ours: data[key] for ours, key in keys.items()}


# %% 05_gpt2.md § The configuration (3)
SWITCHES: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new",),
    "layer_norm_epsilon": (EPSILON,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_word_embeddings": (True,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "dtype": ("float32", None),
    "torch_dtype": ("float32", None),
}
OTHER = "this model computes another formula than GPT-2; use another checkpoint"
CAST = "--cast (in Python: cast=True) converts it to float32"
HALVES = {"float16": "F16", "bfloat16": "BF16"}  # in config.json, in safetensors


# %% 05_gpt2.md § The configuration (4)
def check_switches(path: Path, data: dict[str, Any], cast: bool) -> None:
    """Refuse each key that changes the formula. Raises CheckpointError."""
    for key, values in SWITCHES.items():
        value = data.get(key, values[0])
        half = key.endswith("dtype") and value in [*HALVES]
        if value not in values and not (half and cast):
            expected = " or ".join(map(repr, values))
            raise refusal(f"{path}: {key}", expected, reprlib.repr(value),
                          CAST if half else OTHER)


# %% 05_gpt2.md § The configuration (5)
HARMLESS = re.compile(r"""
    _.* | n_ctx | n_inner | (bos|eos|pad|sep|decoder_start)_token_id
  | architectures | transformers_version | auto_map | tokenizer_class | prefix
  | (attn|embd|resid)_pdrop | initializer_range | gradient_checkpointing
  | summary_.* | predict_special_tokens | problem_type | finetuning_task
  | task_specific_params | (id2|num_)labels? | label2id | is_decoder | use_cache
  | output_\w+ | return_dict\w* | torchscript | use_bfloat16 | tf_legacy_loss
  | chunk_size_feed_forward | tie_encoder_decoder | remove_invalid_values
  | (max|min)_length | do_sample | early_stopping | num_beam\w+
  | num_return_sequences | temperature | top_[kp] | typical_p | \w+_penalty
  | \w*no_repeat_ngram_size | bad_words_ids | forced_[be]os_token_id
  | (begin_)?suppress_tokens
""", re.VERBOSE)


def check_unknown(path: Path, data: dict[str, Any]) -> None:
    """Refuse a key that we do not know, unless it is off."""
    known = {*SIZES.values(), *SWITCHES}
    for key, value in data.items():
        if value and key not in known and not HARMLESS.fullmatch(key):
            raise refusal(f"{path}: {key}", "a key of GPT-2's", reprlib.repr(value),
                          "it may change the formula; if it does not, remove it")


# %% 05_gpt2.md § The configuration (6)
def check_end(path: Path, end: Any, tokens: int) -> None:
    """Is it None, or a token that there is? Raises CheckpointError."""
    if end is not None and not (type(end) is int and 0 <= end < tokens):
        below = f"a token id below {tokens}"
        raise refusal(f"{path}: eos_token_id", below, reprlib.repr(end), WRONG)


def read_config(path: Path, cast: bool = False) -> Config:
    """The sizes, if the formula is GPT-2's. Raises CheckpointError."""
    data = read_json(path)
    context = data.setdefault("n_positions", data.get("n_ctx"))
    config = Config(**read_sizes(path, data), end=data.get("eos_token_id"))
    check_switches(path, data, cast)
    check_unknown(path, data)
    if data.get("n_ctx") not in (None, context):
        got = reprlib.repr(data["n_ctx"])
        raise refusal(f"{path}: n_ctx", f"n_positions = {context}", got, WRONG)
    if config.width % config.heads:
        multiple = f"a multiple of n_head = {config.heads}"
        raise refusal(f"{path}: n_embd", multiple, str(config.width), WRONG)
    check_end(path, config.end, config.vocabulary)
    return config


# %% 05_gpt2.md § The weights (1)
class Block(NamedTuple):
    """The weights of one block, in the order in which they are used."""

    norm_1: LayerNorm
    qkv: Linear
    out: Linear
    norm_2: LayerNorm
    up: Linear
    down: Linear


class Params(NamedTuple):
    """All weights: words (V, E), positions (context, E), blocks, the last norm."""

    words: np.ndarray
    positions: np.ndarray
    blocks: tuple[Block, ...]
    norm: LayerNorm


# %% 05_gpt2.md § The weights (2)
PAIRS = (  # of a block: name in the file, class, shape of the weight in units of E
    ("ln_1", LayerNorm, (1,)),
    ("attn.c_attn", Linear, (1, 3)),
    ("attn.c_proj", Linear, (1, 1)),
    ("ln_2", LayerNorm, (1,)),
    ("mlp.c_fc", Linear, (1, 4)),
    ("mlp.c_proj", Linear, (4, 1)),
)


def tensor_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor that there must be."""
    width = config.width
    sizes = {1: width, 3: 3 * width, 4: config.inner or 4 * width}
    yield "wte.weight", (config.vocabulary, width)
    yield "wpe.weight", (config.context, width)
    for i in range(config.blocks):
        for name, _, units in PAIRS:
            shape = tuple(sizes[unit] for unit in units)
            yield f"h.{i}.{name}.weight", shape
            yield f"h.{i}.{name}.bias", shape[-1:]
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)


# %% 05_gpt2.md § The weights (3)
FLOATS = "use float32 weights, and the config.json that belongs to them"


def check_tensors(path: Path, config: Config, index: dict[str, Entry],
                  cast: bool) -> None:
    """Refuse a missing, extra or misshapen tensor, by its name."""
    head = {"lm_head.weight": (config.vocabulary, config.width)}
    extra, tied = set(index), {k: v for k, v in head.items() if k in index}
    dtypes = ["F32", *HALVES.values()] if cast else ["F32"]
    for name, shape in chain(tensor_shapes(config), tied.items()):
        expected = f"float32 of shape {shape}"
        if name not in index:
            raise refusal(f"{path}: {name}", expected, "no such tensor", AGAIN)
        entry = index[name]
        if entry.dtype not in dtypes or entry.shape != shape:
            got = f"{entry.dtype} of shape {entry.shape}"
            hint = CAST if entry.dtype in HALVES.values() and not cast else FLOATS
            raise refusal(f"{entry.path}: {name}", expected, got, hint)
        extra.discard(name)
    for name in sorted(extra):
        where = f"{index[name].path}: {name}"
        raise refusal(where, "only GPT-2's tensors", "this one", OTHER)


# %% 05_gpt2.md § The weights (4)
def read_params(directory: Path, config: Config, cast: bool = False) -> Params:
    """The weights of a model, checked and mapped. Raises CheckpointError."""
    path, index = find_weights(directory)
    check_tensors(path, config, index, cast)
    t = map_tensors(index)
    words = t["wte.weight"]
    if not np.array_equal(t.get("lm_head.weight", words), words, equal_nan=True):
        raise refusal(f"{index['lm_head.weight'].path}: lm_head.weight",
                      "the same as wte.weight", "another tensor", OTHER)
    blocks = tuple(
        Block(*(kind(t[f"h.{i}.{name}.weight"], t[f"h.{i}.{name}.bias"])
                for name, kind, _ in PAIRS))
        for i in range(config.blocks))
    last = LayerNorm(t["ln_f.weight"], t["ln_f.bias"])
    return Params(words, t["wpe.weight"], blocks, last)


# %% 05_gpt2.md § The weights (5)
BUNDLED = Path(__file__).parent / "checkpoints" / "tales"


def is_checkpoint(directory: Path) -> bool:
    """Are the files there, the weights whole or in parts?"""
    config, whole, tokenizer = ((directory / name).is_file() for name in FILES)
    return config and tokenizer and (whole or (directory / PARTS).is_file())


def default_directory() -> Path:
    """./model if it holds a checkpoint, else the model that comes with tinymlir."""
    here = Path("model")
    return here if is_checkpoint(here) else BUNDLED


# %% 05_gpt2.md § The vocabulary (1)
MISFIT = "use the tokenizer.json that belongs to the weights"
TRIAL = "".join(map(chr, [  # every first byte of UTF-8, and every later one
    *range(0x800), *range(0x800, 0xd800, 0x800), *range(0xe000, 0x10000, 0x1000),
    *range(0x10000, 0x110000, 0x20000)]))


def check_kind(path: Path, tokenizer: Any) -> None:
    """Is it a byte-level BPE that gives each text back? Raises CheckpointError."""
    for part, kind in {"model": "BPE", "decoder": "ByteLevel"}.items():
        got = type(getattr(tokenizer, part)).__name__
        if got != kind:
            raise refusal(f"{path}: {part}", kind, got, MISFIT)
    if tokenizer.decode(tokenizer.encode(TRIAL).ids) != TRIAL:
        raise refusal(path, "a tokenizer that decodes what it encodes",
                      "one that loses some of it", MISFIT)


# %% 05_gpt2.md § The vocabulary (2)
PADDING = 1024  # this many rows or more are not padding but another vocabulary


def read_tokenizer(path: Path, vocabulary: int) -> Any:
    """A `tokenizers.Tokenizer` for so many rows. Raises CheckpointError."""
    from tokenizers import Tokenizer
    check_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no class of its own
        raise refusal(path, "a tokenizer", f"none ({error})", AGAIN) from None
    size = tokenizer.get_vocab_size()
    if not vocabulary - PADDING < size <= vocabulary:
        raise refusal(path, f"vocab_size = {vocabulary} tokens", str(size), MISFIT)
    if {*tokenizer.get_vocab().values()} != {*range(size)}:
        raise refusal(path, f"tokens 0 to {size - 1}", "others", MISFIT)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    check_kind(path, tokenizer)
    return tokenizer


# %% 05_gpt2.md § The vocabulary (3)
class Checkpoint(NamedTuple):
    """What the three files hold."""

    config: Config
    params: Params
    tokenizer: Any


def read_checkpoint(directory: str | Path, cast: bool = False) -> Checkpoint:
    """Open a folder of config.json, model.safetensors and tokenizer.json.

    `cast` takes float16 and bfloat16 too, as float32. Padding of the vocabulary is
    cut off. Raises CheckpointError with the file, tensor or key that is wrong.
    """
    config_path, _, tokenizer_path = (Path(directory) / name for name in FILES)
    config = read_config(config_path, cast)
    params = read_params(Path(directory), config, cast)
    tokenizer = read_tokenizer(tokenizer_path, config.vocabulary)
    tokens = tokenizer.get_vocab_size()
    check_end(config_path, config.end, tokens)
    return Checkpoint(replace(config, vocabulary=tokens),
                      params._replace(words=params.words[:tokens]), tokenizer)
