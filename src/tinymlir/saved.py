# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § Kernels in a folder (1)
"""Kernels in a folder, for machines without a compiler (chapter 9)."""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinymlir import __version__, cuda
from tinymlir.errors import TinymlirError
from tinymlir.graph import Graph
from tinymlir.plan import Plan
from tinymlir.store import fingerprint

FORMAT, VERSION, MANIFEST = "tinymlir kernels", 1, "manifest.json"
AGAIN = "write it again with `tinymlir compile --gpu`"


class KernelsError(TinymlirError, ValueError):
    """A folder of kernels that is missing, damaged or made for something else."""


def identity(graph: Graph) -> str:
    """The name of a graph's plan: equal only for graphs with equal code."""
    return hashlib.sha256(fingerprint(graph).encode()).hexdigest()


def about(graph: Graph) -> str:
    """A graph in a few words: its name and the type of its first argument."""
    first = f"{graph.names[0]}: {graph.inputs[0].type}" if graph.inputs else ""
    more = ", ..." if len(graph.inputs) > 1 else ""
    return f"{graph.name}({first}{more})"


@contextmanager
def pretending(chip: str) -> Iterator[dict[str, tuple[str, str]]]:
    """Nothing runs; what would be needed is compiled into the dictionary."""
    plans: dict[str, tuple[str, str]] = {}

    def keep(graph: Graph, plan: Plan) -> None:
        plans[identity(graph)] = about(graph), plan.to_json()

    before = vars(cuda.settings).copy()
    vars(cuda.settings).update(chip=chip, find=None, pretend=keep)
    try:
        yield plans
    finally:
        vars(cuda.settings).update(before)


# %% 09_cuda.md § Kernels in a folder (2)
def seal(manifest: dict[str, Any]) -> str:
    """A digest of everything in a manifest but the seal."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def write_kernels(directory: Path, chip: str, plans: dict[str, tuple[str, str]],
                  **purpose: Any) -> None:
    """Write a folder of plans. Raises KernelsError for one that is not ours."""
    before: set[str] = set()
    if directory.exists() and any(directory.iterdir()):
        before = {*read_kernels(directory, anyone=True).manifest["plans"]}
    directory.mkdir(parents=True, exist_ok=True)
    listed = {}
    for name, (words, text) in plans.items():
        (directory / f"{name}.json").write_text(text)
        listed[name] = {"about": words,
                        "sha256": hashlib.sha256(text.encode()).hexdigest()}
    manifest = {"format": FORMAT, "version": VERSION, "tinymlir": __version__,
                "numpy": np.__version__, "chip": chip, **purpose, "plans": listed}
    manifest["seal"] = seal(manifest)
    part = directory / f"{MANIFEST}.part"
    part.write_text(json.dumps(manifest, indent=1))
    os.replace(part, directory / MANIFEST)
    for name in before - set(plans):  # nothing else in the folder is ours
        (directory / f"{Path(name).name}.json").unlink(missing_ok=True)


# %% 09_cuda.md § Kernels in a folder (3)
@dataclass(frozen=True)
class Kernels:
    """A folder of plans that has been checked."""

    directory: Path
    manifest: dict[str, Any]

    def find(self, graph: Graph) -> Plan:
        """The plan of a graph. Raises KernelsError if there is no sound one."""
        name = identity(graph)
        listed = self.manifest["plans"].get(name)
        if listed is None:
            raise KernelsError(
                f"{self.directory}: no kernels for {about(graph)}; compile them "
                f"with `tinymlir compile --gpu`, for this length and model")
        path = self.directory / f"{name}.json"
        if not path.is_file():
            raise KernelsError(f"{path}: missing; {AGAIN}")
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != listed.get("sha256"):
            raise KernelsError(f"{path}: damaged; {AGAIN}")
        try:
            return Plan.from_json(data.decode())
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise KernelsError(f"{path}: not a plan ({error!r}); {AGAIN}") from None

    def check(self, **purpose: Any) -> None:
        """Raises KernelsError if the kernels are for something else."""
        for key, value in purpose.items():
            if self.manifest.get(key) != value:
                raise KernelsError(
                    f"{self.directory}: its kernels are for {key} "
                    f"{self.manifest.get(key)}, expected {value}; {AGAIN}")

    def rows(self, n: int) -> int:
        """How many rows are computed for a text of n tokens."""
        if not (self.manifest["fused"] or self.manifest["cache"]):
            return n
        return min(1 << (n - 1).bit_length(), self.manifest["model"]["context"])

    def check_lengths(self, start: int, tokens: int) -> None:
        """Raises KernelsError if there are none for a text on its way."""
        saved = {self.rows(n) for n in self.manifest.get("lengths", ())}
        steps = min(tokens, 1) if self.manifest["cache"] else tokens
        if {self.rows(n) for n in range(start, start + steps)} <= saved:
            return
        last = start + max(steps, 1) - 1
        raise KernelsError(
            f"{self.directory}: no kernels for {tokens} tokens after a prompt of "
            f"{start}; write it again with `tinymlir compile --gpu --lengths "
            f"{start}-{last}`, and the other options as they are here")


# %% 09_cuda.md § Kernels in a folder (4)
def read_kernels(directory: Path, anyone: bool = False) -> Kernels:
    """A folder of plans, of any version if `anyone`. Raises KernelsError."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise KernelsError(f"{directory}: expected a folder of kernels, got one "
                           f"without {MANIFEST}; {AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise KernelsError(f"{path}: damaged ({error}); {AGAIN}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise KernelsError(f"{path}: expected a manifest of {FORMAT}; {AGAIN}")
    wanted = {"version": VERSION, "tinymlir": __version__, "seal": seal(manifest)}
    for key, value in ({} if anyone else wanted).items():
        if manifest.get(key) != value:
            problem = ("damaged" if key == "seal" else
                       f"made by {key} {manifest.get(key)}, and this is {value}")
            raise KernelsError(f"{path}: {problem}; {AGAIN}")
    plans = manifest.get("plans")
    if not isinstance(plans, dict) or not all(
            isinstance(listed, dict) for listed in plans.values()):
        raise KernelsError(f"{path}: it lists no plans; {AGAIN}")
    return Kernels(directory, manifest)


def purpose_of(config: Any, fused: bool, dtype: str | None = None,
               cache: bool = False, precision: str = "float32") -> dict[str, Any]:
    """What a manifest says about the model, as JSON gives it back."""
    sizes = asdict(config)
    for key in ("end", "vocabulary"):  # of no consequence; found in the graph
        del sizes[key]
    return {"model": sizes, "fused": fused, "dtype": dtype, "cache": cache,
            "precision": precision}


def use_kernels(directory: Path, **purpose: Any) -> Kernels:
    """From now on every plan comes from this folder. Raises KernelsError."""
    kernels = read_kernels(Path(directory))
    kernels.check(**purpose)
    cuda.settings.find = kernels.find
    return kernels
