"""The suite itself: what must fail fails, and what a chapter says is what happens.

The tests work on a copy of the project with one small chapter.
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tinymlir import tangle, weave

ROOT = Path(__file__).parents[1]
COPIED = ["conftest.py", "pyproject.toml", "notebooks/jupytext.toml", "tests/test_sync.py"]
HANDWRITTEN = ["__init__.py", "literate.py", "tangle.py", "weave.py", "show.py"]
CHAPTER = '''\
---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
    format_version: 0.13
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# A tiny chapter

```{code-cell} ipython3
:tags: [remove-cell]

from tinymlir import literate; literate.begin("tinymlir.tiny")
```

```{code-cell} ipython3
#| export faults
"""What can go wrong."""
from __future__ import annotations


class Odd(ValueError):
    """A number that is not even."""
```

## Halves

```{code-cell} ipython3
#| export
"""Half of a number."""
from __future__ import annotations

from tinymlir.faults import Odd
```

```{code-cell} ipython3
#| export
def half(n: int) -> Undefined:  # the future statement above still holds
    """Half of an even number."""
    if n % 2:
        raise Odd(f"{n} is odd")
    return n // 2
```

```{code-cell} ipython3
half(42)
```

```{code-cell} ipython3
:tags: [raises-exception]

half(41)
```

```{code-cell} ipython3
import sys
print(sys.modules["tinymlir.tiny"].half is half, half.__module__, Odd.__module__)
print(half.__code__.co_filename)
```

```{code-cell} ipython3
:tags: [gpu]

half(84)
```
'''


def run(root: Path, *command: str) -> subprocess.CompletedProcess:
    """A Python command in a project, as if no other were around, nor any GPU that is not
    pretended in bin/."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TINYMLIR", "COV"))}
    env |= {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": str(root / "bin")}
    return subprocess.run([sys.executable, "-m", *command], cwd=root, env=env, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, check=False)


def suite(root: Path) -> subprocess.CompletedProcess:
    return run(root, "pytest", "-p", "no:cacheprovider", "--color=no")


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The small project, tangled and executed once."""
    root = tmp_path_factory.mktemp("project") / "tiny"
    for name in [*COPIED, *(f"src/tinymlir/{name}" for name in HANDWRITTEN)]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / "notebooks/01_tiny.md").write_text(CHAPTER)
    done = run(root, "tinymlir.literate", "run", "1")
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def project(executed, tmp_path):
    """A copy of it, to spoil."""
    return Path(shutil.copytree(executed, tmp_path / "tiny"))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def cells(root: Path) -> list[dict]:
    notebook = json.loads((root / "notebooks/01_tiny.ipynb").read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


# ---------------------------------------------------------------- what the suite must notice

def test_a_good_project_passes(project):
    done = suite(project)
    assert done.returncode == 0, done.stdout
    assert "8 passed, 1 skipped" in done.stdout


def test_a_notebook_without_outputs_fails(project):
    path = project / "notebooks/01_tiny.ipynb"
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    done = suite(project)
    assert done.returncode == 1
    assert "01_tiny.ipynb: never executed" in done.stdout


def test_a_wrong_output_fails(project):
    edit(project / "notebooks/01_tiny.ipynb", '"21"', '"22"')
    done = suite(project)
    assert done.returncode == 1
    assert "Cell 4: half(42)" in done.stdout and "1 failed" in done.stdout
    assert "'22' == '21'" in done.stdout


def test_an_edited_tangled_file_fails(project):
    edit(project / "src/tinymlir/tiny.py", "n // 2", "n / 2")
    done = suite(project)
    assert done.returncode == 1
    assert "src/tinymlir/tiny.py: stale" in done.stdout
    assert "StaleCell" in done.stdout


def test_a_killed_kernel_is_noticed_at_once(project):
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    edit(project / "notebooks/01_tiny.ipynb", "half(42)", kill)
    done = run(project, "pytest", "-p", "no:cacheprovider", "notebooks")
    assert done.returncode == 1
    assert "this cell killed its kernel" in done.stdout


# ---------------------------------------------------------------- what is stored

def test_outputs_do_not_depend_on_chance_or_place(executed, project):
    done = run(project, "tinymlir.literate", "run")
    assert done.returncode == 0, done.stderr
    again = (project / "notebooks/01_tiny.ipynb").read_bytes()
    assert again == (executed / "notebooks/01_tiny.ipynb").read_bytes()
    assert str(project).encode() not in again and b"/tmp/" not in again


def test_the_outputs_of_a_gpu_stay_where_there_is_none(project):
    tool = project / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho GPU 0\n")
    tool.chmod(0o755)
    assert run(project, "tinymlir.literate", "run").returncode == 0
    with_gpu = cells(project)
    assert with_gpu[-1]["outputs"][0]["data"] == {"text/plain": ["42"]}
    tool.unlink()
    assert run(project, "tinymlir.literate", "run").returncode == 0
    assert cells(project) == with_gpu


def test_an_exported_cell_runs_in_its_module(executed):
    *_, printed, _ = cells(executed)
    assert "".join(printed["outputs"][0]["text"]) == (
        "True tinymlir.tiny tinymlir.faults\nsrc/tinymlir/tiny.py\n")


def test_an_error_keeps_the_readers_line_and_the_message(executed):
    error = cells(executed)[5]["outputs"][0]
    assert (error["ename"], error["evalue"]) == ("Odd", "41 is odd")
    traceback = weave.COLOUR.sub("", "\n".join(error["traceback"]))
    assert traceback == "Cell In[6], line 1\n----> 1 half(41)\n\nOdd: 41 is odd"


def test_a_scratch_name_does_not_reach_the_module(project):
    edit(project / "notebooks/01_tiny.md", "half(42)\n", "half(42)\nscratch = 2\n")
    edit(project / "notebooks/01_tiny.md", "```{code-cell} ipython3\nimport sys",
         "```{code-cell} ipython3\n#| export\nTWICE = scratch * 2\n```\n\n"
         "```{code-cell} ipython3\nimport sys")
    done = run(project, "tinymlir.literate", "run")
    assert done.returncode == 1
    assert "name 'scratch' is not defined" in done.stderr


# ---------------------------------------------------------------- from one side to the other

def test_tangled_text(executed):
    assert (executed / "src/tinymlir/faults.py").read_text() == (
        '# Tangled from notebooks/01_tiny.md: edit the chapter, not this file.\n\n'
        '# %% 01_tiny.md § A tiny chapter (1)\n"""What can go wrong."""\n'
        'from __future__ import annotations\n\n\nclass Odd(ValueError):\n'
        '    """A number that is not even."""\n')


def test_where(executed):
    source = (executed / "src/tinymlir/tiny.py").read_text().splitlines()
    line = source.index("        raise Odd(f\"{n} is odd\")") + 1
    told = tangle.where(executed, f"{executed}/src/tinymlir/tiny.py:{line}")
    at = CHAPTER.splitlines().index("        raise Odd(f\"{n} is odd\")") + 1
    assert told == f"notebooks/01_tiny.md:{at} (cell 5, § Halves)"


def test_untangle_brings_an_edit_back(project):
    edit(project / "src/tinymlir/tiny.py", "Half of an even number.", "One of two\n    parts.")
    tangle.untangle(project)
    want = CHAPTER.replace("Half of an even number.", "One of two\n    parts.")
    assert (project / "notebooks/01_tiny.md").read_text() == want


def test_pull_brings_an_edit_back(project):
    edit(project / "notebooks/01_tiny.ipynb", "half(42)", "half(44)")
    assert run(project, "tinymlir.literate", "sync").returncode == 1  # would lose it
    assert run(project, "tinymlir.literate", "pull").returncode == 0
    want = CHAPTER.replace("half(42)", "half(44)")
    assert (project / "notebooks/01_tiny.md").read_text() == want
    assert not weave.edited(project / "notebooks/01_tiny.md")


def test_sync_keeps_the_outputs_of_unchanged_cells(project):
    edit(project / "notebooks/01_tiny.md", "half(41)", "half(43)")
    weave.sync(project)
    counts = [cell["execution_count"] for cell in cells(project)]
    assert counts == [1, 2, 3, 4, 5, None, 7, 8]


# ---------------------------------------------------------------- slips of the pen

@pytest.mark.parametrize(("old", "new", "told"), [
    ("#| export\ndef", "# | export\ndef", "is almost `#| export"),
    ("return n // 2", "return n // ", "01_tiny.md:"),
    ("literate.begin", "print", "exported before literate.begin"),
])
def test_refused(project, old, new, told):
    edit(project / "notebooks/01_tiny.md", old, new)
    with pytest.raises(tangle.LiterateError, match=told):
        tangle.tangle(project)


def test_a_module_belongs_to_one_chapter(project):
    (project / "notebooks/02_other.md").write_text(CHAPTER)
    with pytest.raises(tangle.LiterateError, match="01_tiny.md and 02_other.md"):
        tangle.tangle(project)


def test_exported_lines_are_short(project):
    edit(project / "notebooks/01_tiny.md", "holds", "holds" + "!" * 40)
    assert [*tangle.long_lines(project)] == ["notebooks/01_tiny.md:43: 112 columns, not 84"]


def test_a_file_without_a_chapter_is_stale(project):
    shutil.copy(project / "src/tinymlir/tiny.py", project / "src/tinymlir/old.py")
    assert [*tangle.stale_files(project)] == ["src/tinymlir/old.py: no chapter exports it"]
