"""Would the tests notice? Plants faults, one at a time, in a copy of the package.

    python tests/sabotage.py [NAME ...]

By hand, since it takes minutes. Each fault says which tests ought to catch it; a fault that
survives them is tried again with all of tests/. test_sabotage.py keeps the list from rotting.
"""
from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("src", "tests", "conftest.py", "pyproject.toml", "example.py", "verify.py",
         "fetch_model.py")
TOO_LATE = ("test_sync.py", "test_sabotage.py")  # they compare texts, so they always notice


@dataclass(frozen=True)
class Fault:
    """A piece of a module, what is put in its place, and who should notice."""

    name: str
    module: str
    old: str
    new: str
    tests: str  # arguments of pytest


EVERY = "test_fuzz.py::test_every_operation_is_tried_and_nothing_is_wrong"
FAULTS = [
    # chapter 1: the graph
    Fault("a weak number counts as strong in np.where", "numpy_api",
          "np.result_type(*(i if is_weak(i) else as_expr(i).dtype for i in (x, y)))",
          "np.result_type(*(as_expr(i).dtype for i in (x, y)))",
          "test_spec_protocol.py -k where_refuses"),
    Fault("a reversed slice that ends at 0 takes one more", "indexing",
          "picked.stop if picked.stop >= 0 else None", "picked.stop if picked.stop > 0 else None",
          "test_ops.py::test_moves"),
    Fault("ddof is dropped", "numpy_api", "(correction or ddof)", "(correction or 0)",
          "test_spec_protocol.py::test_degrees_of_freedom"),
    Fault("a constant index may be one too large", "indexing", "(numbers >= len(x))",
          "(numbers > len(x))", "test_spec_protocol.py::test_indices"),
    Fault("an int beyond int64 is compared as if it had the other sign", "protocols",
          "math.inf if x > 0 else -math.inf", "-math.inf if x > 0 else math.inf",
          "test_spec_protocol.py::test_operators_on_either_side"),
    Fault("True and 1 are the same static", "pytree", "        return kind, value\n    if (split",
          "        return object, value\n    if (split", "test_jit.py"),
    Fault("a rewritten node keeps its old place", "graph",
          "next(serials) if late else node.serial", "node.serial",
          "test_fuzz.py::test_a_rewritten_graph_keeps_its_order"),
    Fault("a captured array is not copied", "expr", 'np.array(value, dtype, order="C")',
          'np.asarray(value, dtype, order="C")', "test_spec_memory.py -k captured"),
    # chapter 2: the builder
    Fault(">= of integers is >", "scalars", "(Float.OGE, Int.sge, Int.uge)",
          "(Float.OGE, Int.sgt, Int.uge)", "test_ops.py::test_binary_with_promotion"),
    Fault("NaN equals NaN", "scalars", "(Float.UNE, Int.ne, Int.ne)",
          "(Float.ONE, Int.ne, Int.ne)", "test_spec_numbers.py::test_floats_at_the_edges"),
    Fault("True becomes -1", "scalars", '"bi": arith.extui', '"bi": arith.extsi',
          "test_spec_numbers.py::test_bools_are_not_integers"),
    Fault("floats are rounded on their way to int", "scalars", "arith.fptosi(element(new), x)",
          "arith.fptosi(element(new), math.roundeven(x))", "test_ops.py::test_astype"),
    Fault("a maximum starts at 0", "arrays", '{"f": (-np.inf, np.inf)', '{"f": (0, np.inf)',
          "test_ops.py::test_reductions"),
    Fault("float32 is added up in float32", "arrays",
          'np.dtype("float64") if op is Op.SUM and dtype.kind == "f" else dtype', "dtype",
          "test_accuracy.py -k million"),
    Fault("rows and columns are swapped in a triangle", "moves",
          "arith.subi(here(n - 1), here(n - 2))", "arith.subi(here(n - 2), here(n - 1))",
          "test_ops.py::test_moves"),
    Fault("a negative index is not wrapped", "moves", "arith.select(negative, wrapped, at)",
          "arith.select(negative, at, at)", "test_spec_graphs.py -k row_numbers"),
    Fault("parts are placed by their rows", "moves", "at += x.shape[axis]", "at += x.shape[0]",
          "test_ops.py::test_moves"),
    Fault("shapes are aligned at the left", "arrays", "len(out), len(out) - len(shape)",
          "len(out), 0", EVERY),
    Fault("the right factor is read transposed", "arrays", "(right, (k, j))", "(right, (j, k))",
          "test_ops.py::test_matmul"),
    # chapter 3: the passes
    Fault("a result returned twice is one buffer", "passes", "            if value in seen:",
          "            if False:",
          "test_ops.py::test_results_that_are_inputs_constants_or_twice_the_same"),
    Fault("every matrix of a stack is the first one", "calls",
          "arith.addi(offset, arith.muli(batch, step))", "offset", "test_ops.py::test_matmul"),
    Fault("the low part of ln 2 is dropped", "mathfn",
          "    r = math.fma(n, const(x, -f.ln2[1]), r)\n", "", "test_accuracy.py"),
    Fault("tanh loses the sign", "mathfn", "math.copysign(arith.select(small, near, far), x)",
          "arith.select(small, near, far)", "test_accuracy.py"),
    Fault("constants stay float64 in float32 mode", "rewrites",
          "constant(value, NARROW) if node.dtype == WIDE else node", "node",
          "test_jit.py -k float32"),
    Fault("a band may read what other bands write", "bands", "(a != b or at != at_too)",
          "(a != b)", "test_bands.py"),
    Fault("a band counts its rows from 0", "bands", "(once and not counts and",
          "(once and", "test_bands.py"),
    Fault("a square keeps one corner", "squares", "left = [x + n - half if x & half else x",
          "left = [x if x & half else x", "test_schedule.py"),
    Fault("the sums of all panels are kept in one place", "schedule",
          "arith.muli(number, self.rows)", "index(0)", "test_schedule.py"),
    Fault("a panel that ends with the matrix is not the last", "schedule",
          "last = arith.cmpi(ULE,", "last = arith.cmpi(ULT,", "test_schedule.py"),
    Fault("every panel is as wide as a tile", "schedule",
          "whole=arith.cmpi(ULE, arith.addi(j, wide), right)",
          "whole=arith.cmpi(ULE, left, right)", "test_schedule.py"),
    Fault("sums of a group start from what was in memory", "library",
          "new = arith.ori(several, fresh)", "new = fresh", "test_schedule.py"),
    Fault("the last group of rows is as high as the others", "onerow",
          "rows = arith.minui(arith.subi(depth, top), size)", "rows = size", "test_schedule.py"),
    Fault("sums of a row depend on where it lies", "onerow", "zip(sums[:half], sums[half:])",
          "zip(sums[::2], sums[1::2])", "test_schedule.py"),
    Fault("numbers before a border are forgotten", "onerow",
          "load=masked(opposite(outside))", "load=masked(outside)", "test_schedule.py"),
    Fault("zeros are skipped beside NaN", "blank", "arith.select(found, byte(YES), byte(NO))",
          "byte(YES)", "test_blank.py"),
    Fault("a tile is blank if its corners are", "blank",
          "return either(perhaps, look,", "return either(perhaps, lambda: [truth(True)],",
          "test_blank.py"),
    Fault("a tile that is skipped keeps -0.0", "schedule", "[add(x, zero) for x in begun(",
          "[x for x in begun(", "test_blank.py"),
    Fault("what is known of a panel holds for the next one", "schedule", "    forget(p.note)\n",
          "", "test_blank.py"),
    # chapter 4: the JIT
    Fault("numbers are no part of the key on disk", "store", '.tobytes().hex() if number else ""',
          '.tobytes().hex() if False else ""', "test_store.py -k one_bit"),
    Fault("statics are no part of the key in memory", "jit",
          "freeze(dict(sorted(static.items())))", "()", "test_jit.py"),
    Fault("an index may be one too large", "jit", "(rows > high)]", "(rows > high + 1)]",
          "test_jit.py::test_gather_checks_every_call"),
    Fault("the pool lets go while there is room", "pool",
          "br i1 %more, label %scan, label %evict", "br i1 %more, label %evict, label %evict",
          "test_pool.py"),
    Fault("strides of arguments are ignored", "compiler", 'np.asarray(array, dtype, order="C")',
          "np.asarray(array, dtype)", "test_ops.py::test_layouts_of_memory"),
    Fault("the memory of results is used again", "compiler",
          "made = [kind and np.empty(*kind) for kind in self.types]",
          "made = self.old = getattr(self, 'old', 0) or [k and np.empty(*k) for k in self.types]",
          "test_spec_memory.py::test_results_are_fresh_memory"),
    # chapter 5: the model
    Fault("a token sees the next one", "ops", "* -np.inf, k=1)", "* -np.inf, k=2)",
          "test_generate.py::test_every_residual"),
    Fault("heads are merged without moving them", "ops",
          "x.transpose(1, 0, 2).reshape(n, heads * size)", "x.reshape(n, heads * size)",
          "test_generate.py::test_every_residual"),
    Fault("positions count from 1", "ops", "positions[:len(ids)]", "positions[1:len(ids) + 1]",
          "test_generate.py::test_every_residual"),
    Fault("of equal scores the last one wins", "model", "return int(np.argmax(scores))",
          "return int(len(scores) - 1 - np.argmax(scores[::-1]))",
          "test_generate.py::test_ties_go_to_the_lowest"),
    Fault("half a character is printed", "model", 'if not text.endswith("\\ufffd"):', "if True:",
          "test_generate.py -k streamed"),
    Fault("a switch that changes the formula is ignored", "checkpoint",
          '"reorder_and_upcast_attn": (False,)', '"reorder_and_upcast_attn": (False, True)',
          "test_checkpoint.py::test_refused_by_name"),
    # chapter 6: one function
    Fault("the logits of the padding", "fused", "np.array(len(ids) - 1)", "np.array(len(ids))",
          "test_fused_model.py::test_every_residual"),
    Fault("the attention of the fused model sees the next token", "reference", "-np.inf, k=1)",
          "-np.inf, k=2)", "test_fused_model.py::test_every_residual"),
    Fault("blocks that are wired differently are alike", "outline",
          "return bool((rows == rows[0]).all())", "return True",
          "test_spec_graphs.py -k order_of_operands"),
    Fault("an index inside a block is not checked", "graph", "for x in body.gathers]",
          "for x in ()]", "test_spec_graphs.py -k row_numbers"),
    # chapter 7: parity
    Fault("NaN is within the tolerance", "verify", "np.where(np.isnan(gap), np.inf, gap)",
          "np.where(np.isnan(gap), 0.0, gap)", "test_verify.py -k compare"),
    Fault("the best step of a tensor is reported", "verify", "worst = max(a, b,",
          "worst = min(a, b,", "test_spec_report.py"),
]


