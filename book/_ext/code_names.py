"""What the names in a chapter's cells mean, as far as Python's scopes tell.

A name is worth a link where it stands for something that a chapter exports: not where it
is a parameter, a local, a keyword or an attribute that happens to be spelt the same.
"""
from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tinymlir import HOMES
from tinymlir.tangle import BEGIN, MARK, owner

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
INNER = (*FUNCTIONS, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
         ast.GeneratorExp)
MAGIC = re.compile(r"^[%!].*", re.M)


@dataclass(frozen=True)
class Cell:
    """A code cell as the book shows it: the module it belongs to, if any, and its text."""

    module: str | None
    code: str


@dataclass(frozen=True)
class Link:
    """`name`, at this offset of the cell's text, is the exported `target`."""

    offset: int
    name: str
    target: str


def read_cells(sources: Iterable[str]) -> list[Cell]:
    """The code cells of a notebook, with the export marks taken for what they say."""
    cells, main = [], ""
    for source in sources:
        if begun := BEGIN.search(source):
            main = begun[1]
        first, _, rest = source.partition("\n")
        mark = MARK.match(first) if main else None
        cells.append(Cell(owner(mark["module"], main), rest) if mark else Cell(None, source))
    return cells


def links(cells: list[Cell], known: Callable[[str], bool]) -> dict[str, list[Link]]:
    """For the text of each cell, its links.  A module's functions see all of the module;
    the notebook's own cells see what has been bound so far."""
    trees = [(cell, tree) for cell in cells if (tree := parse(cell.code)) is not None]
    modules: dict[str, dict[str, str]] = {}
    for cell, tree in trees:
        if cell.module:
            modules.setdefault(cell.module, {}).update(bindings(tree, cell.module))
    notebook: dict[str, str] = {}
    found: dict[str, list[Link]] = {}
    for cell, tree in trees:
        notebook.update(bindings(tree, cell.module))
        names = Names(cell.code, modules[cell.module] if cell.module else notebook, known)
        names.visit(tree)
        found[cell.code.strip()] = names.links
    return found


def parse(code: str) -> ast.Module | None:
    try:
        return ast.parse(MAGIC.sub(lambda line: "#" * len(line[0]), code))
    except SyntaxError:
        return None


def bindings(tree: ast.Module, module: str | None) -> dict[str, str]:
    """The names that a cell binds, each with the full name of its meaning ("" is unknown)."""
    own = f"{module}." if module else ""
    return {name: target or (own and own + name) for name, target in bound(tree.body)}


def bound(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """The names bound in this scope itself, each with what it was imported as."""
    for node in same_scope(body):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                yield name, ""
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, ""
            case ast.ClassDef(name=name):
                yield name, ""
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, ""
            case ast.ExceptHandler(name=str(name)):
                yield name, ""
            case ast.Import(names=aliases):
                yield from ((a.asname or a.name.partition(".")[0],
                             a.name if a.asname else a.name.partition(".")[0]) for a in aliases)
            case ast.ImportFrom(module=str(source), names=aliases, level=0):
                yield from ((a.asname or a.name, meaning(source, a.name)) for a in aliases)


def meaning(source: str, name: str) -> str:
    """What `from source import name` gives; the package's own names have a home."""
    if source == "tinymlir" and name in HOMES:
        return f"tinymlir.{HOMES[name]}.{name}"
    return f"{source}.{name}"


def same_scope(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes but those inside functions, classes and comprehensions."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop(0)
        yield node
        if not isinstance(node, INNER):
            todo = [*ast.iter_child_nodes(node), *todo]


class Names(ast.NodeVisitor):
    """Collects the links of one cell."""

    def __init__(self, code: str, scope: dict[str, str], known: Callable[[str], bool]) -> None:
        self.lines = code.splitlines(keepends=True)
        self.scope, self.known = scope, known
        self.inner: list[tuple[bool, set[str]]] = []  # (is it a class, its names), outermost first
        self.links: list[Link] = []

    def resolve(self, node: ast.AST) -> str:
        """The full name that an expression stands for, if it is a plain path."""
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value)
            return base and f"{base}.{node.attr}"
        if not isinstance(node, ast.Name):
            return ""
        for depth, (is_class, names) in enumerate(reversed(self.inner)):
            if node.id in names and (depth == 0 or not is_class):
                return ""
        return self.scope.get(node.id, "")

    def add(self, name: str, line: int, column: int, target: str) -> None:
        if not target or not self.known(target):
            return
        before = self.lines[line - 1].encode()[:column].decode()  # ast counts bytes
        offset = sum(map(len, self.lines[:line - 1])) + len(before)
        self.links.append(Link(offset, name, target))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.add(node.id, node.lineno, node.col_offset, self.resolve(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        column = (node.end_col_offset or 0) - len(node.attr.encode())
        self.add(node.attr, node.end_lineno or 0, column, self.resolve(node))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        if sys.version_info >= (3, 12):  # before, its parts have no true positions
            self.generic_visit(node)

    def enter(self, is_class: bool, names: set[str], nodes: Iterable[ast.AST]) -> None:
        self.inner.append((is_class, names))
        for node in nodes:
            self.visit(node)
        self.inner.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = [*node.decorator_list, node.args, *filter(None, [node.returns])]
        for part in outside:
            self.visit(part)
        self.enter(False, parameters(node.args) | locals_of(node.body), node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self.enter(False, parameters(node.args), [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        self.enter(True, {name for name, _ in bound(node.body)}, node.body)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        targets = {n.id for g in node.generators for n in ast.walk(g.target)
                   if isinstance(n, ast.Name)}
        self.enter(False, targets, ast.iter_child_nodes(node))

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # type: ignore[assignment]


def parameters(args: ast.arguments) -> set[str]:
    listed = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return {arg.arg for arg in [*listed, *filter(None, [args.vararg, args.kwarg])]}


def locals_of(body: list[ast.stmt]) -> set[str]:
    """What a function's body binds, but for the names that it takes from outside."""
    outer = {name for node in same_scope(body) if isinstance(node, ast.Global | ast.Nonlocal)
             for name in node.names}
    return {name for name, _ in bound(body)} - outer
