"""The stages of an example's compilation, each line with the NumPy lines that it came from.

A node of the graph knows the user's line.  Here the builder's rules are run inside MLIR
locations, which the passes carry along, LLVM keeps as debug information, and the assembler
prints as `.loc`.  The located text, without its locations, must be the stage's own text.
"""
from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

from tinymlir import compiler, jit, native, passes
from tinymlir.arrays import MLIR
from tinymlir.graph import Graph, names_of
from tinymlir.jit import TARGETS

MLIR_STAGES = ("linalg", "fused", "bufferized", "scheduled", "lowered")
LANGUAGE = {"numpy": "python", "graph": "mlir", "llvm": "llvm", "asm": "gas", "ptx": "ptx",
            "kernels": "mlir", **dict.fromkeys(MLIR_STAGES, "mlir")}
SCOPES = "ensure-debug-info-scope-on-llvm-func{emission-kind=LineTablesOnly}"
QUOTED = r'"(?:[^"\\]|\\.)*"'
LOC = re.compile(rf' ?loc\(((?:[^()"]|{QUOTED}|\((?:[^()"]|{QUOTED})*\))*)\)')
ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
PLACE = re.compile(rf"({QUOTED}):(\d+):\d+")
SCOPED = re.compile(r",? !dbg !(\d+)")
DILOCATION = re.compile(r"^!(\d+) = !DILocation\(line: (\d+)", re.M)
DOT_LOC = re.compile(r"^\s+\.loc\s+\d+ (\d+)")
ADDED = re.compile(r"^\s*(\.loc|\.file|\.section\s+\.debug|\.Ltmp\d+:|\.Lfunc_(begin|end)\d+:|"
                   r"\.Ldebug|\.Linfo|\.Lline|\.size|\.cfi)")

Line = tuple[str, frozenset[int]]  # text, and the numbers of the lines it came from


@dataclass(frozen=True)
class Stage:
    """One text on the way, line by line."""

    name: str
    lines: tuple[Line, ...]

    @property
    def language(self) -> str:
        return LANGUAGE.get(self.name, "text")

    def changed(self, before: Stage) -> list[bool]:
        """For each line: is it one that the stage before did not have?"""
        new = [True] * len(self.lines)
        old, own = ([text for text, _ in s.lines] for s in (before, self))
        for block in SequenceMatcher(None, old, own, autojunk=False).get_matching_blocks():
            new[block.b:block.b + block.size] = [False] * block.size
        return new


def stages_of(function: Callable, arrays: tuple, static: dict[str, Any]) -> list[Stage]:
    """Every stage that `compile(...).stages` offers, from the user's own lines on."""
    compiled = jit(function).compile(*arrays, **static)
    graph, texts = compiled.graph, dict(compiled.stages)
    file = inspect.getsourcefile(function) or ""
    located = located_texts(graph, file)
    found = [Stage("numpy", tuple(numpy_lines(graph, function, file)))]
    for name, text in {**texts, **gpu_texts(graph, texts)}.items():
        text = text.strip("\n")
        lines = graph_lines(graph, text, file) if name == "graph" \
            else match(text, located.get(name, []))
        found.append(Stage(name, tuple(lines)))
    return found


def gpu_texts(graph: Graph, known: dict[str, str]) -> dict[str, str]:
    """What the GPU's way has more, once there is one."""
    if "gpu" not in TARGETS:
        return {}
    texts = import_module(TARGETS["gpu"]).texts(graph)
    return {name: text for name, text in texts.items() if name not in known}


# ---------------------------------------------------------------- NumPy and the graph

def numpy_lines(graph: Graph, function: Callable, file: str) -> Iterator[Line]:
    """The functions of the file that had a part in the graph, with real line numbers."""
    with open(file, encoding="utf-8") as source:
        text = source.read()
    used = {n.source.line for n in graph.nodes if n.source.file == file}
    used.add(inspect.unwrap(function).__code__.co_firstlineno)
    rows, first = text.splitlines(), True
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef) or not used & {*range(
                node.lineno, node.end_lineno + 1)}:
            continue
        if not first:
            yield "", frozenset()
        first = False
        for number in range(node.lineno, node.end_lineno + 1):
            yield rows[number - 1], frozenset({number})


def graph_lines(graph: Graph, text: str, file: str) -> Iterator[Line]:
    """Each line of the printed graph names its node."""
    names = names_of(graph)
    where = {names[id(n)]: n.source for n in graph.nodes}
    for line in text.splitlines():
        source = where.get(line.strip().partition(" = ")[0])
        yield line, frozenset({source.line} if source and source.file == file else ())


