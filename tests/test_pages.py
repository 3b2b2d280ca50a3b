"""What the book's extension makes of the package: error pages, stages, lists of names."""
import platform
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="the book's tools come with the extra `book`")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book/_ext"))

import failing  # noqa: E402
import offline  # noqa: E402
import pipeline  # noqa: E402
import stages  # noqa: E402
import whole  # noqa: E402
from lines import hanging  # noqa: E402

from tinymlir import errors, jit, ops  # noqa: E402
from tinymlir.arrays import MLIR  # noqa: E402
from tinymlir.ops import EXAMPLES  # noqa: E402


@pytest.mark.parametrize("page", ["README.md", "book/intro.md"])
def test_the_code_on_the_first_pages_runs(page):
    text = (ROOT / page).read_text()
    cells = re.findall(r"^```(?:python|\{works\})\n(.*?)^```", text, re.M | re.S)
    assert cells
    for code in cells:
        assert failing.run(code, page)[1] is None


# ---------------------------------------------------------------- error pages

ERRORS = {kind.__name__: kind for kind in failing.error_classes()}


def test_all_errors_are_found():
    inside = {name for name, kind in vars(errors).items()
              if isinstance(kind, type) and issubclass(kind, errors.TinymlirError)}
    assert inside - {"TinymlirError"} < set(ERRORS) and "UpstreamError" in ERRORS


def test_every_error_has_a_page_and_every_page_an_error():
    assert {p.stem for p in (ROOT / "book/errors").glob("*.md")} == {*ERRORS, "index"}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_page_fails_as_it_says(name):
    cells = failing.blocks((ROOT / f"book/errors/{name}.md").read_text())
    assert [cell[:2] for cell in cells] == [("fails", name), ("works", "")]
    (_, _, wrong), (_, _, right) = cells
    error = failing.run(wrong, name)[1]
    assert type(error) is ERRORS[name]
    assert failing.run(right, name)[1] is None


# ---------------------------------------------------------------- the stage viewer

def sources(function, wanted, stage):
    """The code of the source lines that a line of a stage is linked to."""
    example = EXAMPLES[function]
    found = {s.name: s for s in stages.stages_of(
        example.function, example.arrays, example.static)}
    numbers = {n for text, ns in found[stage].lines if wanted in text for n in ns}
    rows = Path(ops.__file__).read_text().splitlines()
    return {rows[n - 1].strip() for n in numbers}


@pytest.mark.parametrize(("stage", "wanted", "line"), [
    ("graph", "max ", "powers = np.exp("), ("graph", "div ", "return powers /"),
    ("linalg", "math.exp", "powers = np.exp("), ("fused", "arith.divf", "return powers /"),
    ("bufferized", "arith.maximumf", "powers = np.exp("), ("lowered", "llvm.fdiv", "return powers"),
    ("llvm", "fdiv", "return powers"), ("asm", "vdiv", "return powers"),
])
def test_lines_are_linked(stage, wanted, line):
    if stage == "asm" and platform.machine() != "x86_64":
        pytest.skip("another processor divides by another name")
    found = sources("softmax", wanted, stage)
    assert len(found) == 1 and found.pop().startswith(line)


def test_the_viewer_shows_what_the_compiler_says():
    example = EXAMPLES["layer_norm"]
    compiled = jit(example.function).compile(*example.arrays).stages
    found = stages.stages_of(example.function, example.arrays, example.static)
    shown = {s.name: "\n".join(text for text, _ in s.lines) for s in found}
    assert {name: text.strip("\n") for name, text in compiled.items()}.items() <= shown.items()
    assert found[3].changed(found[2]) != [False] * len(found[3].lines)
    assert found[2].changed(found[2]) == [False] * len(found[2].lines)


def test_locations_leave_no_trace():
    from mlir import ir
    before = dict(MLIR)
    with stages.rules_with_locations():
        assert before != MLIR
    assert before == MLIR
    with ir.Context(), ir.Location.file("f", 1, 2):
        assert str(ir.Location.unknown()) == "loc(unknown)"


def test_most_lines_know_where_they_come_from():
    """Also those that steps of ours have made: the polynomial of a tanh."""
    example = EXAMPLES["gelu"]
    found = {s.name: s.lines for s in stages.stages_of(example.function, example.arrays, {})}
    for name in ("linalg", "scheduled"):
        lines = [numbers for text, numbers in found[name] if " = " in text]
        assert sum(map(bool, lines)) > 0.8 * len(lines), name


# ---------------------------------------------------------------- pages

def test_long_lines_hang():
    page = hanging('<span class="k">def</span> f():\n\n<span class="w">    </span>pass\n')
    assert page == ('<span class="tl"><span class="k">def</span> f():<i>\n</i></span>\n'
                    '<span class="tl" style="--i:4">    pass<i>\n</i></span>')


