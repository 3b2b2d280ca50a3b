"""Weaving: notebooks/NN_name.md  ->  the executed NN_name.ipynb beside it (hand-written).

The .md is the source.  The .ipynb holds the same cells and their outputs, is what Jupyter
opens, what the book shows and what the tests compare; its bytes depend on nothing else.
"""
from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tinymlir.tangle import LiterateError, chapters, read, select, tangle, write

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},  # else pull drops it
}
CHANCE = re.compile(r"\bat 0x[0-9a-f]{6,}|/ipykernel_\d+/")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
FRONT = re.compile(r"---\n.*?\n---\n", re.S)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


@cache
def has_gpu() -> bool:
    """Can cells tagged `gpu` run here?"""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    told = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return told.returncode == 0 and "GPU" in told.stdout


# ---------------------------------------------------------------- the same cells on both sides

def digest(notebook: Any) -> str:
    """Of what the .md holds too, so that an edit made in the .ipynb shows."""
    told = [(c.cell_type, c.source, tags(c), dict(c.metadata.get("mystnb", {})))
            for c in notebook.cells]
    return hashlib.sha1(repr(told).encode()).hexdigest()[:12]


def edited(path: Path) -> bool:
    """Does a chapter's .ipynb hold an edit (made in Jupyter, say) that the .md lacks?"""
    import nbformat
    ipynb = path.with_suffix(".ipynb")
    if not ipynb.exists():
        return False
    notebook = nbformat.read(ipynb, 4)
    known = notebook.metadata.get("literate", {}).get("sources")
    return digest(notebook) not in (known, digest(read(path)))


