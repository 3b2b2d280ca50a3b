"""The stage viewer: what `stages.py` finds, as a page that needs no server."""
from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from mlir_lexer import MLIRLexer
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from sphinx.util.docutils import SphinxDirective
from stages import MLIR_STAGES, Stage, stages_of

SPACE = re.compile(r'<span class="w">(\s*)</span>')
ROWS = 1600  # of one stage: a page is read by a person
MEANING = {
    "numpy": "What you write. A line that you point at lights up what was made of it.",
    "graph": "NumPy's operations, one node each, with every shape and dtype (chapter 1).",
    "linalg": "The same as index spaces over tensors, in MLIR (chapter 2).",
    "fused": "Neighbours merged: values between them stay in registers (chapter 3).",
    "bufferized": "Tensors have become memory; the result is an argument (chapter 3).",
    "scheduled": "Loops, calls of matrix products, and polynomials (chapter 3).",
    "lowered": "Jumps, addresses and numbers: the llvm dialect (chapter 3).",
    "llvm": "LLVM's own text (chapter 3).",
    "asm": "The instructions for the processor that built this page (chapter 4).",
    "kernels": "What the device runs: blocks, threads, shared memory (chapter 8).",
    "plan": "The buffers, and which kernel runs in how many blocks and threads (chapter 8).",
    "ptx": "The virtual assembly language of NVIDIA's devices (chapter 8).",
}
SPELLED = {"numpy": "NumPy", "llvm": "LLVM", "asm": "assembly", "ptx": "PTX"}


@cache
def examples() -> dict[str, Any]:
    from tinymlir.ops import EXAMPLES
    first = [name for name in ("gelu", "softmax", "layer_norm", "attention") if name in EXAMPLES]
    return {name: EXAMPLES[name] for name in dict.fromkeys([*first, *EXAMPLES])}


def coloured(stage: Stage) -> list[str]:
    """Each line as HTML."""
    lexer = MLIRLexer if stage.language == "mlir" else get_lexer_by_name(stage.language).__class__
    text = "\n".join(line for line, _ in stage.lines)
    page = highlight(text, lexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True))
    return SPACE.sub(r"\1", page).removesuffix("\n").split("\n")


def data(name: str) -> dict[str, Any]:
    """One example, ready for the page: stages of lines [html, line numbers, changed]."""
    example = examples()[name]
    stages = texts(name)
    return {"about": example.function.__doc__ or "",
            "stages": [packed(stage, before) for before, stage in zip([None, *stages], stages)]}


def packed(stage: Stage, before: Stage | None) -> dict[str, Any]:
    compare = before and stage.name in MLIR_STAGES and before.name in MLIR_STAGES
    changed = stage.changed(before) if compare and before else [False] * len(stage.lines)
    rows = [[html, sorted(numbers), int(new)] for html, (_, numbers), new
            in zip(coloured(stage), stage.lines, changed)]
    return {"name": stage.name, "title": SPELLED.get(stage.name, stage.name),
            "meaning": MEANING.get(stage.name, ""), "compared": bool(compare),
            "rows": rows[:ROWS], "left": max(0, len(rows) - ROWS)}


def write(app: Any, env: Any) -> None:
    """_static/stages/NAME.js for each example, if there is a page that shows them."""
    if app.builder.format != "html" or not getattr(env, "tm_viewers", None):
        return
    folder = Path(app.outdir) / "_static/stages"
    folder.mkdir(parents=True, exist_ok=True)
    for name in examples():
        told = json.dumps(data(name), separators=(",", ":"), ensure_ascii=False)
        (folder / f"{name}.js").write_text(f'tinymlirStages("{name}",{told})\n')


class Viewer(SphinxDirective):
    """```{stage-viewer}```"""

    def run(self) -> list[nodes.Node]:
        shown = getattr(self.env, "tm_viewers", None) or set()
        self.env.tm_viewers = shown | {self.env.docname}  # type: ignore[attr-defined]
        up = "../" * self.env.docname.count("/")
        options = "".join(f'<option value="{escape(n)}">{escape(n.replace("_", " "))}</option>'
                          for n in examples())
        page = Path(__file__).with_suffix(".html").read_text()
        page = re.sub(r"\{(\w+)\}", lambda m: {"options": options, "up": up}[m[1]], page)
        return [nodes.raw("", page, format="html")]


class StageListing(SphinxDirective):
    """```{stage} gelu fused```: one stage of an example, as text of the page."""

    required_arguments = 2
    option_spec = {"lines": directives.nonnegative_int}

    def run(self) -> list[nodes.Node]:
        name, wanted = self.arguments
        stage = next(s for s in texts(name) if s.name == wanted)
        lines = [line for line, _ in stage.lines]
        shown = "\n".join(lines[:self.options.get("lines")])
        if left := len(lines) - len(shown.split("\n")):
            shown += f"\n... and {left} more lines"
        return [nodes.literal_block(shown, shown, language=stage.language)]


@cache
def texts(name: str) -> list[Stage]:
    example = examples()[name]
    return stages_of(example.function, example.arrays, example.static)


class Measured(SphinxDirective):
    """```{measured}```: the tables under "Results" of benchmarks/README.md, or where to look."""

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir) / "benchmarks/README.md"
        self.env.note_dependency(str(path))
        _, found, rest = path.read_text().partition("\n## Results\n")
        text = re.split(r"\n## ", rest)[0].strip() if found else (
            "Times say something about a machine on a day, so they are measured where you are: "
            "the scripts in `benchmarks/` compare results first and times second, against NumPy "
            "and PyTorch in the same run.")
        container = nodes.container(classes=["tm-measured"])
        self.state.nested_parse(StringList(text.splitlines(), str(path)), 0, container)
        return [container]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("stage-viewer", Viewer)
    app.add_directive("stage", StageListing)
    app.add_directive("measured", Measured)
    app.connect("env-updated", lambda app, env: write(app, env))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
