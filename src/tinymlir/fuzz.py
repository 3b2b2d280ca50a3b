# Tangled from notebooks/90_fuzz.md: edit the chapter, not this file.

# %% 90_fuzz.md § Counting (1)
"""Differential fuzzing: NumPy, the interpreter and compiled code must agree.

    python -m tinymlir.fuzz --count 1000 --seed 1       (appendix on fuzzing)"""
from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinymlir.expr import DTYPES, Op
from tinymlir.fuzz_check import REFUSALS, Mode, Verdict, check
from tinymlir.fuzz_phrases import write_program
from tinymlir.fuzz_programs import Program
from tinymlir.graph import Graph
from tinymlir.rewrites import improve


def ops_of(graph: Graph) -> set[tuple[Op, str]]:
    """Every op of a graph with its dtype, and those of the graphs that it calls."""
    found = {(x.op, DTYPES[x.dtype]) for x in graph.nodes}
    bodies = [x.attrs["body"] for x in graph.nodes if x.op is Op.CALL]
    return found.union(*map(ops_of, bodies))


def reason(text: str) -> str:
    """A refusal without what belongs to one program alone."""
    found = (re.search(pattern, text) for pattern in REFUSALS)
    return next((m[0] for m in found if m), text)


# %% 90_fuzz.md § Counting (2)
@dataclass
class Report:
    """What a number of programs came to."""

    kinds: Counter = field(default_factory=Counter)
    ops: Counter = field(default_factory=Counter)  # (op, dtype) -> programs
    compared: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def count(self, verdict: Verdict) -> None:
        self.kinds["fault" if verdict.fault else verdict.kind] += 1
        self.compared.update(verdict.compared)
        if verdict.reason:
            self.reasons[reason(verdict.reason)] += 1
        if verdict.graph and not verdict.fault:
            improved = improve(verdict.graph)
            self.ops.update(ops_of(verdict.graph) | ops_of(improved))

    def add(self, other: Report) -> None:
        for name in ("kinds", "ops", "compared", "reasons"):
            getattr(self, name).update(getattr(other, name))
        self.faults += other.faults

    @property
    def untried(self) -> set[Op]:
        """Operations that no program had."""
        return set(Op) - {op for op, _ in self.ops}


# %% 90_fuzz.md § Counting (3)
def table(report: Report) -> str:
    """Programs for each op and dtype."""
    kinds = list(DTYPES.values())
    lines = [f"{'':12}" + "".join(f"{kind:>7}" for kind in kinds)]
    for op in Op:
        numbers = (report.ops[op, kind] or "" for kind in kinds)
        lines.append(f"{op!s:12}" + "".join(f"{n:>7}" for n in numbers))
    return "\n".join(line.rstrip() for line in lines)


# %% 90_fuzz.md § Shrinking (1)
def snippet(program: Program, mode: str) -> str:
    """What a user can paste to see the fault."""
    names = ", ".join(x.name for x in program.inputs)
    call = f'MODES["{mode}"].engine(f)({names})'
    head = ("import numpy as np; from tinymlir.fuzz_check import MODES\n"
            "from tinymlir.updates import attend, update")
    if not re.search(r"attend|update", str(program)):
        head = head.partition("\n")[0]
    return f"{head}\n{program}\nprint({call}, 'is not', f({names}))"


class Fault(AssertionError):
    """A program that a mode gets wrong."""

    def __init__(self, program: Program, mode: str, wrong: str) -> None:
        super().__init__(f"{snippet(program, mode)}\n# {mode}: {wrong}")


def programs() -> Any:
    """Hypothesis's strategy for programs."""
    from hypothesis import strategies

    @strategies.composite
    def program(draw: Callable) -> Program:
        def choose(options: Sequence) -> Any:
            return options[draw(strategies.integers(0, len(options) - 1))]
        return write_program(choose)

    return program()


# %% 90_fuzz.md § Shrinking (2)
def search(count: int, seed: int, modes: Mapping[str, Mode] | None = None,
           journal: Path | None = None) -> Report:
    """Try `count` programs; a fault ends the search, shrunk as far as it goes.

    `journal` is a file that holds the program that is being run."""
    import hypothesis
    report, phase = Report(), hypothesis.Phase

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, print_blob=False,
        report_multiple_bugs=False, verbosity=hypothesis.Verbosity.quiet,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[phase.generate, phase.shrink])
    @hypothesis.given(programs())
    def run(program: Program) -> None:
        if journal:
            journal.write_text(str(program))
        verdict = check(program, modes)
        if not report.kinds["fault"]:
            report.count(verdict)
        if verdict.fault:
            raise Fault(program, *verdict.fault)

    try:
        run()
    except Fault as fault:
        report.faults.append(str(fault))
    return report


# %% 90_fuzz.md § The command (1)
CHUNK = 250  # programs in a process


def isolated(chunk: tuple[int, int]) -> Report:
    """A search in a process of its own, which bad code may kill."""
    spawn = multiprocessing.get_context("spawn")
    with (tempfile.TemporaryDirectory() as folder,
          ProcessPoolExecutor(1, spawn) as pool):
        journal = Path(folder, "program")
        try:
            return pool.submit(search, *chunk, journal=journal).result()
        except BrokenProcessPool:
            text = journal.read_text() if journal.exists() else ""
            return Report(faults=[f"{text}\n# this program killed its process"])


def run_all(count: int, seed: int, jobs: int) -> Report:
    """All the programs, with a progress line on a terminal; faults at once."""
    from tqdm import tqdm
    chunks = [(min(CHUNK, count - i), seed * 1_000_003 + i)
              for i in range(0, count, CHUNK)]
    total = Report()
    with (tqdm(total=count, unit=" programs", disable=None) as bar,
          ThreadPoolExecutor(jobs) as threads):
        for (size, _), found in zip(chunks, threads.map(isolated, chunks)):
            total.add(found)
            for text in found.faults:
                bar.write(f"{text}\n", file=sys.stdout)
                sys.stdout.flush()
            bar.update(size)
    return total


# %% 90_fuzz.md § The command (2)
def main(argv: Sequence[str] | None = None) -> int:
    """`python -m tinymlir.fuzz`: 0 if nothing is wrong, else 1 and the programs."""
    parser = argparse.ArgumentParser(prog="python -m tinymlir.fuzz")
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    args = parser.parse_args(argv)
    os.environ.setdefault("TINYMLIR_CACHE", "off")  # no program comes twice
    total = run_all(args.count, args.seed, args.jobs)
    print(table(total))
    print(dict(total.kinds), dict(total.compared))
    for text, n in total.reasons.most_common():
        print(f"{n:6}  {text}")
    return 1 if total.faults else 0


if __name__ == "__main__":
    from tinymlir import fuzz  # under its own name, which other processes know
    sys.exit(fuzz.main())
