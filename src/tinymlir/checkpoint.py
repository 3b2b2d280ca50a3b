# Tangled from notebooks/05_gpt2.md: edit the chapter, not this file.

# %% 05_gpt2.md § Three files (1)
"""Three files become a model; nothing in them is trusted (chapter 5)."""
from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinymlir.errors import CheckpointError
from tinymlir.ops import EPSILON, LayerNorm, Linear

FILES = ("config.json", "model.safetensors", "tokenizer.json")
AGAIN = "get the file again, from where the model came from"


def refusal(where: Any, expected: str, got: str, hint: str) -> CheckpointError:
    """The one line that says why a checkpoint cannot be used."""
    return CheckpointError(f"{where}: expected {expected}, got {got}; {hint}")


# %% 05_gpt2.md § Three files (2)
HEADS = {
    b"version https://git-lfs": ("a Git LFS pointer to it", "run `git lfs pull`"),
    b"<!doctype": ("a web page", AGAIN),
    b"<html": ("a web page", AGAIN),
}


def check_file(path: Path) -> None:
    """Is there a file, and not one of the usual mishaps? Raises CheckpointError."""
    if not path.is_file():
        got = "a folder" if path.is_dir() else "nothing"
        raise refusal(path, "a file", got, "`tinymlir fetch DIR` puts one there")
    with path.open("rb") as file:
        head = file.read(64).lstrip().lower()
    if not head:
        raise refusal(path, "a file of a model", "an empty one", AGAIN)
    for start, (got, hint) in HEADS.items():
        if head.startswith(start):
            raise refusal(path, "a file of a model", got, hint)


# %% 05_gpt2.md § The configuration (1)
@dataclass(frozen=True)
class Config:
    """The sizes of a model, and the token that ends a text (or None)."""

    blocks: int
    width: int
    heads: int
    context: int
    vocabulary: int
    end: int | None = None


SIZES = {"blocks": "n_layer", "width": "n_embd", "heads": "n_head",
         "context": "n_positions", "vocabulary": "vocab_size"}


# %% 05_gpt2.md § The configuration (2)
SWITCHES: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new",),
    "layer_norm_epsilon": (EPSILON,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "dtype": ("float32", None),
    "torch_dtype": ("float32", None),
}
OTHER = "this model computes another formula than GPT-2; use another checkpoint"


# %% 05_gpt2.md § The configuration (3)
def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError."""
    check_file(path)
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise refusal(path, "JSON", f"text that is not ({error})", AGAIN) from None
    if not isinstance(data, dict):
        raise refusal(path, "a JSON object", type(data).__name__, AGAIN)
    return data


def check_switches(path: Path, data: dict[str, Any]) -> None:
    """Refuse each key that changes the formula. Raises CheckpointError."""
    inner = (None, 4 * data["n_embd"])
    for key, values in {**SWITCHES, "n_inner": inner}.items():
        value = data.get(key, values[0])
        if value not in values:
            expected = " or ".join(map(repr, values))
            raise refusal(f"{path}: {key}", expected, reprlib.repr(value), OTHER)


# %% 05_gpt2.md § The configuration (4)
WRONG = "use the config.json that belongs to the weights"


def read_config(path: Path) -> Config:
    """The sizes, if the formula is GPT-2's. Raises CheckpointError."""
    data = read_json(path)
    for key in SIZES.values():
        value = data.get(key)
        if type(value) is not int or value <= 0:
            got = reprlib.repr(value)
            raise refusal(f"{path}: {key}", "a positive integer", got, WRONG)
    check_switches(path, data)
    end = data.get("eos_token_id")
    config = Config(**{ours: data[key] for ours, key in SIZES.items()}, end=end)
    if config.width % config.heads:
        multiple = f"a multiple of n_head = {config.heads}"
        raise refusal(f"{path}: n_embd", multiple, str(config.width), WRONG)
    if end is not None and not (type(end) is int and 0 <= end < config.vocabulary):
        below = f"a token id below {config.vocabulary}"
        raise refusal(f"{path}: eos_token_id", below, reprlib.repr(end), WRONG)
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
    yield "wte.weight", (config.vocabulary, width)
    yield "wpe.weight", (config.context, width)
    for i in range(config.blocks):
        for name, _, units in PAIRS:
            shape = tuple(width * unit for unit in units)
            yield f"h.{i}.{name}.weight", shape
            yield f"h.{i}.{name}.bias", shape[-1:]
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)


# %% 05_gpt2.md § The weights (3)
class Entry(NamedTuple):
    """Where a tensor lies in the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def validate(path: Path) -> None:
    """Is this a whole safetensors file? Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open
    check_file(path)
    try:
        with safe_open(path, framework="numpy"):
            return
    except SafetensorError as error:
        got = f"{path.stat().st_size:,} bytes that are not one ({error})"
    raise refusal(path, "a whole safetensors file", got, AGAIN)