def weave(path: Path) -> Any:
    """The notebook of a chapter: cells from the .md, outputs of those that did not change."""
    import nbformat
    notebook, ipynb = read(path), path.with_suffix(".ipynb")
    old: dict[str, list[Any]] = {}
    for cell in code_cells(nbformat.read(ipynb, 4)) if ipynb.exists() else []:
        old.setdefault(cell.source, []).append(cell)
    for cell in code_cells(notebook):
        kept = old[cell.source].pop(0) if old.get(cell.source) else None
        cell.outputs = kept.outputs if kept else []
        cell.execution_count = kept.execution_count if kept else None
    name_cells(notebook)
    notebook.metadata = nbformat.from_dict({**METADATA, "literate": {"sources": digest(notebook)}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def name_cells(notebook: Any) -> None:
    """Cell ids that follow from the cells, not from chance."""
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        name = hashlib.sha1((cell.cell_type + cell.source).encode()).hexdigest()[:8]
        seen[name] = count = seen.get(name, 0) + 1
        cell["id"] = name if count == 1 else f"{name}-{count}"


def text_of(notebook: Any) -> str:
    import nbformat
    return nbformat.writes(notebook) + "\n"


def sync(root: Path, force: bool = False) -> None:
    """Carry the sources of each .md into its .ipynb."""
    for path in chapters(root):
        if edited(path) and not force:
            raise LiterateError(f"{path.stem}.ipynb was edited in place: `literate pull` first")
        if write(path.with_suffix(".ipynb"), text_of(weave(path))):
            print("wrote", path.with_suffix(".ipynb").relative_to(root))


def pull(root: Path) -> None:
    """Carry edits made in an .ipynb back into its .md."""
    import jupytext
    import nbformat
    for path in filter(edited, chapters(root)):
        notebook = nbformat.read(path.with_suffix(".ipynb"), 4)
        notebook.metadata = nbformat.from_dict({**read(path).metadata, **METADATA})
        head = FRONT.match(path.read_text())  # stays as its author wrote it
        body = FRONT.sub("", jupytext.writes(notebook, "md:myst"), count=1)
        write(path, (head[0] if head else "") + body)
        print("pulled", path.relative_to(root))
    tangle(root)
    sync(root, force=True)


# ---------------------------------------------------------------- outputs

def run(root: Path, names: list[str]) -> None:
    """Tangle, execute the chapters named (or all), and store their outputs."""
    paths = select(root, names)
    tangle(root, [path for path in chapters(root) if path <= paths[-1]] if paths else [])
    os.environ["TINYMLIR_STRICT"] = "1"
    os.environ["TINYMLIR_CACHE"] = "off"  # what is stored comes from this source
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    for path in paths:
        if edited(path):
            raise LiterateError(f"{path.stem}.ipynb was edited in place: `literate pull` first")
        notebook = execute(path)
        for number, cell in enumerate(code_cells(notebook), 1):
            settle(cell, number, root)
        write(path.with_suffix(".ipynb"), text_of(notebook))
        print("ran", path.relative_to(root))


def execute(path: Path) -> Any:
    """The notebook after a run.  Without a GPU, cells tagged `gpu` keep their stored outputs."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    notebook = weave(path)
    metadata = nbformat.from_dict(notebook.metadata)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        skip_cells_with_tag="skip-execution" if has_gpu() else "gpu",
        resources={"metadata": {"path": str(path.parent)}})
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise LiterateError(f"{path.name}: a cell failed\n{error}") from None
    notebook.metadata = metadata
    return notebook


def settle(cell: Any, number: int, root: Path) -> None:
    """Take out of a cell's outputs what depends on the machine or on chance."""
    cell.execution_count = number
    outputs: list[Any] = []
    for output in cell.outputs:
        last = outputs[-1] if outputs else None
        if output.output_type == "execute_result":
            output.execution_count = number
        if output.output_type == "stream" and last and last.get("name") == output.name:
            last.text += output.text  # how a stream is cut into messages is a race
            continue
        if output.output_type == "error":
            output.traceback = shorten(output.traceback, number)
        outputs.append(strip(output, root))
    cell.outputs = outputs


def shorten(traceback: list[str], number: int) -> list[str]:
    """Of a traceback, the line in the reader's cell and the message: the frames between show
    the insides of the package, and change whenever it does."""
    frames = [part for part in traceback if "Cell In[" in COLOUR.sub("", part)]
    kept = [*frames[:1], *traceback[-1:]]
    return [re.sub(r"In\[\d+\]", f"In[{number}]", part) for part in kept]


def strip(value: Any, root: Path) -> Any:
    """The same text without the place of the checkout."""
    if isinstance(value, dict):
        return type(value)({key: strip(item, root) for key, item in value.items()})
    if isinstance(value, list):
        return [strip(item, root) for item in value]
    if not isinstance(value, str):
        return value
    for place in (f"{root}/", f"{root}".replace(str(Path.home()), "~", 1) + "/"):
        value = value.replace(place, "")
    return value


def stale_notebooks(root: Path) -> Iterator[str]:
    """What keeps the .ipynb from being their .md, executed."""
    import nbformat
    for path in chapters(root):
        ipynb = path.with_suffix(".ipynb")
        name = ipynb.relative_to(root)
        if not ipynb.exists():
            yield f"{name}: missing; run"
        elif edited(path):
            yield f"{name}: edited in place; pull (or restore it)"
        elif ipynb.read_text() != text_of(weave(path)):
            yield f"{name}: not the cells of {path.name}; sync or run"
        else:
            yield from (f"{name}: {told}" for told in unexecuted(nbformat.read(ipynb, 4)))
    for ipynb in sorted((root / "notebooks").glob("*.ipynb")):
        if not ipynb.with_suffix(".md").exists():
            yield f"{ipynb.relative_to(root)}: has no .md"


def unexecuted(notebook: Any) -> Iterator[str]:
    """Why stored outputs cannot be those of a run; nbval by itself lets empty ones pass."""
    cells = code_cells(notebook)
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        yield "never executed as a whole; run"
        return
    for number, cell in enumerate(cells, 1):
        errors = [o for o in cell.outputs if o.output_type == "error"]
        if bool(errors) != ("raises-exception" in tags(cell)):
            yield f"cell [{number}] {'fails' if errors else 'should raise but does not'}"
        if found := CHANCE.search(str(cell.outputs)):
            yield f"cell [{number}] prints {found[0]!r}, which differs from run to run"
