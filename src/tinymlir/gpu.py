# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Memory and PTX (1)
"""From a graph to GPU kernels and a plan (chapter 8)."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mlir import ir
from mlir.dialects import gpu

import tinymlir.columns  # noqa: F401  adds kernels
import tinymlir.tensorcores  # noqa: F401  adds kernels
import tinymlir.tiles  # noqa: F401  adds kernels
from tinymlir import passes
from tinymlir.arrays import MLIR
from tinymlir.builder import build
from tinymlir.calls import find
from tinymlir.compiler import context, mlir_lock
from tinymlir.errors import ArgumentError
from tinymlir.expr import Op
from tinymlir.graph import Graph
from tinymlir.groups import MANY
from tinymlir.kernels import UNROLL, Array
from tinymlir.plan import ALIGNMENT, RULES, Buffer, Launch, Plan, Pointer
from tinymlir.routines import Program, Routine, Run

OWN: dict[Op, Callable[..., Any]] = {}  # rules for MLIR that are others on a GPU


# %% 08_gpu.md § Memory and PTX (2)
def lifetimes(steps: Sequence[Run]) -> dict[Array, tuple[int, int]]:
    """Temporary array -> its first and its last step."""
    found: dict[Array, tuple[int, int]] = {}
    for i, step in enumerate(steps):
        for array in step.arrays:
            if array.kind == "scratch":
                found[array] = (found.get(array, (i, i))[0], i)
    return found


def arrange(lives: Mapping[Array, tuple[int, int]]) -> tuple[dict[Array, int], int]:
    """An offset for each temporary array, and the bytes they need together.

    The largest first, each as low as it fits beside those that live with it."""
    offsets: dict[Array, int] = {}
    for array in sorted(lives, key=lambda a: -a.nbytes):
        first, last = lives[array]
        taken = sorted((offsets[a], offsets[a] + a.nbytes) for a in offsets
                       if lives[a][0] <= last and first <= lives[a][1])
        at = 0
        for start, end in taken:
            if at + array.nbytes <= start:
                break
            at = max(at, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[array] = at
    total = max((offsets[a] + a.nbytes for a in offsets), default=0)
    return offsets, total


# %% 08_gpu.md § Memory and PTX (3)
def plan_of(routine: Routine, chip: str, ptx: str) -> Plan:
    """The routine with a pointer for every array."""
    steps = routine.steps
    fresh = [a for a in routine.gives if a.kind == "result"]
    buffers = [Buffer(a.nbytes, a.kind, i) for arrays in (routine.takes, fresh)
               for i, a in enumerate(arrays)]
    number = {id(a): Pointer(i) for i, a in enumerate([*routine.takes, *fresh])}
    offsets, total = arrange(lifetimes(steps))
    number |= {id(a): Pointer(len(buffers), at) for a, at in offsets.items()}
    if total:
        buffers.append(Buffer(total, "scratch", 0))
    launches = tuple(
        Launch(s.kernel, s.grid, s.block, 0, tuple(number[id(a)] for a in s.arrays))
        for s in steps)
    return Plan(chip, ptx, tuple(buffers), (), launches)


# %% 08_gpu.md § Memory and PTX (4)
CHIPS = {  # chip -> the oldest version of PTX that knows it
    "sm_75": 63, "sm_80": 70, "sm_86": 71, "sm_87": 74, "sm_89": 78, "sm_90": 78,
    "sm_100": 86, "sm_103": 88, "sm_120": 87, "sm_121": 88,
}
CHIP = "sm_80"
OLDEST = {"float32": 75, "tf32": 80}  # precision -> the oldest chip that has it


def check_chip(chip: str, precision: str = "float32") -> str:
    """The chip. Raises ArgumentError for one that LLVM would stumble over."""
    for what, value, known in (("chip", chip, CHIPS),
                               ("precision", precision, OLDEST)):
        if value not in known:
            raise ArgumentError(f"{what} {value!r} is not supported; expected one "
                                f"of {', '.join(known)}")
    if int(chip.removeprefix("sm_")) < OLDEST[precision]:
        raise ArgumentError(f"precision {precision!r} needs a chip of "
                            f"sm_{OLDEST[precision]} or later, not {chip}")
    return chip


# %% 08_gpu.md § Memory and PTX (5)
TO_KERNELS = "canonicalize,cse"
TO_NVVM = (
    "nvvm-attach-target{{chip={chip} features=+ptx{version} O=3}},"
    "convert-nvgpu-to-nvvm,"
    "gpu.module(expand-strided-metadata,lower-affine,convert-scf-to-cf,"
    "convert-gpu-to-nvvm{{use-bare-ptr-memref-call-conv=1}},"
    "convert-to-llvm,canonicalize,cse,reconcile-unrealized-casts)")


def built(graph: Graph) -> ir.Module:
    """The graph as a module. What OWN has a rule for is built by that one."""
    for name in RULES:
        import_module(name)
    before = dict(MLIR)
    MLIR.update(OWN)
    try:
        return build(graph)
    finally:
        MLIR.clear()
        MLIR.update(before)


# %% 08_gpu.md § Memory and PTX (6)
@dataclass
class Lowered:
    """A graph as kernels: the module that holds them, the steps that use them."""

    module: ir.Module
    routine: Routine
    texts: dict[str, str]


def lower(graph: Graph) -> Lowered:
    """Kernels of a graph. Call it inside the context, with the lock."""
    work = passes.Work(built(graph))
    few = len(graph.arguments) <= MANY  # MLIR's fusion knows no limit
    passes.run_stages(work, passes.CPU[:2 if few else 1], keep=True)
    with ir.Location.unknown():
        program = Program(work.module, graph.precision)
        routine = program.routine("main")
        module = program.library.module()
        passes.expand_math(module)
    passes.run_pipeline(module, TO_KERNELS, verify=True)
    return Lowered(module, routine, {**work.texts, "kernels": str(module)})


# %% 08_gpu.md § Memory and PTX (7)
def to_ptx(module: ir.Module, chip: str) -> str:
    """PTX of all kernels; uses the module up."""
    if not module.body.operations[0].regions[0].blocks[0].operations:
        return ""
    passes.run_pipeline(module, TO_NVVM.format(chip=chip, version=CHIPS[chip]))
    for branch in find(module, "llvm.br"):  # the lowering leaves it where LLVM
        if UNROLL in branch.attributes:  # does not look
            branch.attributes["loop_annotation"] = branch.attributes[UNROLL]
    passes.run_pipeline(module, "gpu-module-to-binary{format=isa}")
    (binary,) = module.body.operations
    (attribute,) = binary.attributes["objects"]
    return gpu.ObjectAttr(attribute).object.decode()


def compile_graph(graph: Graph, chip: str = CHIP) -> Plan:
    """The plan of a graph for a chip.

    If its precision is "tf32", products of float32 matrices go to tensor cores,
    which look at 11 bits of each number. Raises ArgumentError for a chip that has
    none, or that is not known."""
    check_chip(chip, graph.precision)
    with mlir_lock, context():
        lowered = lower(graph)
        return plan_of(lowered.routine, chip, to_ptx(lowered.module, chip))


# %% 08_gpu.md § Memory and PTX (8)
def texts(graph: Graph, chip: str = CHIP) -> Mapping[str, str]:
    """Stage name -> text, in order."""
    check_chip(chip, graph.precision)
    with mlir_lock, context():
        lowered = lower(graph)
        ptx = to_ptx(lowered.module, chip)
    plan = plan_of(lowered.routine, chip, ptx)
    return {"graph": str(graph), **lowered.texts, "plan": listing(plan), "ptx": ptx}


# %% 08_gpu.md § Memory and PTX (9)
def listing(plan: Plan) -> str:
    """The buffers and the steps of a plan, a line each."""
    lines = [f"buffer {i}: {b.kind} {b.index}, {b.nbytes} bytes"
             for i, b in enumerate(plan.buffers)]
    for step in plan.launches:
        given = ", ".join(f"{p.buffer}+{p.offset}" if p.offset else f"{p.buffer}"
                          for p in step.arguments)
        shape = " x ".join("x".join(str(n) for n in trimmed(size))
                           for size in (step.grid, step.block))
        lines.append(f"{step.kernel}<{shape}>({given})")
    return "\n".join(lines)


def trimmed(size: Sequence[int]) -> list[int]:
    """Without the ones at the end."""
    count = max((i + 1 for i, n in enumerate(size) if n > 1), default=1)
    return list(size[:count])
