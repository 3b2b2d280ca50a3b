# Tangled from notebooks/03_passes.md: edit the chapter, not this file.

# %% 03_passes.md § The stages (1)
"""From linalg on tensors to the llvm dialect, in named stages (chapter 3)."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mlir import ir
from mlir.dialects import bufferization, func, linalg, llvm
from mlir.passmanager import PassManager

from tinymlir.bands import cut_bands
from tinymlir.calls import call_kernels, find
from tinymlir.errors import CompileError
from tinymlir.loops import shape_loops
from tinymlir.mathfn import expand_math
from tinymlir.schedule import Kernel

FUSE = "canonicalize,cse,func.func(linalg-fuse-elementwise-ops),canonicalize,cse"
BUFFERIZE = (
    "eliminate-empty-tensors,"
    "one-shot-bufferize{bufferize-function-boundaries"
    " function-boundary-type-conversion=identity-layout-map buffer-alignment=64},"
    "drop-equivalent-buffer-results")
RESULTS = (
    "buffer-results-to-out-params{hoist-static-allocs=1 modify-public-functions=1},"
    "canonicalize,cse,"
    "ownership-based-buffer-deallocation,canonicalize,"
    "buffer-deallocation-simplification,bufferization-lower-deallocations,"
    "canonicalize,cse")
LOOPS = "func.func(convert-linalg-to-parallel-loops),canonicalize"
LOWER = (
    "convert-scf-to-openmp,canonicalize,expand-strided-metadata,lower-affine,"
    "convert-scf-to-cf,convert-math-to-llvm,convert-vector-to-llvm,"
    "finalize-memref-to-llvm,convert-func-to-llvm{{{functions}}},"
    "convert-openmp-to-llvm,convert-cf-to-llvm,convert-arith-to-llvm,"
    "convert-index-to-llvm,reconcile-unrealized-casts,canonicalize,cse")
LOWER_PROGRAM = LOWER.format(functions="use-bare-ptr-memref-call-conv=1")
LOWER_LIBRARY = LOWER.format(functions="")


# %% 03_passes.md § The stages (2)
@dataclass
class Work:
    """A module on its way down, and what its steps found out."""

    module: ir.Module
    bits: int = 512  # of the target's vector registers
    parallel: bool = False  # may it use threads?
    in_place: tuple[int, ...] = ()  # arguments that the first results are made in
    kernels: set[Kernel] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)


def distinct_results(work: Work) -> None:
    """A value that is returned again is copied."""
    for op in find(work.module, "func.return"):
        seen = set()
        for i, value in enumerate(op.operands):
            if value in seen:
                with ir.InsertionPoint(op), op.location:
                    fresh = bufferization.AllocTensorOp(value.type, [], copy=value)
                    op.operands[i] = fresh.result
            seen.add(value)


def own_fills(work: Work) -> None:
    """Each user of a filled tensor gets one of its own, to work in place on it."""
    for op in find(work.module, "linalg.fill"):
        for use in list(op.results[0].uses)[1:]:
            with ir.InsertionPoint(use.owner), ir.Location.unknown():
                fill = op.clone()
                empty = op.operands[1].owner.clone()
                empty.move_before(fill)
                fill.operands[1] = empty.results[0]
            use.owner.operands[use.operand_number] = fill.results[0]


def in_place(work: Work) -> None:
    """The first results, if they are arguments that were written to, are not
    returned once more. Raises CompileError if one is somewhere else."""
    n = len(work.in_place)
    if not n:
        return
    main = next(op for op in find(work.module, "func.func")
                if ir.StringAttr(op.attributes["sym_name"]).value == "main")
    block = main.regions[0].blocks[0]
    end = block.operations[len(block.operations) - 1]
    results = list(end.operands)
    if any(x != block.arguments[i] for i, x in zip(work.in_place, results)):
        raise CompileError("an array that was to be updated in place was copied")
    with ir.InsertionPoint(end), ir.Location.unknown():
        func.ReturnOp(results[n:])
    end.erase()
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    main.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(kind.inputs, kind.results[n:]))


def copies(work: Work) -> None:
    """memref.copy between views as linalg.copy."""
    for op in find(work.module, "memref.copy"):
        source, target = op.operands
        if not (is_plain(source) and is_plain(target)):
            with ir.InsertionPoint(op), op.location:
                linalg.copy(source, outs=[target])
            op.erase()


def is_plain(value: ir.Value) -> bool:
    """Row after row, without gaps."""
    kind = ir.MemRefType(value.type)
    return kind.affine_map == ir.AffineMap.get_identity(kind.rank)


def bands(work: Work) -> None:
    cut_bands(work.module)


def products(work: Work) -> None:
    work.kernels = call_kernels(work.module, work.bits, work.parallel)


def loops(work: Work) -> None:
    shape_loops(work.module, work.parallel)


def functions(work: Work) -> None:
    expand_math(work.module)


# %% 03_passes.md § The stages (3)
Step = str | Callable[[Work], None]


@dataclass(frozen=True)
class Stage:
    """A name and the steps that lead to it from the stage before."""

    name: str
    steps: tuple[Step, ...]


CPU = (
    Stage("linalg", ()),
    Stage("fused", (FUSE,)),
    Stage("bufferized", (own_fills, distinct_results, BUFFERIZE, in_place, RESULTS,
                         copies)),
    Stage("scheduled", (bands, products, LOOPS, loops, "canonicalize,cse",
                        functions)),
    Stage("lowered", (LOWER_PROGRAM,)),
)


# %% 03_passes.md § The stages (4)
def run_pipeline(module: ir.Module, pipeline: str, verify: bool = False) -> None:
    """Run a pass pipeline in place. Raises CompileError with the pipeline."""
    try:
        manager = PassManager.parse(f"builtin.module({pipeline})")
        manager.enable_verifier(verify)
        manager.run(module.operation)
    except Exception as error:
        raise CompileError(f"MLIR refused the module: {error}\nto repeat: mlir-opt "
                           f"--pass-pipeline='builtin.module({pipeline})'"
                           ) from error


def run_stages(work: Work, stages: tuple[Stage, ...], keep: bool = False) -> Work:
    """Take a module through the stages; `keep` stores the text of each."""
    for stage in stages:
        for step in stage.steps:
            if callable(step):
                step(work)
            else:
                run_pipeline(work.module, step)
        if keep:
            check(work.module, stage.name)
            work.texts[stage.name] = str(work.module)
    return work


def check(module: ir.Module, stage: str) -> None:
    """Raises CompileError if the module is not what its dialects allow."""
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        raise CompileError(f"the stage {stage!r} is not valid: {error}") from error


def to_llvm(module: ir.Module) -> str:
    """LLVM's text for a module. Raises CompileError if an op was not lowered."""
    left = set()

    def visit(op: ir.Operation) -> ir.WalkResult:
        if not op.name.startswith(("llvm.", "omp.", "builtin.module")):
            left.add(op.name)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if left:  # the translation would not survive it
        raise CompileError(f"not lowered: {', '.join(sorted(left))}")
    return llvm.translate_module_to_llvmir(module.operation)
