# Tangled from notebooks/07_parity.md: edit the chapter, not this file.

# %% 07_parity.md § A reference of somebody else (1)
"""The reference of somebody else, in its own environment (chapter 7)."""
from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import numpy as np

from tinymlir.checkpoint import Config, Params, read_index, tensor_shapes
from tinymlir.errors import TinymlirError
from tinymlir.pytree import flatten
from tinymlir.verify import Step

REPOSITORY = "https://github.com/sdiehl/tiny-gpt2"
REVISION = "b8bd1dce2f03bc2ae27f157e073b3e27fd734910"
NEEDED = ("pyproject.toml", *(f"tinygpt2/gpt2_{name}.py" for name in (
    "minimal", "ops", "run", "tensors")))


# %% 07_parity.md § A reference of somebody else (2)
class UpstreamError(TinymlirError, RuntimeError):
    """A reference that is missing, cannot run, or has other weights."""


def call(command: Sequence[str | Path], what: str, hint: str, env: dict[str, str]
         ) -> None:
    """Run a program. Raises UpstreamError with its last words if it fails."""
    try:
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True,
            encoding="utf-8", errors="replace")
    except OSError as error:
        raise UpstreamError(f"{what}: {error}; {hint}") from None
    if done.returncode:
        told = done.stderr.strip()
        _, colon, words = told.rpartition("error: ")
        words = words if colon else told.rpartition("\n")[2]
        raise UpstreamError(f"{what}: {shorten(words, 300) or 'it failed'}; {hint}")


def check_checkout(folder: Path) -> None:
    """Raises UpstreamError if this is not a checkout of the reference."""
    for name in NEEDED:
        if not (folder / name).is_file():
            got = f"no {name} in it" if folder.is_dir() else "no such folder"
            raise UpstreamError(
                f"{folder}: expected a checkout of sdiehl/tiny-gpt2, got {got}; "
                f"`--fetch-reference` gets one")


# %% 07_parity.md § A reference of somebody else (3)
def environment_of(folder: Path) -> tuple[Path, dict[str, str]]:
    """The Python of a checkout and its variables; uv makes or completes it."""
    inside = folder / ".venv"
    python = inside / "bin" / "python"
    drop = ("PYTHONHOME", "VIRTUAL_ENV")
    variables = {k: v for k, v in os.environ.items() if k not in drop} | {
        "UV_PROJECT_ENVIRONMENT": str(inside), "PYTHONPATH": str(folder),
        "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    beside = Path(sys.executable).parent  # where `pip install uv` puts it
    if uv := shutil.which("uv") or shutil.which("uv", path=beside):
        words = ["sync", "--quiet", "--no-dev", "--inexact", "--no-install-project"]
        locked = ["--frozen"] if (folder / "uv.lock").exists() else []
        call([uv, *words, *locked, "--project", folder],
             f"{folder}: its environment cannot be installed",
             "check the network, then run this again", variables)
    elif not python.exists():
        raise UpstreamError(
            f"{folder}: it has no .venv, and there is no uv to make one; "
            f"`pip install uv`, then run this again")
    return python, variables


# %% 07_parity.md § A reference of somebody else (4)
def weights_of(folder: Path, checkpoint: Path, config: Config) -> Path:
    """The file that the reference reads: its own, if that is of the same shapes."""
    own = folder / "model" / "model.safetensors"
    if own.is_file():
        index = read_index(own)
        found = {name: entry.shape for name, entry in index.items()}
        if all(found.get(name) == shape for name, shape in tensor_shapes(config)):
            return own
    return checkpoint / "model.safetensors"


def check_digests(path: Path, config: Config, params: Params,
                  digests: dict[str, str]) -> None:
    """Raises UpstreamError, with the tensor, if other numbers were read."""
    names = (name for name, _ in tensor_shapes(config))
    for name, (_, array) in zip(names, flatten(params, "params")[0]):
        ours = hashlib.sha256(np.ascontiguousarray(array)).hexdigest()
        if digests.get(name) != ours:
            raise UpstreamError(
                f"{path}: {name}: expected the numbers that our model has, got "
                f"others; both sides need the same checkpoint")


# %% 07_parity.md § A reference of somebody else (5)
def ask(checkout: Path, scratch: Path, request: dict) -> dict:
    """Let the other process obey a request; its answer."""
    python, variables = environment_of(checkout.resolve())
    (scratch / "request.json").write_text(json.dumps(request))
    runner = Path(__file__).with_name("upstream_runner.py")
    call([python, runner, scratch], f"{checkout}: the reference failed",
         "remove its .venv if that is broken, then run this again", variables)
    return json.loads((scratch / "answer.json").read_text())


# %% 07_parity.md § A reference of somebody else (6)
@dataclass(frozen=True)
class Upstream:
    """A checkout of sdiehl/tiny-gpt2 as a reference; its files stay as they are."""

    checkout: Path
    checkpoint: Path
    config: Config
    params: Params

    @property
    def whole(self) -> str:
        return "gpt2_run" if self.config.blocks == 12 else "gpt2_minimal"

    @property
    def about(self) -> str:
        return (f"tinygpt2.gpt2_ops of {self.checkout}, "
                f"whose {self.whole}.gpt2 agrees with it")

    def __call__(self, prompt: str, ids: list[int], tokens: int) -> Iterator[Step]:
        check_checkout(self.checkout)
        weights = weights_of(self.checkout, self.checkpoint, self.config)
        with tempfile.TemporaryDirectory() as name:
            answer = ask(self.checkout, Path(name), {
                "weights": str(weights.resolve()), "blocks": self.config.blocks,
                "heads": self.config.heads, "whole": self.whole, "prompt": prompt,
                "tokenizer": str(self.checkout.resolve() / "model"),
                "ids": list(ids), "tokens": tokens})
            check_digests(weights, self.config, self.params, answer["digests"])
            for i in range(tokens):
                with np.load(Path(name) / f"{i}.npz") as file:
                    yield Step(dict(file), answer["tokens"][i], answer["texts"][i])


# %% 07_parity.md § A reference of somebody else (7)
def fetch_checkout() -> Path:
    """The reference at its pinned revision, cloned once. Raises UpstreamError."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(base) / "tinymlir-reference" / REVISION
    if place.exists():
        return place
    what, hint = "the reference cannot be fetched", "git and the network are needed"
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as name:
        aside = Path(name) / "checkout"
        for words in (["clone", "--quiet", REPOSITORY, aside],
                      ["-C", aside, "checkout", "--quiet", REVISION]):
            call(["git", *words], what, hint, quiet)
        aside.rename(place)
    return place
