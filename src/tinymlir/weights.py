# Tangled from notebooks/05_gpt2.md: edit the chapter, not this file.

# %% 05_gpt2.md § Three files (1)
"""JSON and safetensors files; nothing in them is trusted (chapter 5)."""
from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinymlir.errors import CheckpointError

FILES = ("config.json", "model.safetensors", "tokenizer.json")
AGAIN = "get the file again, from where the model came from"
FETCH = "`tinymlir fetch DIR` puts one there"


def refusal(where: Any, expected: str, got: str, hint: str) -> CheckpointError:
    """The one line that says why a checkpoint cannot be used."""
    line = f"{where}: expected {expected}, got {got}; {hint}"
    return CheckpointError("".join(c if c.isprintable() else " " for c in line))


# %% 05_gpt2.md § Three files (2)
HEADS = {
    b"version https://git-lfs": ("a Git LFS pointer to it", "run `git lfs pull`"),
    b"<!doctype": ("a web page", AGAIN),
    b"<html": ("a web page", AGAIN),
    b"<?xml": ("a web page", AGAIN),
}


def instead_of(path: Path) -> str:
    """What there is where a file should be."""
    folder = path.parent
    seen = {
        "a folder": path.is_dir(),
        "something that is not a file": path.exists(),
        "a link that leads nowhere": path.is_symlink(),
        "a file in place of its folder": folder.is_file(),
        "a folder that is a link to nowhere": folder.is_symlink(),
    }
    return next((what for what, true in seen.items() if true), "nothing")


# %% 05_gpt2.md § Three files (3)
def check_file(path: Path) -> None:
    """Is there a file, and not one of the usual mishaps? Raises CheckpointError."""
    try:
        if not path.is_file():
            hint = FETCH if path.name in FILES else AGAIN
            raise refusal(path, "a file", instead_of(path), hint)
        with path.open("rb") as file:
            head = file.read(64).lstrip().lower()
    except OSError as error:
        raise refusal(path, "a file that can be read", f"'{error.strerror}'",
                      "name another folder, or change who may read it") from None
    if not head:
        raise refusal(path, "a file of a model", "an empty one", AGAIN)
    for start, (got, hint) in HEADS.items():
        if head.startswith(start):
            raise refusal(path, "a file of a model", got, hint)


# %% 05_gpt2.md § Three files (4)
def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which every key comes once."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{max(keys, key=keys.count)} comes twice")
    return dict(pairs)


def parse(path: Path, data: bytes) -> dict[str, Any]:
    """A JSON object out of a file. Raises CheckpointError."""
    try:
        found = json.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise refusal(path, "JSON", f"text that is not ({error})", AGAIN) from None
    if not isinstance(found, dict):
        raise refusal(path, "a JSON object", type(found).__name__, AGAIN)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds. Raises CheckpointError."""
    check_file(path)
    return parse(path, path.read_bytes())


# %% 05_gpt2.md § A file of numbers (1)
class Entry(NamedTuple):
    """Where a tensor lies: the file, and the place in it in bytes."""

    path: Path
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


# %% 05_gpt2.md § A file of numbers (2)
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # we make our own mask


def without_masks(path: Path, named: dict[str, Any]) -> dict[str, Any]:
    """By names without `transformer.`; causal masks and remarks are left out."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        short = name.removeprefix("transformer.")
        if short in found:
            raise refusal(f"{path}: {name}", "one tensor of a name", "two", AGAIN)
        if name != "__metadata__" and not MASK.fullmatch(short):
            found[short] = value
    return found


def read_index(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, without masks. Raises CheckpointError."""
    validate(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse(path, file.read(length))
    first = 8 + length
    return {name: Entry(path, entry["dtype"], tuple(entry["shape"]),
                        *(first + offset for offset in entry["data_offsets"]))
            for name, entry in without_masks(path, header).items()}


# %% 05_gpt2.md § A file of numbers (3)
PARTS = "model.safetensors.index.json"
PART = re.compile(r"[^/\\]+\.safetensors")


def read_places(path: Path) -> dict[str, str]:
    """Tensor -> name of the part that holds it. Raises CheckpointError."""
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        got = reprlib.repr(places)
        raise refusal(f"{path}: weight_map", "a file for each tensor", got, AGAIN)
    for name, part in places.items():
        if not isinstance(part, str) or not PART.fullmatch(part):
            raise refusal(
                f"{path}: {name}", "a safetensors file of the same folder",
                reprlib.repr(part), "nothing else is opened")
    return without_masks(path, places)


def read_parts(path: Path) -> dict[str, Entry]:
    """The tensors of all parts that an index names. Raises CheckpointError."""
    places, index = read_places(path), {}
    for part in sorted(set(places.values())):
        place = path.parent / part
        found = read_index(place)
        listed = {name for name in places if places[name] == part}
        for name in sorted(listed ^ set(found)):
            got = "no such tensor" if name in listed else "one too many"
            raise refusal(f"{place}: {name}", f"what {path.name} says", got, AGAIN)
        index |= found
    return index


# %% 05_gpt2.md § A file of numbers (4)
FOREIGN = {
    ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npz", ".gguf", ".onnx"}


def find_weights(directory: Path) -> tuple[Path, dict[str, Entry]]:
    """The file, or the index of the parts, and its tensors."""
    whole, parts = directory / FILES[1], directory / PARTS
    if whole.exists():
        return whole, read_index(whole)
    if parts.exists():
        return parts, read_parts(parts)
    for path in sorted(directory.glob("*")):
        if path.suffix in FOREIGN:
            raise refusal(whole, "a safetensors file", f"only {path.name}",
                          "no other format is opened, since some can run code; let "
                          "the program that wrote it save safetensors")
    return whole, read_index(whole)


# %% 05_gpt2.md § A file of numbers (5)
def from_bfloat16(raw: np.ndarray) -> np.ndarray:
    return (raw.view("<u2").astype("<u4") << 16).view("<f4")


READ: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # bytes -> float32, exactly
    "F32": lambda raw: raw.view("<f4"),
    "F16": lambda raw: raw.view("<f2").astype("<f4"),
    "BF16": from_bfloat16,
}


def map_tensors(index: dict[str, Entry]) -> dict[str, np.ndarray]:
    """The tensors as read-only views of their files; only casts are copies."""
    files = {entry.path for entry in index.values()}
    data = {path: np.asarray(np.memmap(path, np.uint8, "r")) for path in files}
    return {name: map_tensor(data[e.path], e) for name, e in index.items()}


def map_tensor(data: np.ndarray, entry: Entry) -> np.ndarray:
    """One tensor of a file; it is read, not mapped, if it lies at an odd place."""
    raw = data[entry.start:entry.stop]
    if entry.start % 4:  # a copy of the mapping would need its memory twice
        raw = np.fromfile(entry.path, np.uint8, len(raw), offset=entry.start)
    array = READ[entry.dtype](raw).reshape(entry.shape)
    array.flags.writeable = False
    return array
