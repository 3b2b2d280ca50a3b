"""Where a chapter stands: one small picture of the whole way, with this step marked."""
from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

STEPS = {  # chapter -> what it adds, its column and row; no chapter: where you come from
    "": ("NumPy", 0, 0),
    "01_expr": ("graph", 1, 0),
    "02_builder": ("linalg", 2, 0),
    "03_passes": ("loops", 3, 0),
    "04_jit": ("native code", 4, 0),
    "08_gpu": ("PTX", 3, 1),
    "09_cuda": ("GPU", 4, 1),
    "05_gpt2": ("GPT-2", 0, 2),
    "06_fused": ("one function", 1, 2),
    "07_parity": ("checked", 2, 2),
    "10_cache": ("cache", 3, 2),
    "11_speed": ("speed", 4, 2),
}
STAGES = {
    "01_expr": ["graph"], "02_builder": ["linalg"],
    "03_passes": ["fused", "bufferized", "scheduled", "lowered"], "04_jit": ["llvm", "asm"],
    "08_gpu": ["kernels", "plan", "ptx"],
}
EXAMPLES = {"gelu": "GELU", "softmax": "softmax", "attention": "attention"}
ARROWS = [("", "01_expr"), ("01_expr", "02_builder"), ("02_builder", "03_passes"),
          ("03_passes", "04_jit"), ("02_builder", "08_gpu"), ("08_gpu", "09_cuda"),
          ("05_gpt2", "06_fused"), ("06_fused", "07_parity"), ("07_parity", "10_cache"),
          ("10_cache", "11_speed")]
WIDE, HIGH, ACROSS, DOWN = 66, 24, 81, 38


def number(step: str) -> int:
    return int(step[:2])


def stem_of(docname: str, steps: Any = STEPS) -> str | None:
    """The step of a chapter's page: chapters are told apart by their numbers."""
    name = docname.rpartition("/")[2]
    return next((s for s in steps if s and name[:3] == s[:3]), None)


def picture(here: str | None, pages: dict[str, str]) -> str:
    """The way as SVG. `pages`: the step of each chapter that there is -> its address."""
    there = [step for step in STEPS if not step or step in pages]
    rows = sorted({STEPS[step][2] for step in there})
    corner = {step: (STEPS[step][1] * ACROSS + 1, rows.index(STEPS[step][2]) * DOWN + 1)
              for step in there}
    parts = [arrow(corner[a], corner[b]) for a, b in ARROWS if a in corner and b in corner]
    parts += [box(step, corner[step], step == here, pages.get(step)) for step in there]
    told = f"Chapter {number(here)} adds: {STEPS[here][0]}." if here else ""
    size = 4 * ACROSS + WIDE + 2, (len(rows) - 1) * DOWN + HIGH + 2
    return (f'<svg class="tm-way" viewBox="0 0 {size[0]} {size[1]}" role="img" '
            f'aria-label="The way from NumPy to native code and to GPT-2. {told}">'
            f'{"".join(parts)}</svg>')


STYLE = ("<style>text{font:9.5px sans-serif;fill:#1f2937;text-anchor:middle}.n{font-size:8px;"
         "fill:#64748b}rect{fill:#f1f5f9;stroke:#94a3b8}.end rect{stroke:#b45309;"
         "stroke-dasharray:3 2}path{fill:none;stroke:#64748b}</style>"
         '<rect x="-8" y="-8" width="100%" height="100%" style="fill:#fff;stroke:none"/>')


def standalone(steps: list[str]) -> str:
    """The picture as a file of its own, for README.md: it brings its colours along."""
    svg = picture(None, dict.fromkeys(steps, ""))
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {width + 16} {height + 16}" '
            f'width="{2 * width}" role="img"')
    return re.sub(r'<svg class="tm-way" viewBox="[^"]*" role="img"(.*?)>',
                  lambda m: f"{head}{m[1]}>{STYLE}", svg, count=1) + "\n"


def box(step: str, corner: tuple[int, int], here: bool, page: str | None) -> str:
    (x, y), name = corner, STEPS[step][0]
    kind = "here" if here else "end" if not step else "step"
    text = f'<tspan class="n">{number(step)}</tspan> {name}' if step else name
    drawn = (f'<g class="{kind}"><rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="5"/>'
             f'<text x="{x + WIDE / 2:g}" y="{y + 15.5}">{text}</text></g>')
    return f'<a href="{page}">{drawn}</a>' if page and not here else drawn


