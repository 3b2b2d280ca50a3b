# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § The target (1)
"""`jit(f, target="gpu")` (chapter 9)."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tinymlir import compiler, store
from tinymlir.launcher import Loaded, misfit
from tinymlir.devarray import DeviceArray, borrow, put
from tinymlir.device import Device, Memory, available, device
from tinymlir.driver import DeviceError, Properties, number_of
from tinymlir.graph import Graph
from tinymlir.plan import Plan
from tinymlir.pytree import flatten, on_device

IN_PLACE = True  # kernels can write to arrays that were donated


def take(array: Any, path: str) -> Any:
    """A plain host array, or an array on the device.

    Raises DTypeError, UnsupportedError, ArgumentError or DeviceError."""
    if isinstance(array, DeviceArray):
        if array.device is not device():
            raise DeviceError(f"{path}: the array is on a device that is not used "
                              f"any more")
        return array
    if on_device(array):
        return borrow(array, path)
    return compiler.take(array, path)


def ready(array: Any, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Can a program take it as it is?"""
    if not isinstance(array, DeviceArray):
        return compiler.ready(array, shape, dtype)
    return (array.shape == shape and array.dtype == dtype
            and array.device is device())


# %% 09_cuda.md § The target (2)
@dataclass
class Settings:
    """Where plans come from, for the whole process."""

    chip: str = ""  # compile for this one, not for the device's
    find: Callable[[Graph], Plan] | None = None  # look here, and do not compile
    pretend: Callable[[Graph, Plan], None] | None = None  # tell this, do not run


settings = Settings()


def chip() -> str:
    """What to compile for. Raises DeviceError if nobody says so."""
    return settings.chip or suitable(device().properties)


def suitable(known: Properties) -> str:
    """The newest chip that LLVM knows and the device can stand in for."""
    from tinymlir.gpu import CHIPS
    fitting = [name for name in CHIPS if number_of(name) <= known.capability]
    if not fitting:
        raise DeviceError(f"{known.name} is {known.chip}, which is too old; "
                          f"expected one of {', '.join(CHIPS)} or later")
    return max(fitting, key=number_of)


def kernel_compiler() -> ModuleType:
    """Chapter 8's module. Raises DeviceError where it cannot be imported."""
    try:
        return import_module("tinymlir.gpu")
    except ImportError as error:
        raise DeviceError(
            f"there is no compiler on this machine ({error}); save the kernels on "
            f"another with `tinymlir compile --gpu`, and name them here with "
            f"--kernels") from None


def plan_for(graph: Graph) -> Plan:
    """A plan: from a folder, from the cache on disk, or compiled now."""
    if settings.find:
        return settings.find(graph)
    gpu = kernel_compiler()
    wanted = chip()
    key = store.key_of("\n".join([wanted, sources(), store.fingerprint(graph)]))
    kept = store.read(key)
    if kept is None:
        kept = [], gpu.compile_graph(graph, wanted).to_json().encode()
        store.write(key, *kept)
    return Plan.from_json(kept[1].decode())


@cache
def sources() -> str:
    """A digest of this package: another compiler makes other plans."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# %% 09_cuda.md § The target (3)
class Program:
    """A compiled graph. It goes to the device at its first call."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.loaded = graph, None
        ready = settings.chip or settings.find or available()
        self.plan = plan_for(graph) if ready else None
        full = [i for i, x in enumerate(graph.inputs) if x.size]
        self.changed = [full.index(i) for i in graph.in_place.values()]

    def on(self, home: Device) -> Loaded:
        """The plan on this device."""
        if self.loaded is None or self.loaded.home is not home:
            plan = self.plan or plan_for(self.graph)
            if wrong := misfit(plan, self.graph):
                raise DeviceError(
                    f"the kernels do not fit {self.graph.name}: {wrong}")
            captured = [x.attrs["value"] for x in self.graph.arrays if x.size]
            self.plan, self.loaded = plan, Loaded(home, plan, captured)
        return self.loaded

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Host arrays in, host arrays out; with one on the device, all out are.

        A result in the memory of an argument is that argument."""
        if settings.pretend:
            return self.pretend(arrays)
        home = device()
        stay = any(isinstance(array, DeviceArray) for array in arrays)
        with home.current():
            given = [a for a in arrays if a.size]
            made = iter(self.on(home).run(given, self.changed))
            old = self.graph.in_place
            places = [next(made) if x.size and i not in old else None
                      for i, x in enumerate(self.graph.results)]
            results = [self.result(home, i, arrays, place, stay)
                       for i, place in enumerate(places)]
            if any(borrowed(array) for array in arrays):
                home.stream.wait()  # its owner may reuse the memory
        return results

    def result(self, home: Device, i: int, arrays: Sequence[Any],
               place: Memory | None, stay: bool) -> Any:
        """A result: an argument, an array on the device, or one on the host."""
        node, count = self.graph.results[i], len(self.graph.outputs)
        if i in self.graph.in_place:
            return arrays[self.graph.in_place[i]]
        if i < count:
            return (self.kept if stay else fetched)(home, node.type, place)
        for x, array in zip(self.graph.inputs, arrays):  # an index is perhaps here
            if x is node and isinstance(array, np.ndarray):
                return array
        return fetched(home, node.type, place)

    def bind(self, arrays: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """A function of the arrays that are None here; the others are kept."""
        return lambda rest: self(compiler.merged(arrays, rest))

    def pretend(self, arrays: Sequence[Any]) -> list[Any]:
        """Zeros; somebody wants to know what would have been run."""
        if self.plan is None or self.plan.chip != chip():
            self.plan = plan_for(self.graph)
        settings.pretend(self.graph, self.plan)
        place = self.graph.in_place
        return [arrays[place[i]] if i in place else np.zeros(x.shape, x.dtype)
                for i, x in enumerate(self.graph.results)]

    def kept(self, home: Device, kind: Any, place: Memory | None) -> DeviceArray:
        """A result that stays on the device, in memory of its own."""
        if place is not None and self.loaded.keeps:
            fresh = home.pool.take(kind.nbytes)
            home.stream.copy(fresh.address, place.address, kind.nbytes)
            place = fresh
        address = place.address if place else 0
        return DeviceArray(home, address, kind.shape, kind.dtype, place)


load = Program


def place(params: Any) -> Any:
    """A tree of host arrays, its arrays on the device."""
    if settings.pretend:
        return params
    leaves, structure = flatten(params, "params")
    return structure.fill(put(leaf) for _, leaf in leaves)


# %% 09_cuda.md § The target (4)
def fetched(home: Device, kind: Any, place: Memory | None) -> np.ndarray:
    """A result on the host."""
    made = np.empty(kind.shape, kind.dtype)
    if place is not None:
        home.stream.copy_out(made.ctypes.data, place.address, made.nbytes)
    return made


def borrowed(array: Any) -> bool:
    """Does the memory belong to another library?"""
    return isinstance(array, DeviceArray) and not isinstance(
        array.owner, (Memory, type(None)))


def texts(graph: Graph) -> Mapping[str, str]:
    """Stage name -> text, from `graph` to `ptx`. Needs no device."""
    from tinymlir import gpu
    known = settings.chip or available()
    return gpu.texts(graph, chip() if known else gpu.CHIP)
