"""The book's own tools: which names are links, and how MLIR is coloured."""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book/_ext"))

from code_names import links, read_cells  # noqa: E402
from mlir_lexer import MLIRLexer  # noqa: E402
from pygments.token import Error  # noqa: E402

KNOWN = {"tinymlir.expr.Expr", "tinymlir.expr.shape", "tinymlir.expr.later", "tinymlir.jit.jit",
         "tinymlir.errors.ShapeError", "tinymlir.expr.Op.ADD", "tinymlir.expr.Op"}
BEGIN = 'from tinymlir import literate; literate.begin("tinymlir.expr")'
EXPORTED = "#| export\nclass Expr: pass\nclass Op: ADD = 1\ndef shape(e): return later(e)"


def linked(*sources: str) -> list[str]:
    """The links of the last cell, each as the text before it on its line, then the target."""
    cells = read_cells([BEGIN, *sources])
    found = links(cells, KNOWN.__contains__)[cells[-1].code.strip()]
    code = cells[-1].code
    assert all(code[link.offset:].startswith(link.name) for link in found)
    return [link.target.removeprefix("tinymlir.") for link in found]


@pytest.mark.parametrize(("code", "targets"), [
    ("shape(Expr())", ["expr.shape", "expr.Expr"]),
    ("x.shape, dict(shape=2), 'shape'", []),
    ("def f(shape): return shape(1)", []),
    ("def f(e=shape, *, Expr: Expr = 2): return Expr", ["expr.Expr", "expr.shape"]),
    ("def f():\n    shape = 1\n    return shape", []),
    ("def f():\n    return shape", ["expr.shape"]),
    ("def f():\n    global shape\n    shape = shape", ["expr.shape"]),
    ("[shape for shape in (1, 2)], (lambda shape: shape)", []),
    ("class A(Expr):\n    shape = 1\n    b = shape\n    def f(self): return shape",
     ["expr.Expr", "expr.shape"]),
    ("shape = 3\nshape", []),
    ("from tinymlir import jit, errors\n@jit\ndef f(): raise errors.ShapeError(1)",
     ["jit.jit", "errors.ShapeError"]),
    ("import tinymlir.expr as E\nE.shape, E.Op.ADD", ["expr.shape", "expr.Op", "expr.Op.ADD"]),
    ("from elsewhere import shape\nshape", []),
    ("'é', shape", ["expr.shape"]),
    ("%time shape\nshape", ["expr.shape"]),
    ("with open('x') as shape:\n    shape", []),
])
def test_links(code, targets):
    assert linked(EXPORTED, "#| export\ndef later(e): return e", code) == targets


def test_a_function_sees_later_cells_of_its_module():
    assert linked("#| export\ndef later(e): return e", EXPORTED) == ["expr.later"]


def test_an_exported_cell_does_not_see_scratch_names():
    assert linked(EXPORTED, "from tinymlir import jit", "#| export\njit, shape") == ["expr.shape"]


def test_mlir_has_no_errors():
    text = '''#map = affine_map<(d0, d1) -> (d0 * 4 + d1)>
    func.func private @f(%arg0: tensor<4x?xf32>, %1: memref<2xi8, strided<[1], offset: ?>>) {
      %0:2 = "test.op"(%arg0) <{a = -1.0e-5 : f32, b = dense<[1, 2]>, s = "\\"quoted\\""}> :
      ^bb0(%c: !llvm.ptr<1>):  // {-# comment #-}
      %x = scf.for %i = %0#1 to %c step %c iter_args(%z = %y) -> (vector<[4]x8xbf16>) { ~ }
    }'''
    assert [token for token in MLIRLexer().get_tokens(text) if token[0] is Error] == []


def test_every_chapter_is_in_the_contents():
    contents = (ROOT / "_toc.yml").read_text()
    missing = [p.stem for p in (ROOT / "notebooks").glob("[0-9]*.md")
               if f"notebooks/{p.stem}" not in contents]
    assert missing == []
