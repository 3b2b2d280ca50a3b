"""Tangling: the exported cells of notebooks/NN_name.md  ->  src/tinymlir/*.py (hand-written).

`tinymlir.literate` says what an exported cell is and has the commands.
"""
from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH = 84  # columns of an exported line: what a page of the book can show
MARK = re.compile(r"^#\|\s*export(?:\s+(?P<module>[A-Za-z_][\w.]*))?\s*$")
ALMOST = re.compile(r"^#\s*\|?\s*exports?\b")
LABEL = re.compile(r"^# %% (?P<chapter>\S+) § (?P<section>.+) \((?P<n>\d+)\)$")
BEGIN = re.compile(r"""literate\.begin\(\s*["']([\w.]+)["']""")
HEADER = "# Tangled from notebooks/{}: edit the chapter, not this file.\n"


class LiterateError(Exception):
    """A chapter, or the command line, that cannot be obeyed as it is."""


# ---------------------------------------------------------------- a chapter's exported cells

@dataclass(frozen=True)
class Block:
    """One exported cell."""

    module: str   # where its code belongs
    section: str  # the heading above it
    code: str
    line: int     # of the code's first line in the .md, counted from 1
    cell: int     # its number among all cells


def owner(name: str | None, main: str) -> str:
    """The module that a mark names: none is the chapter's own, a bare name its sibling."""
    if name is None:
        return main
    return name if "." in name else f"{main.rpartition('.')[0]}.{name}"


def module_path(root: Path, module: str) -> Path:
    """The file that a module is tangled into."""
    return root / "src" / Path(*module.split(".")).with_suffix(".py")


def project_root() -> Path:
    """The checkout around the current directory."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "notebooks/jupytext.toml").exists():
            return folder
    raise LiterateError(f"no notebooks/jupytext.toml in {here} or above it")


def chapters(root: Path) -> list[Path]:
    """The chapters' sources, in reading order."""
    return sorted((root / "notebooks").glob("[0-9]*.md"))


def select(root: Path, names: list[str]) -> list[Path]:
    """The chapters named by number or by file name; all of them for no name."""
    found = chapters(root)
    if not names:
        return found
    chosen = []
    for name in names:
        stem = Path(name).stem
        hits = [p for p in found if p.stem == stem or p.stem.startswith(stem.zfill(2) + "_")]
        if not hits:
            raise LiterateError(f"no chapter {name!r} among {', '.join(p.stem for p in found)}")
        chosen += hits
    return sorted(set(chosen))


def read(path: Path) -> Any:
    """The notebook that the .md stands for, without outputs."""
    import jupytext
    try:
        return jupytext.read(path)
    except Exception as error:  # a slip in the header or in a cell's options
        raise LiterateError(f"{path.name} cannot be read\n{error}") from None


def read_blocks(path: Path) -> list[Block]:
    """The exported cells of a chapter, in order."""
    blocks: list[Block] = []
    text, main, section, at = path.read_text().splitlines(), None, path.stem, 0
    for number, cell in enumerate(read(path).cells):
        section = last_heading(cell) or section
        lines = cell.source.splitlines()
        if cell.cell_type != "code" or not lines:
            continue
        at = next((i for i in range(at, len(text)) if text[i:i + len(lines)] == lines), at)
        if begun := BEGIN.search(cell.source):
            main = begun[1]
        if mark := read_mark(path, at, lines[0], main):
            code = "\n".join(lines[1:]).rstrip()
            block = Block(owner(mark["module"], main or ""), section, code, at + 2, number)
            blocks.append(parsed(path, block))
        at += len(lines)
    return blocks


def last_heading(cell: Any) -> str | None:
    if cell.cell_type != "markdown":
        return None
    prose = re.sub(r"^(`{3,}|:{3,}).*?^\1", "", cell.source, flags=re.M | re.S)
    found = re.findall(r"^#+ +(.+?)\s*$", prose, re.M)
    return found[-1] if found else None


def read_mark(path: Path, at: int, line: str, main: str | None) -> re.Match[str] | None:
    """The export mark on a cell's first line; a slip of the pen in one is an error."""
    mark = MARK.match(line)
    if mark is None and ALMOST.match(line):
        raise LiterateError(f"{path.name}:{at + 1}: {line!r} is almost `#| export [module]`")
    if mark and main is None:
        raise LiterateError(f"{path.name}:{at + 1}: exported before literate.begin(...)")
    return mark


def parsed(path: Path, block: Block) -> Block:
    try:
        ast.parse(block.code)
    except SyntaxError as error:
        where = f"{path.name}:{block.line + (error.lineno or 1) - 1}"
        raise LiterateError(f"{where}: {error.msg}") from None
    return block