def places(fault: Fault) -> int:
    """How often the old text is there; it has to be once."""
    return source(ROOT, fault).read_text().count(fault.old)


def source(root: Path, fault: Fault) -> Path:
    return root / f"src/tinymlir/{fault.module}.py"


def plant(fault: Fault, root: Path) -> None:
    """A copy of the project with the fault in it."""
    for part in PARTS:
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, root / part)
    for name in TOO_LATE:
        (root / "tests" / name).unlink()
    path = source(root, fault)
    path.write_text(path.read_text().replace(fault.old, fault.new))


def run(root: Path, tests: list[str]) -> str | None:
    """The first test that fails, or None; a crash of the interpreter is a failure too."""
    env = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider",
         "-o", "addopts=", *tests],
        cwd=root / "tests", env=env, text=True, capture_output=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode in (0, 5):
        return None
    return failed[1] if failed else f"the interpreter ended with {done.returncode}"


def caught_by(fault: Fault) -> str | None:
    """The test that notices the fault, or None."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        plant(fault, root)
        return run(root, shlex.split(fault.tests)) or run(root, [])


def main(names: list[str]) -> int:
    """Try the faults whose names hold one of these words; 1 if one survives."""
    chosen = [f for f in FAULTS if not names or any(n in (f.name, f.module) for n in names)]
    survivors = 0
    for fault in chosen:
        found = caught_by(fault)
        survivors += found is None
        print(f"{fault.module:11} {fault.name}: {'caught by ' + found if found else 'SURVIVED'}",
              flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
