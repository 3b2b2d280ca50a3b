"""Literate programming: notebooks/NN_name.md  ->  src/tinymlir/*.py  (hand-written).

The first cell of a chapter, whoever runs it (Jupyter, nbval, nbclient, Colab), is

    from tinymlir import literate; literate.begin("tinymlir.expr")

From then on a cell whose first line is `#| export` runs *inside* the real module
`tinymlir.expr`, the object in `sys.modules`, and the names it binds are copied to the
notebook.  So there is one `Expr` class, an exported cell cannot lean on a scratch name that
the file would not have, and a traceback points at the file.  `#| export errors` (in full:
`#| export tinymlir.errors`) sends a cell to another module of the same chapter.

On the command line, where a chapter is a number or a file name:

    python -m tinymlir.literate tangle           write src/ from the chapters
    python -m tinymlir.literate run [CHAPTER..]  tangle, execute, store the outputs
    python -m tinymlir.literate check            fail if anything is stale
    python -m tinymlir.literate where FILE:LINE  the line of the chapter behind a line of src/
    python -m tinymlir.literate sync             sources of the .md into the .ipynb
    python -m tinymlir.literate pull             edits made in an .ipynb back into its .md
    python -m tinymlir.literate untangle         edits made in src/ back into the chapters
"""
from __future__ import annotations

import __future__
import argparse
import ast
import hashlib
import importlib.machinery
import importlib.util
import linecache
import os
import sys
from pathlib import Path
from typing import Any

from tinymlir.tangle import MARK, LiterateError, owner, split_blocks

FUTURES = {getattr(__future__, name).compiler_flag for name in __future__.all_feature_names}


# ---------------------------------------------------------------- in the kernel

changed: set[str] = set()  # modules that run a cell which is not in their file


class StaleCell(LiterateError):
    """An exported cell that the tangled file does not hold (only where TINYMLIR_STRICT is set)."""


class Module:
    """A module under construction in this kernel."""

    def __init__(self, name: str) -> None:
        if name in sys.modules:
            raise LiterateError(
                f"{name} was imported before its first cell: restart the kernel; if another "
                f"module of this chapter imports it, name both in literate.begin(...)")
        spec = importlib.util.find_spec(name) or importlib.machinery.ModuleSpec(name, None)
        self.module = importlib.util.module_from_spec(spec)
        self.path, self.flags, self.next = spec.origin, 0, 0
        self.blocks = split_blocks(Path(self.path).read_text()) if self.path else []
        package, _, leaf = name.rpartition(".")
        sys.modules[name] = self.module
        setattr(importlib.import_module(package), leaf, self.module)

    def locate(self, code: str) -> tuple[str, int]:
        """The file and line of a cell: onward from the last one found, then from the top."""
        __tracebackhide__ = True
        for i in [*range(self.next, len(self.blocks)), *range(self.next)]:
            line, _, text = self.blocks[i]
            if text == code:
                self.next = i + 1
                return str(self.path), line
        if strict():
            raise StaleCell(f"a cell is not in {self.module.__name__}: run `literate tangle`")
        changed.add(self.module.__name__)
        name = cell_name(code)
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        return name, 1

    def run(self, code: str) -> dict[str, object]:
        """Execute a cell in the module; the names that it bound."""
        __tracebackhide__ = True
        filename, line = self.locate(code)
        tree = compile(code, filename, "exec", ast.PyCF_ONLY_AST | self.flags, True)
        ast.increment_lineno(tree, line - 1)
        byte = compile(tree, filename, "exec", self.flags, True)
        self.flags |= sum(f for f in FUTURES if byte.co_flags & f)  # holds for the file
        scope = self.module.__dict__
        before = dict(scope)
        exec(byte, scope)
        return {name: value for name, value in scope.items()
                if not name.startswith("__") and (name not in before or before[name] is not value)}


_modules: dict[str, Module] = {}
_cells: dict[str, str] = {}
_main = ""


def begin(*names: str) -> None:
    """Start the chapter that exports the module `names[0]`.  Further names are needed only
    where one module of the chapter imports another before that one's first cell."""
    global _main
    _main = names[0]
    for name in names:
        if name not in _modules:
            _modules[name] = Module(name)
    shell = _shell()
    if shell is None or _transform in shell.input_transformers_post:
        return
    shell.input_transformers_post.append(_transform)
    if strict():  # the usual name holds the number of the process
        shell.compile.get_code_name = lambda raw, code, number: cell_name(raw)


def run_cell(key: str, name: str | None = None) -> None:
    """What an exported cell does in place of its own code, which `_transform` has kept."""
    __tracebackhide__ = True
    module = owner(name, _main)
    if module not in _modules:
        _modules[module] = Module(module)
    bound = _modules[module].run(_cells[key])
    if (shell := _shell()) is not None:
        shell.user_ns.update(bound)


def _transform(lines: list[str]) -> list[str]:
    mark = MARK.match(lines[0].rstrip()) if lines else None
    if mark is None:
        return lines
    code = "".join(lines[1:]).rstrip()
    _cells[key := cell_name(code)] = code
    return [f"__import__('tinymlir.literate').literate.run_cell({key!r}, {mark['module']!r})\n"]


def _shell() -> Any:
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def cell_name(code: str) -> str:
    """A file name for a cell: the same in every process."""
    return f"<cell {hashlib.sha1(code.encode()).hexdigest()[:6]}>"


def strict() -> bool:
    """Are outputs being stored or compared, so that nothing may be stale or depend on chance?"""
    return bool(os.environ.get("TINYMLIR_STRICT"))


# ---------------------------------------------------------------- on the command line

def check(root: Path) -> list[str]:
    """Every reason why the checkout is not what its chapters say; none if all is well."""
    from tinymlir import tangle, weave
    try:
        return [*tangle.stale_files(root), *tangle.long_lines(root), *weave.stale_notebooks(root)]
    except LiterateError as error:
        return [str(error)]


def report(root: Path) -> int:
    problems = check(root)
    print("\n".join(problems) if problems else "all is in sync")
    return 1 if problems else 0


def obey(command: str, names: list[str]) -> int:
    """One command of the module's docstring; its exit status."""
    from tinymlir import tangle, weave
    root = tangle.project_root()
    commands = {
        "tangle": lambda: tangle.tangle(root),
        "run": lambda: weave.run(root, names),
        "check": lambda: report(root),
        "where": lambda: print(tangle.where(root, *names)),
        "sync": lambda: weave.sync(root),
        "pull": lambda: weave.pull(root),
        "untangle": lambda: tangle.untangle(root),
    }
    return commands[command]() or 0


def main(argv: list[str] | None = None) -> int:
    """Read the command line and obey it."""
    parser = argparse.ArgumentParser(prog="python -m tinymlir.literate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ("tangle", "check", "sync", "pull", "untangle"):
        sub.add_parser(name)
    sub.add_parser("run").add_argument("names", nargs="*", metavar="CHAPTER")
    sub.add_parser("where").add_argument("names", nargs=1, metavar="FILE:LINE")
    args = parser.parse_args(argv)
    try:
        return obey(args.command, getattr(args, "names", []))
    except LiterateError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
