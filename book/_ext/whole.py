"""Pages generated from the package: the whole compiler, and every exported name."""
from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from code_names import Cell
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from tinymlir import tangle

COMPILER = range(1, 5)  # the chapters that are the compiler: from NumPy to native code
LABEL = re.compile(r"^# %% (\S+)\.md § (.+) \(\d+\)$", re.M)
HEADER = re.compile(r"^# Tangled from .*\n+", re.M)


def root(env: Any) -> Path:
    return Path(env.srcdir)


def modules(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """Chapter's file name -> (its .md, the modules that it defines), in reading order."""
    found = {}
    for path in tangle.chapters(folder):
        names = dict.fromkeys(block.module for block in tangle.read_blocks(path))
        found[path.stem] = path, list(names)
    return found


def code_of(folder: Path, module: str) -> str:
    """A tangled file without what the tools put into it."""
    text = tangle.module_path(folder, module).read_text()
    return HEADER.sub("", LABEL.sub("", text)).strip("\n")


def whole_cells(folder: Path) -> Iterator[Cell]:
    """The modules of the compiler, whole: what the links of the page are made from."""
    for stem, (_, names) in modules(folder).items():
        if int(stem[:2]) in COMPILER:
            yield from (Cell(name, squeezed(code_of(folder, name))) for name in names)


def squeezed(code: str) -> str:
    """At most one blank line in a row: a page is long enough."""
    return re.sub(r"\n{3,}", "\n\n", code)


class WholeCompiler(SphinxDirective):
    """```{whole-compiler}```: the listing of every module of the compiler."""

    def run(self) -> list[nodes.Node]:
        folder, out = root(self.env), []
        for stem, (_, names) in modules(folder).items():
            if int(stem[:2]) not in COMPILER:
                continue
            for name in names:
                out.append(self.module(stem, name, squeezed(code_of(folder, name))))
        return out

    def module(self, stem: str, name: str, code: str) -> nodes.Node:
        lines = sum(1 for line in code.splitlines() if line.strip())
        short = name.removeprefix("tinymlir.")
        section = nodes.section("", nodes.title("", f"{short}.py"), ids=[f"whole-{short}"])
        self.env.get_domain("std").note_hyperlink_target(  # type: ignore[attr-defined]
            f"whole-{short}", self.env.docname, f"whole-{short}", f"{short}.py")
        line = nodes.paragraph()
        refs, _ = self.state.inline_text(
            f"{lines} lines, explained in {{doc}}`/notebooks/{stem}`.", self.lineno)
        line += refs
        section += line
        block = nodes.literal_block(code, code, language="ipython3")
        section += nodes.container("", block, classes=["tm-cell", "whole"])
        return section


# ---------------------------------------------------------------- names

class Names(SphinxDirective):
    """```{exported-names}```: every public name, where it is made and what it is for."""

    def run(self) -> list[nodes.Node]:
        out: list[nodes.Node] = []
        for _, names in modules(root(self.env)).values():
            for module in names:
                entries = list(public(code_of(root(self.env), module)))
                if entries:
                    out.append(self.table(module, entries))
        return out

    def table(self, module: str, entries: list[tuple[str, str, str]]) -> nodes.Node:
        short = module.removeprefix("tinymlir.")
        section = nodes.section("", nodes.title("", short), ids=[f"names-{short}"])
        items = nodes.definition_list(classes=["tm-names"])
        for kind, name, doc in entries:
            term, line = nodes.term(), nodes.paragraph("", doc or kind)
            refs, _ = self.state.inline_text(
                f"{{py:obj}}`{name} <{module}.{name}>`", self.lineno)
            term += refs
            items += nodes.definition_list_item("", term, nodes.definition("", line))
        section += items
        return section


def public(code: str) -> Iterator[tuple[str, str, str]]:
    """Kind, name and first line of the docstring of a module's own names."""
    seen = set()
    for node in ast.parse(code).body:
        for kind, name, doc in own(node):
            if name not in seen and not name.startswith("_") and not name.endswith("_"):
                seen.add(name)
                yield kind, name, doc


def own(node: ast.stmt) -> Iterator[tuple[str, str, str]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        kind = "a class" if isinstance(node, ast.ClassDef) else "a function"
        yield kind, node.name, (ast.get_docstring(node) or "").partition("\n")[0]
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for part in [p for t in targets for p in getattr(t, "elts", [t])]:
            if isinstance(part, ast.Name) and part.id.isupper():
                yield "a constant", part.id, ""


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("whole-compiler", WholeCompiler)
    app.add_directive("exported-names", Names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