# ---------------------------------------------------------------- MLIR, LLVM, assembly

@contextmanager
def rules_with_locations() -> Iterator[None]:
    """What a rule of the builder makes stands at its node's line."""
    from mlir import ir
    plain = dict(MLIR)

    def located(rule: Callable) -> Callable:
        def at_line(builder: Any, node: Any) -> Any:
            with ir.Location.file(node.source.file, node.source.line, 0):
                return rule(builder, node)
        return at_line

    MLIR.update({op: located(rule) for op, rule in plain.items()})
    unknown = ir.Location.unknown
    ir.Location.unknown = staticmethod(partial(where_we_are, unknown))
    try:
        yield
    finally:
        ir.Location.unknown = unknown
        MLIR.update(plain)


def where_we_are(unknown: Callable, context: Any = None) -> Any:
    """A step that does not care where it is takes the place of the operation it is at."""
    from mlir import ir
    try:
        point = ir.InsertionPoint.current
        return (point.ref_operation or point.block.owner).location
    except Exception:  # outside of any block
        return unknown(context)


def located_texts(graph: Graph, file: str) -> dict[str, list[Line]]:
    """Stage -> its lines: the compiler's own way, watched while rules have locations."""
    found: dict[str, list[Line]] = {}
    run, translate = passes.run_stages, passes.to_llvm

    def watched(work: Any, stages: Any, keep: bool = False) -> Any:
        for stage in stages:
            run(work, (stage,))
            asm = work.module.operation.get_asm(enable_debug_info=True)
            found[stage.name] = mlir_lines(asm, file)
        return work

    def translated(module: Any) -> str:
        passes.run_pipeline(module, SCOPES)
        return translate(module)

    with rules_with_locations(), mock.patch.object(passes, "run_stages", watched), \
            mock.patch.object(passes, "to_llvm", translated), compiler.mlir_lock:
        low, _ = compiler.lower(graph)
    found["llvm"] = llvm_lines(low)
    found["asm"] = asm_lines(native.generate(low, native.ASSEMBLY).decode())
    return found


def mlir_lines(text: str, file: str) -> list[Line]:
    aliases = {m[1]: m[2] for m in map(ALIAS.match, text.splitlines()) if m}

    def numbers(location: str, depth: int = 0) -> Iterator[int]:
        yield from (int(n) for name, n in PLACE.findall(location) if name.strip('"') == file)
        for alias in re.findall(r"#loc\d*", location):
            if depth < 9:
                yield from numbers(aliases.get(alias, ""), depth + 1)

    return openers([
        (LOC.sub("", line), frozenset(n for loc in LOC.findall(line) for n in numbers(loc)))
        for line in text.strip("\n").splitlines() if not ALIAS.match(line)])


def openers(lines: list[Line]) -> list[Line]:
    """An operation with a region has its location after the region: give it to its head too."""
    done, open_ = list(lines), []
    for i, (text, numbers) in enumerate(lines):
        if text.lstrip().startswith("}") and open_:
            head = open_.pop()
            done[head] = (done[head][0], done[head][1] or numbers)
        if text.endswith("{"):
            open_.append(i)
    return done


def llvm_lines(text: str) -> list[Line]:
    line_of = {key: int(line) for key, line in DILOCATION.findall(text)}
    return [(SCOPED.sub("", line), frozenset(
        line_of[key] for key in SCOPED.findall(line) if line_of.get(key)))
        for line in text.splitlines() if not line.startswith("!")]


def asm_lines(text: str) -> list[Line]:
    lines: list[Line] = []
    at: frozenset[int] = frozenset()
    for line in text.splitlines():
        if found := DOT_LOC.match(line):
            at = frozenset({int(found[1])} - {0, 1})
        instruction = line.startswith("\t") and not line.startswith("\t.")
        if not ADDED.match(line):
            lines.append((line, at if instruction else frozenset()))
    return lines


def match(text: str, located: list[Line]) -> list[Line]:
    """The lines of a stage with the numbers of the equal lines of its located twin."""
    lines = text.splitlines()
    ours, theirs = [s.strip() for s in lines], [s.strip() for s, _ in located]
    numbers: list[frozenset[int]] = [frozenset()] * len(lines)
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks() \
        if ours != theirs else [(0, 0, len(ours))]
    for a, b, size in blocks:
        numbers[a:a + size] = [n for _, n in located[b:b + size]]
    return list(zip(lines, numbers))
