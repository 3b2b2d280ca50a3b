# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § The report (1)
"""What a compiled function is, in words and numbers (chapter 4)."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinymlir.expr import ELEMENTWISE, REDUCTIONS, Expr, Op
from tinymlir.graph import Graph
from tinymlir.jit import Compiled, Jitted
from tinymlir.pytree import LEAF, Structure

FLOPS: dict[Op, Callable[[Expr], int]] = {
    **dict.fromkeys(ELEMENTWISE, lambda x: x.size),
    **dict.fromkeys(REDUCTIONS, lambda x: x.operands[0].size),
    Op.MATMUL: lambda x: 2 * x.size * x.operands[0].shape[-1],
    Op.CALL: lambda x: flops(x.attrs["body"])}


def flops(graph: Graph) -> int:
    """Operations of a graph: two for each product of a matmul, else one."""
    return sum(FLOPS[x.op](x) for x in graph.nodes if x.op in FLOPS)


def shown(frozen: tuple) -> str:
    """A frozen static value in words."""
    kind, *rest = frozen
    name = getattr(kind, "__name__", str(kind))
    plain = len(rest) == 1 and not isinstance(rest[0], tuple)
    return f"{name} {rest[0]}" if plain else f"{name} of {len(rest)}"


def around(structure: Structure) -> str:
    """The structure around arrays in words."""
    if structure is LEAF:
        return "an array"
    if structure.parts is None:
        return shown(structure.frozen)
    return f"{structure.kind.__name__}({', '.join(map(around, structure.parts))})"


def key_of(compiled: Compiled) -> dict[str, str]:
    """The parts of the key by name: structures, types of arrays, statics."""
    graph, static = compiled.graph, compiled.static[1:]
    parts = {name: around(structure)
             for name, structure in zip(compiled.names, compiled.inputs)
             if structure is not LEAF}
    parts |= {name: str(x.type) for name, x in zip(graph.names, graph.inputs)}
    return parts | {f"static {key[1]}": shown(value) for key, value in static}


# %% 04_jit.md § The report (2)
def differences(new: Mapping[str, str], old: Mapping[str, str]) -> list[str]:
    """What tells two keys apart, in words."""
    names = [*new, *(name for name in old if name not in new)]
    return [f"{name}: {new.get(name, 'nothing')} instead of "
            f"{old.get(name, 'nothing')}"
            for name in names if new.get(name) != old.get(name)]


def reason(compiled: Compiled, known: Sequence[Compiled]) -> str:
    """Why it was compiled: how it differs from the nearest that was there."""
    if not known:
        return "no, nothing was"
    if any(other is compiled for other in known):
        return "yes"
    new = key_of(compiled)
    found = [differences(new, key_of(other)) for other in reversed(known)]
    return "no; " + "; ".join(min(found, key=len) or ["a static value differs"])


def head(jitted: Jitted, compiled: Compiled, known: Sequence[Compiled]) -> str:
    """Which specialisation it is, and why it was compiled."""
    lines = [f"{name}: {text}" for name, text in key_of(compiled).items()]
    return "\n".join([
        f"{compiled.graph.name} for {jitted.target}", *(f"  {x}" for x in lines),
        f"compiled already: {reason(compiled, known)}",
        f"specialisations: {len(jitted.cache)} of at most {jitted.limit}"])


# %% 04_jit.md § The report (3)
NEAR, LINES, FIRST = 1, 30, 6  # shown: around a change, of a stage, of a new one
NUMBERED = re.compile(r"[%#^!]\w+")


def changed(text: str, before: str) -> tuple[list[bool], int]:
    """For each line: is it new? And how many lines of the stage before are gone."""
    def like(line: str) -> str:
        return NUMBERED.sub("%", line.strip())

    left = Counter(map(like, before.splitlines()))
    marks = []
    for line in map(like, text.splitlines()):
        marks.append(left[line] == 0)
        left[line] -= not marks[-1]
    return marks, left.total()


def chosen(marks: Sequence[bool]) -> list[int]:
    """The lines to show: a short text whole, else what is near a new line."""
    if len(marks) <= LINES:
        return [*range(len(marks))]
    most = LINES if sum(marks) < 0.9 * len(marks) else FIRST
    return [i for i in range(len(marks))
            if any(marks[max(i - NEAR, 0):i + NEAR + 1])][:most]


def marked(name: str, text: str, before: str) -> str:
    """A stage with its new lines marked, shortened."""
    lines = text.strip("\n").splitlines()
    marks, gone = changed("\n".join(lines), before)
    told, last = [f"{name}: {len(lines)} lines, {sum(marks)} new, {gone} gone"], -1
    for i in chosen(marks):
        told += ["  ..."] * (i > last + 1)
        told.append(f"{'+' if marks[i] else ' '} {lines[i]}".rstrip())
        last = i
    return "\n".join(told + ["  ..."] * (last < len(lines) - 1))


def stages(compiled: Compiled) -> str:
    """Every stage, marked against the one before it."""
    texts = list(compiled.stages.items())
    before = ["", *(text for _, text in texts)]
    return "\n\n".join(marked(name, text, old)
                       for (name, text), old in zip(texts, before))


# %% 04_jit.md § The report (4)
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
HEAD = ("kernel", "shape", "type", "read", "written", "flops", "a byte", "limit")
WIDTHS = "{:27} {:13} {:3}{:>7}{:>8}{:>7}{:>7} {}"


def short(x: float) -> str:
    """A number in five letters."""
    if x != x:
        return "?"
    unit, letter = next(((u, s) for u, s in UNITS if x >= u), (1, ""))
    return f"{x:.0f}" if unit == 1 else f"{x / unit:.3g}{letter}"


def kernels(compiled: Compiled) -> str:
    """A line for each kernel: what it costs, and what it waits for."""
    from tinymlir.costs import costs
    from tinymlir.roof import roof
    top, found = roof(), costs(compiled.graph)
    lines = [WIDTHS.format(*HEAD)]
    for x in found:
        shape = "x".join(f"{n:.0f}" if n == n else "?" for n in x.shape)
        name = x.name if x.times == 1 else f"{x.times} * {x.name}"
        each = "?" if x.intensity != x.intensity else f"{x.intensity:.2f}"
        row = (name, shape, "".join(x.types[-1:]), short(x.read), short(x.written),
               short(x.flops), each, top.limit(x))
        lines.append(WIDTHS.format(*row))
    sure = [x for x in found if top.limit(x) != "?"]
    total = sum(top.seconds(x) * x.times for x in sure)
    sums = (sum(getattr(x, what) * x.times for x in sure)
            for what in ("read", "written", "flops"))
    every = "all" if sure == found else "all but those with ?"
    lines.append(WIDTHS.format(every, "", "", *map(short, sums), "", ""))
    edges = [rate / top.read for rate in (top.double, top.single)]
    return "\n".join([
        *map(str.rstrip, lines),
        f"roof: {top.read:.3g} GB/s; {top.double:.3g} GFLOP/s in float64, "
        f"{top.single:.3g} in float32 ({top.source})",
        f"memory is the limit below {edges[0]:.1f} flops a byte ({edges[1]:.1f} in "
        f"float32); at least {total * 1e6:.3g} microseconds"])


# %% 04_jit.md § The report (5)
KERNELS: dict[str, Callable[[Compiled], str]] = {"cpu": kernels}  # by target


class Report(str):
    """Text that an interactive Python shows as it is, line by line."""

    def __repr__(self) -> str:
        return str(self)


def explain(jitted: Jitted, args: tuple, static: dict[str, Any]) -> Report:
    """The report of Jitted.explain."""
    known = list(jitted.cache.values())
    compiled = jitted.compile(*args, **static)
    count = KERNELS.get(jitted.target)
    return Report("\n\n".join([
        head(jitted, compiled, known), stages(compiled),
        count(compiled) if count else f"kernels for {jitted.target}: not counted"]))