# %% 05_gpt2.md § The weights (4)
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # we make our own mask


def read_index(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, without masks. Raises CheckpointError."""
    validate(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    index: dict[str, Entry] = {}
    for name, entry in header.items():
        short = name.removeprefix("transformer.")
        if name == "__metadata__" or MASK.fullmatch(short):
            continue
        if short in index:
            raise refusal(f"{path}: {name}", "one tensor of a name", "two", AGAIN)
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        index[short] = Entry(entry["dtype"], tuple(entry["shape"]), start, stop)
    return index


# %% 05_gpt2.md § The weights (5)
FLOATS = "use float32 weights, and the config.json that belongs to them"


def check_tensors(path: Path, config: Config, index: dict[str, Entry]) -> None:
    """Refuse a missing, extra or misshapen tensor, by its name."""
    extra = set(index) - {"lm_head.weight"}
    for name, shape in tensor_shapes(config):
        expected = f"float32 of shape {shape}"
        if name not in index:
            raise refusal(f"{path}: {name}", expected, "no such tensor", AGAIN)
        entry = index[name]
        if (entry.dtype, entry.shape) != ("F32", shape):
            got = f"{entry.dtype} of shape {entry.shape}"
            raise refusal(f"{path}: {name}", expected, got, FLOATS)
        extra.discard(name)
    for name in sorted(extra):
        raise refusal(f"{path}: {name}", "only GPT-2's tensors", "this one", OTHER)


# %% 05_gpt2.md § The weights (6)
def map_tensors(path: Path, index: dict[str, Entry]) -> dict[str, np.ndarray]:
    """The tensors as read-only views of the file; nothing is copied."""
    data = np.asarray(np.memmap(path, np.uint8, "r"))
    return {name: map_tensor(path, data, entry) for name, entry in index.items()}


def map_tensor(path: Path, data: np.ndarray, entry: Entry) -> np.ndarray:
    """One tensor; it is read into memory only if it lies at an odd place."""
    if entry.start % 4 == 0:
        return data[entry.start:entry.stop].view("<f4").reshape(entry.shape)
    count = (entry.stop - entry.start) // 4
    return np.fromfile(path, "<f4", count, offset=entry.start).reshape(entry.shape)


# %% 05_gpt2.md § The weights (7)
def read_params(path: Path, config: Config) -> Params:
    """The weights of a model, checked and mapped. Raises CheckpointError."""
    index = read_index(path)
    check_tensors(path, config, index)
    t = map_tensors(path, index)
    head = t.get("lm_head.weight", t["wte.weight"])
    if head is not t["wte.weight"] and not np.array_equal(head, t["wte.weight"]):
        raise refusal(f"{path}: lm_head.weight", "the same as wte.weight",
                      "another tensor", OTHER)
    blocks = tuple(
        Block(*(kind(t[f"h.{i}.{name}.weight"], t[f"h.{i}.{name}.bias"])
                for name, kind, _ in PAIRS))
        for i in range(config.blocks))
    last = LayerNorm(t["ln_f.weight"], t["ln_f.bias"])
    return Params(t["wte.weight"], t["wpe.weight"], blocks, last)


# %% 05_gpt2.md § The vocabulary (1)
def read_tokenizer(path: Path, vocabulary: int) -> Any:
    """A `tokenizers.Tokenizer` with this many tokens. Raises CheckpointError."""
    from tokenizers import Tokenizer
    check_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no class of its own
        raise refusal(path, "a tokenizer", f"none ({error})", AGAIN) from None
    size = tokenizer.get_vocab_size()
    if size != vocabulary:
        raise refusal(path, f"vocab_size = {vocabulary} tokens", str(size),
                      "use the tokenizer.json that belongs to the weights")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


# %% 05_gpt2.md § The vocabulary (2)
class Checkpoint(NamedTuple):
    """What the three files hold."""

    config: Config
    params: Params
    tokenizer: Any


def read_checkpoint(directory: str | Path) -> Checkpoint:
    """Open a folder of config.json, model.safetensors and tokenizer.json.

    Raises CheckpointError with the file, tensor or key that is not as it should be.
    """
    config_path, weights_path, tokenizer_path = (Path(directory) / f for f in FILES)
    config = read_config(config_path)
    params = read_params(weights_path, config)
    tokenizer = read_tokenizer(tokenizer_path, config.vocabulary)
    return Checkpoint(config, params, tokenizer)


# %% 05_gpt2.md § The vocabulary (3)
BUNDLED = Path(__file__).parent / "checkpoints" / "tales"


def default_directory() -> Path:
    """./model if it holds a checkpoint, else the model that comes with tinymlir."""
    here = Path("model")
    return here if all((here / name).is_file() for name in FILES) else BUNDLED
