"""`import tinymlir` is lazy, and `jit` is the function although it is also a module."""
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/tinymlir/__init__.py"


def python(code: str, path: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(path)}, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path):
    """The real `__init__.py` over stand-ins for the chapters."""
    (tmp_path / "tinymlir").mkdir()
    shutil.copy(SOURCE, tmp_path / "tinymlir")
    (tmp_path / "tinymlir/jit.py").write_text("class Cache: pass\ndef jit(f): return f\n")
    (tmp_path / "tinymlir/model.py").write_text("def generate(): pass\ndef load_model(): pass\n")
    (tmp_path / "tinymlir/outline.py").write_text("import tinymlir.jit\n")
    (tmp_path / "tinymlir/expr.py").write_text("class Expr: pass\n")
    (tmp_path / "tinymlir/errors.py").write_text("class ShapeError(ValueError): pass\n")
    return tmp_path


@pytest.mark.parametrize("before", [
    "", "import tinymlir.jit", "from tinymlir.jit import Cache", "from tinymlir import jit",
    "import tinymlir.model, tinymlir.jit, tinymlir.model",
    "import importlib; importlib.import_module('tinymlir.jit')",
    "import tinymlir, tinymlir.jit; setattr(tinymlir, 'jit', sys.modules['tinymlir.jit'])",
])
def test_jit_is_the_function(package, before):
    told = python(f"import sys\n{before}\nfrom tinymlir import jit\nimport tinymlir\n"
                  "from tinymlir.jit import Cache, jit as other\n"
                  "print(type(jit).__name__, jit is other is tinymlir.jit, Cache.__module__)",
                  package)
    assert told == "function True tinymlir.jit"


def test_public_names(package):
    told = python("import tinymlir; from tinymlir import *\n"
                  "print(Expr.__module__, errors.__name__, generate.__name__, load_model.__name__,"
                  " set(tinymlir.__all__) <= set(dir(tinymlir)), hasattr(tinymlir, 'nonsense'))",
                  package)
    assert told == "tinymlir.expr tinymlir.errors generate load_model True False"


def test_import_is_light():
    code = ("import sys, tinymlir\n"
            "heavy = {'numpy', 'mlir', 'tokenizers', 'safetensors', 'asyncio'} & set(sys.modules)\n"
            "print(sorted(heavy), len(sys.modules) < 100)")
    assert python(code, SOURCE.parents[1]) == "[] True"
