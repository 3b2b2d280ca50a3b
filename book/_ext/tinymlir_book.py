"""The book's side of literate programming, for Sphinx.

An exported cell carries the name of the file that it is tangled into; what it defines
becomes a target ({py:class}`tinymlir.expr.Expr`) and an index entry; and in every cell a
name that stands for such a definition leads to it.  Cells tagged `solution` are folded.
"""
from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from code_names import Cell, Link, links, read_cells
from docutils import nodes
from mlir_lexer import MLIRLexer
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from whole import whole_cells

from tinymlir.tangle import MARK

BLOCK = re.compile(r'(<div class="highlight-ipython3[^>]*>.*?<pre>)(.*?)(</pre>)', re.S)
TOKEN = re.compile(r'(?P<span><span class="[^"]*">(?P<name>[^<]*)</span>)|(?P<tag><[^>]*>)'
                   r"|(?P<text>[^<]+)", re.S)


def notebook_cells(path: str) -> list[Cell]:
    """All code cells of a page, also those that the book hides; none if it is no notebook."""
    if not path.endswith(".ipynb"):
        return []
    notebook = nbformat.read(path, 4)
    return read_cells(cell.source for cell in notebook.cells if cell.cell_type == "code")


# ---------------------------------------------------------------- definitions

def definitions(code: str) -> Iterator[tuple[str, str, str]]:
    """What a cell defines: kind, name, and the name of the definition around it ("")."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef) and node.name != "_":
            yield "function", node.name, ""
        elif isinstance(node, ast.ClassDef):
            yield "class", node.name, ""
            yield from members(node)
        else:
            yield from (("data", name, "") for name in assigned(node))


def members(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef):
            yield "method", inner.name, node.name
        yield from (("attribute", name, node.name) for name in assigned(inner))


def assigned(node: ast.stmt) -> list[str]:
    """The plain names that an assignment binds, `A, B = 1, 2` included."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    return [part.id for part in parts if isinstance(part, ast.Name)]


class ExportedCells(SphinxTransform):
    """Captions, targets and index entries for the exported cells of a page."""

    default_priority = 600  # after MyST-NB has made the cells, before references are resolved

    def apply(self, **kwargs: Any) -> None:
        owners = {cell.code.strip(): cell.module
                  for cell in notebook_cells(self.env.doc2path(self.env.docname)) if cell.module}
        for cell in list(self.document.findall(is_cell)):
            for block in list(cell.findall(nodes.literal_block)):
                source = block.rawsource or block.astext()
                mark = MARK.match(source.partition("\n")[0])
                code = source.partition("\n")[2]
                if mark and code.strip() in owners:
                    self.show(cell, block, owners[code.strip()] or "", code)

    def show(self, cell: nodes.Element, block: nodes.literal_block, module: str,
             code: str) -> None:
        block.children, block.rawsource = [nodes.Text(code)], code
        path = f"src/{module.replace('.', '/')}.py"
        caption = nodes.paragraph("", path, classes=["tangled-path"])
        block.parent.insert(block.parent.index(block), caption)
        cell["classes"].append("tangled")
        entries = list(self.define(cell, block, module, code))
        cell.parent.insert(cell.parent.index(cell), addnodes.index(entries=entries))

    def define(self, cell: nodes.Element, block: nodes.literal_block, module: str,
               code: str) -> Iterator[tuple[str, str, str, str, None]]:
        """Register the definitions of a cell; their index entries."""
        python: Any = self.env.get_domain("py")
        if module not in python.modules:
            cell["ids"].append(f"module-{module}")
            python.note_module(module, f"module-{module}", "", "", False)
        for kind, name, outer in definitions(code):
            target = f"{module}.{outer or name}"
            full = f"{target}.{name}" if outer else target
            if full in python.objects and python.objects[full].docname == self.env.docname:
                continue  # defined before, in an earlier cell of this page
            python.note_object(full, kind, target, location=block)
            if not outer:
                cell["ids"].append(target)
                yield "single", f"{name} ({module})", target, "", None


def is_cell(node: nodes.Node) -> bool:
    return isinstance(node, nodes.container) and "cell" in node["classes"]


class Solutions(SphinxTransform):
    """Fold each run of cells tagged `solution` into one box that opens on a click."""

    default_priority = 610

    def apply(self, **kwargs: Any) -> None:
        opening = '<details class="solution"><summary>Solution</summary>'
        for cell in list(self.document.findall(is_solution)):
            siblings, at = cell.parent, cell.parent.index(cell)
            follows = at > 0 and isinstance(siblings[at - 1], nodes.raw) \
                and siblings[at - 1].astext() == "</details>"
            if follows:  # the box before goes on
                del siblings[at - 1]
                at -= 1
            else:
                siblings.insert(at, nodes.raw("", opening, format="html"))
                at += 1
            siblings.insert(at + 1, nodes.raw("", "</details>", format="html"))


def is_solution(node: nodes.Node) -> bool:
    return is_cell(node) and "tag_solution" in node["classes"]  # type: ignore[index]


# ---------------------------------------------------------------- links

def link_names(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """In every code cell of a page, make the names of exported definitions links to them."""
    if doctree is None or not context.get("body"):
        return
    objects = app.env.get_domain("py").objects
    cells = list(whole_cells(Path(app.env.srcdir))) if page == "book/whole" \
        else notebook_cells(app.env.doc2path(page))
    found = links(cells, objects.__contains__)

    def href(target: str) -> str:
        where = objects[target]
        return f"{app.builder.get_relative_uri(page, where.docname)}#{where.node_id}"

    def block(match: re.Match[str]) -> str:
        code = html.unescape(re.sub(r"<[^>]*>", "", match[2]))
        wanted = {link.offset: link for link in found.get(code.strip(), [])}
        return match[1] + linked(match[2], wanted, href) + match[3]

    context["body"] = BLOCK.sub(block, context["body"])


def linked(text: str, wanted: dict[int, Link], href: Any) -> str:
    """Highlighted code with an anchor around each token that starts where a link does."""
    out, offset = [], 0
    for token in TOKEN.finditer(text):
        shown = html.unescape(token["name"] or token["text"] or "")
        link = wanted.get(offset)
        offset += len(shown)
        if link is None or not token["name"] or shown != link.name:
            out.append(token[0])
            continue
        url, title = html.escape(href(link.target)), html.escape(link.target)
        out.append(f'<a class="code-ref" href="{url}" title="{title}">{token[0]}</a>')
    return "".join(out)


# ---------------------------------------------------------------- all of it

PARTS = ("offline", "lines", "pipeline", "failing", "whole", "viewer", "launch")


def setup(app: Any) -> dict[str, bool]:
    app.add_lexer("mlir", MLIRLexer)
    app.add_transform(ExportedCells)
    app.add_transform(Solutions)
    app.connect("html-page-context", link_names)
    for part in PARTS:
        app.setup_extension(part)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