# ---------------------------------------------------------------- the text of a tangled file

def join_blocks(chapter: str, blocks: list[Block]) -> str:
    """A module.  Labels hold no line numbers, so that editing prose never changes it."""
    out, count = [HEADER.format(chapter)], dict[str, int]()
    for block in blocks:
        count[block.section] = n = count.get(block.section, 0) + 1
        gap = "\n" if len(out) > 1 else ""
        out.append(f"{gap}\n# %% {chapter} § {block.section} ({n})\n{block.code}\n")
    return "".join(out)


def split_blocks(text: str) -> list[tuple[int, str, str]]:
    """Of each block: its code's first line, counted from 1, its label, and its code."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if LABEL.match(line)]
    return [(start + 2, lines[start], "\n".join(lines[start + 1:end]).rstrip())
            for start, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def tangled(root: Path, paths: list[Path]) -> dict[Path, str]:
    """What the files of these chapters must hold."""
    owners: dict[str, str] = {}
    files: dict[Path, str] = {}
    for path in paths:
        modules: dict[str, list[Block]] = {}
        for block in read_blocks(path):
            modules.setdefault(block.module, []).append(block)
        for module, blocks in modules.items():
            if owners.setdefault(module, path.name) != path.name:
                raise LiterateError(f"{module} is exported by {owners[module]} and {path.name}")
            files[module_path(root, module)] = join_blocks(path.name, blocks)
    return files


def write(path: Path, text: str) -> bool:
    """Write a file if that changes it, and never a half of it."""
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)
    return True


def tangle(root: Path, paths: list[Path] | None = None) -> None:
    """Write the modules of these chapters, or of all of them."""
    for path, text in tangled(root, chapters(root) if paths is None else paths).items():
        if write(path, text):
            print("wrote", path.relative_to(root))


def stale_files(root: Path) -> Iterator[str]:
    """What keeps src/ from being what the chapters say."""
    want = tangled(root, chapters(root))
    for path, text in want.items():
        old = path.read_text() if path.exists() else ""
        if old != text:
            lines = difflib.unified_diff(old.splitlines(), text.splitlines(),
                                         "on disk", "in the chapter", n=1, lineterm="")
            yield "\n    ".join([f"{path.relative_to(root)}: stale; tangle", *list(lines)[:20]])
    for path in sorted((root / "src").rglob("*.py")):
        if path not in want and path.read_text().startswith(HEADER[:len("# Tangled from")]):
            yield f"{path.relative_to(root)}: no chapter exports it"


def long_lines(root: Path) -> Iterator[str]:
    """Exported lines that a page cannot show."""
    for path in chapters(root):
        for block in read_blocks(path):
            for line, text in enumerate(block.code.splitlines(), block.line):
                if len(text) > WIDTH:
                    yield f"{path.relative_to(root)}:{line}: {len(text)} columns, not {WIDTH}"


def where(root: Path, spot: str) -> str:
    """`src/tinymlir/expr.py:31` -> `notebooks/01_expr.md:57 (cell 9, § One node)`."""
    name, _, number = spot.rpartition(":")
    file, line = Path(name), int(number)
    for first, label, code in split_blocks(file.read_text()):
        if not first <= line < first + len(code.splitlines()):
            continue
        match = LABEL.match(label)
        chapter = root / "notebooks" / match["chapter"] if match else file
        for block in read_blocks(chapter):
            if block.code == code and module_path(root, block.module) == file.resolve():
                at = f"{chapter.relative_to(root)}:{block.line + line - first}"
                return f"{at} (cell {block.cell}, § {block.section})"
    raise LiterateError(f"{spot} lies in no exported cell")


def untangle(root: Path) -> None:
    """Carry edits inside the blocks of src/ back; blocks may not be added or moved."""
    for path in chapters(root):
        modules: dict[str, list[Block]] = {}
        for block in read_blocks(path):
            modules.setdefault(block.module, []).append(block)
        edits = []
        for module, blocks in modules.items():
            codes = split_blocks(module_path(root, module).read_text())
            if len(codes) != len(blocks):
                raise LiterateError(f"{module}: {len(codes)} blocks for {len(blocks)} cells")
            edits += [(b, new) for b, (_, _, new) in zip(blocks, codes, strict=True)
                      if b.code != new]
        lines = path.read_text().splitlines()
        for block, new in sorted(edits, key=lambda edit: -edit[0].line):
            end = block.line - 1 + len(block.code.splitlines())
            lines[block.line - 1:end] = new.splitlines()
            print(f"{path.relative_to(root)}:{block.line}: from {block.module}")
        write(path, "\n".join(lines) + "\n")