def arrow(a: tuple[int, int], b: tuple[int, int]) -> str:
    x, y, end = a[0] + WIDE, a[1] + HIGH // 2, b[1] + HIGH // 2
    if y == end:
        return f'<path d="M{x + 2} {y}H{b[0] - 2}m-4 -3l4 3l-4 3"/>'
    return (f'<path d="M{x - WIDE // 2} {a[1] + HIGH + 2}V{end - 5}q0 5 5 5'
            f'H{b[0] - 2}m-4 -3l4 3l-4 3"/>')


ATTAINED = {  # chapter -> what you have at its end
    "00_mlir": "enough MLIR to read what the others print",
    "01_expr": "NumPy code that records itself as a graph",
    "02_builder": "an MLIR module for any graph",
    "03_passes": "fusion, memory, loops: stages that you can print and compare",
    "04_jit": "`jit(f)(x)`: native code for each shape",
    "05_gpt2": "text from a checkpoint",
    "06_fused": "the whole forward pass as one module",
    "07_parity": "a table: every residual, every step, OK",
    "08_gpu": "PTX for every kernel, readable and checked without a GPU",
    "09_cuda": "the same program on the device",
    "10_cache": "one compiled step for any position",
    "11_speed": "the roofline of your machine, and where this model stands",
    "90_fuzz": "thousands of random programs, all right",
    "91_everyday": "`tinymlir chat` and `tinymlir doctor`",
    "92_pictures": "what the model looks at, and what it would say",
}


class Chapters(SphinxDirective):
    """```{chapters}```: the table of the chapters that there are."""

    def run(self) -> list[nodes.Node]:
        found = sorted((stem_of(page, ATTAINED), page) for page in self.env.found_docs
                       if page.startswith("notebooks/") and stem_of(page, ATTAINED))
        lines = ["| | chapter | at its end you have |", "|---|---|---|", *(
            f"| {str(number(stem)) if number(stem) < 90 else 'A'} | {{doc}}`/{page}` "
            f"| {ATTAINED[stem]} |" for stem, page in found)]
        container = nodes.container()
        self.state.nested_parse(StringList(lines, self.env.docname), 0, container)
        return container.children


class tm_way(nodes.General, nodes.Element):
    """Stands for the picture until all chapters are known."""


class Way(SphinxDirective):
    """```{way}```: the picture, with no step marked."""

    def run(self) -> list[nodes.Node]:
        return [tm_way()]


def open_chapter(app: Any, doctree: nodes.document) -> None:
    """Put the picture under the title of each chapter."""
    if stem_of(app.env.docname, ATTAINED) is None or not app.env.docname.startswith("notebooks/"):
        return
    for section in doctree.findall(nodes.section):
        section.insert(1, tm_way())
        return


def draw(app: Any, doctree: nodes.document, docname: str) -> None:
    found = {stem_of(page): app.builder.get_relative_uri(docname, page)
             for page in sorted(app.env.found_docs) if page.startswith("notebooks/")
             and stem_of(page)}
    here = stem_of(docname)
    viewer = app.builder.get_relative_uri(docname, "book/viewer")
    for node in list(doctree.findall(tm_way)):
        page = f'<div class="tm-way">{picture(here, found)}{examples(here, viewer)}</div>'
        node.replace_self(nodes.raw("", page, format="html"))


def examples(here: str | None, viewer: str) -> str:
    """Links to the running examples in the stages of a chapter."""
    told = "; ".join(f"{title}: " + ", ".join(
        f'<a href="{viewer}#{name}-{stage}">{stage}</a>' for stage in STAGES[here])
        for name, title in EXAMPLES.items()) if here in STAGES else ""
    return f"<p>The running examples after this chapter, line by line. {told}.</p>" if told else ""


def setup(app: Any) -> dict[str, bool]:
    app.add_node(tm_way)
    app.add_directive("way", Way)
    app.add_directive("chapters", Chapters)
    app.connect("doctree-read", open_chapter)
    app.connect("doctree-resolved", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
