"""Error pages: code that is run when the book is built, and has to fail as the page says."""
from __future__ import annotations

import ast
import contextlib
import io
import linecache
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from tinymlir.tangle import chapters, read_blocks

PAGE = "book/errors/"


def run(code: str, name: str) -> tuple[str, Exception | None]:
    """What a cell prints, and the error that it ends with."""
    file = f"<cell {name} {abs(hash(code))}>"
    lines = [line + "\n" for line in code.splitlines()]
    linecache.cache[file] = len(code), None, lines, file  # so that messages quote it
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, file, "exec"), {"__name__": "__main__"})
        except Exception as raised:
            error = raised
    return printed.getvalue(), error


def message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Fails(SphinxDirective):
    """```{fails} ShapeError```: a cell that must raise that error of tinymlir.errors."""

    has_content, required_arguments = True, 1
    option_spec = {"keep": directives.flag}

    def run(self) -> list[nodes.Node]:
        code, wanted = "\n".join(self.content), self.arguments[0]
        _, error = run(code, wanted)
        if type(error).__name__ != wanted:
            raise ExtensionError(f"{self.env.docname}: expected {wanted}, got {error!r}")
        assert error is not None
        return [cell(code, "fails"), printed(message(error))]


class Works(SphinxDirective):
    """```{works}```: a cell that must not fail; what it prints is shown."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        code = "\n".join(self.content)
        text, error = run(code, "works")
        if error is not None:
            raise ExtensionError(f"{self.env.docname}: {message(error)}")
        return [cell(code, "works"), *([printed(text.rstrip())] if text else [])]


def cell(code: str, kind: str) -> nodes.Node:
    block = nodes.literal_block(code, code, language="ipython3")
    return nodes.container("", block, classes=["tm-cell", kind])


def printed(text: str) -> nodes.Node:
    block = nodes.literal_block(text, text, language="text")
    return nodes.container("", block, classes=["tm-cell", "printed"])


class ErrorTable(SphinxDirective):
    """```{error-table}```: every class of tinymlir.errors, what it means, and its page."""

    def run(self) -> list[nodes.Node]:
        items = []
        for kind in error_classes():
            name, other = kind.__name__, kind.__bases__[-1].__name__
            article = "an" if other[0] in "AEIO" else "a"
            item = nodes.list_item()
            line = nodes.paragraph()
            refs, _ = self.state.inline_text(f"{{doc}}`{name} </{PAGE}{name}>`", self.lineno)
            line += refs
            line += nodes.Text(f" (also {article} {other}): {(kind.__doc__ or '').strip()}")
            item += line
            items.append(item)
        return [nodes.bullet_list("", *items)]


def error_classes() -> list[type]:
    """The classes that are raised, in the order of the chapters that define them."""
    from tinymlir import errors
    known, found = {"TinymlirError"}, []
    for module, name, bases in defined():
        if known & bases:
            known.add(name)
            found.append(getattr(import_module(module), name))
    assert all(issubclass(kind, errors.TinymlirError) for kind in found)
    return found


def defined() -> Iterator[tuple[str, str, set[str]]]:
    """Module, name and names of the bases of each exported class, in reading order."""
    for path in chapters(Path(__file__).parents[2]):
        for block in read_blocks(path):
            for node in ast.parse(block.code).body:
                if isinstance(node, ast.ClassDef):
                    yield block.module, node.name, {
                        base.id for base in node.bases if isinstance(base, ast.Name)}


def blocks(text: str) -> list[tuple[str, str, str]]:
    """(directive, argument, code) of the cells of a page's source."""
    return re.findall(r"^```\{(fails|works)\}[ ]*(\w*)\n(.*?)^```", text, re.M | re.S)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("fails", Fails)
    app.add_directive("works", Works)
    app.add_directive("error-table", ErrorTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