def test_the_way_marks_the_chapter():
    pages = {"01_expr": "01.html", "02_builder": "02.html", "07_parity": "07.html"}
    svg = pipeline.picture("02_builder", pages)
    assert svg.count('class="here"') == 1 and "linalg" in svg.partition('class="here"')[2][:150]
    assert "08" not in svg and 'href="01.html"' in svg and 'href="02.html"' not in svg


def test_the_picture_of_the_readme_is_the_one_of_the_book():
    drawn = pipeline.standalone([step for step in pipeline.STEPS if step])
    assert (ROOT / "book/_static/way.svg").read_text() == drawn


def test_the_chapters_have_their_place():
    """Numbered chapters are on the way, all of them in the table and in README's map."""
    chapters = [p.stem for p in (ROOT / "notebooks").glob("[0-9]*.md")]
    assert [c for c in chapters if pipeline.stem_of(c, pipeline.ATTAINED) is None] == []
    assert [c for c in chapters if 0 < int(c[:2]) < 90 and pipeline.stem_of(c) is None] == []
    readme = (ROOT / "README.md").read_text()
    assert [c for c in chapters if f"(notebooks/{c}.md)" not in readme] == []


def test_the_map_of_the_readme_is_right():
    rows = re.findall(r"\(notebooks/(\w+)\.md\) \|(.*)\|", (ROOT / "README.md").read_text())
    found = {stem: set(names) for stem, (_, names) in whole.modules(ROOT).items()}
    assert {stem: {f"tinymlir.{m}" for m in re.findall(r"`(\w+)`", told)}
            for stem, told in rows} == found


def test_every_exported_name_is_listed():
    listed = {name for _, name, _ in whole.public(whole.code_of(ROOT, "tinymlir.graph"))}
    assert {"trace", "Graph", "evaluate", "WIDE", "HIGH"} <= listed
    modules = [m for _, names in whole.modules(ROOT).values() for m in names]
    assert {"tinymlir.expr", "tinymlir.jit", "tinymlir.doctor"} <= set(modules)


def test_mathjax_keeps_the_letters_that_pages_use():
    text = 'x={120:"M0",119964:"SCRIPT",119834:"BOLD",120068:"FRAKTUR"}'
    kept = offline.DRAWN.sub(lambda m: m[0] if offline.kept(int(m[1])) else "", text)
    assert kept == 'x={120:"M0",119834:"BOLD"}'
    used = [p.name for p in (ROOT / "notebooks").glob("*.md")
            if re.search(r"\\math(cal|frak|scr|bb)\b", p.read_text())]
    assert used == []  # add its letters to KEPT first


# ---------------------------------------------------------------- launch buttons

def built_with(address, folder):
    """The page of a notebook, and another page, of a book whose setting is this address."""
    import nbformat
    from sphinx.application import Sphinx
    (folder / "notebooks").mkdir()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# One\n\nText.")])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3",
                                       "language": "python"}
    nbformat.write(notebook, folder / "notebooks/one.ipynb")
    (folder / "index.md").write_text("# Book\n\n```{launch-setup}\n```\n\n"
                                     "```{toctree}\nnotebooks/one\n```\n")
    app = Sphinx(folder, None, folder / "out", folder / "trees", "html", status=None,
                 confoverrides={
                     "extensions": ["myst_nb", "launch"], "html_theme": "sphinx_book_theme",
                     "nb_execution_mode": "off", "tinymlir_repository": address})
    app.build()
    return [(folder / "out" / p).read_text() for p in ("notebooks/one.html", "index.html")]


@pytest.mark.parametrize("ending", ["", ".git", "/", ".git/"])
def test_one_setting_makes_the_launch_buttons(tmp_path, ending):
    chapter, first = built_with("https://github.com/who/what" + ending, tmp_path)
    links = re.findall(r'href="(https://[^"]*)"', chapter)
    assert ("https://colab.research.google.com/github/who/what/blob/main/notebooks/one.ipynb"
            in links)
    assert ("https://mybinder.org/v2/gh/who/what/main?urlpath=lab/tree/notebooks/one.ipynb"
            in links)
    cell = "%pip install -q git+https://github.com/who/what"
    assert f"<code>{cell}</code>" in chapter and chapter.count("tm-setup") == 1
    assert cell in re.sub(r"<[^>]*>", "", first) and "tm-setup" not in first


def test_without_the_setting_nobody_is_sent_anywhere(tmp_path):
    chapter, first = built_with("", tmp_path)
    assert "colab" not in chapter and "mybinder" not in chapter and "tm-setup" not in chapter
    assert "git+ADDRESS-OF-THE-REPOSITORY" in re.sub(r"<[^>]*>", "", first)


def test_binder_installs_what_a_chapter_needs():
    import tomllib
    wanted = (ROOT / ".binder/requirements.txt").read_text().split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert wanted == [".[test]"] and "test" in project["optional-dependencies"]
    release = tuple(map(int, (ROOT / ".binder/runtime.txt").read_text().strip()
                        .removeprefix("python-").split(".")))
    assert release >= tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
