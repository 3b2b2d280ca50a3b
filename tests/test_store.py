"""The cache on disk: never a wrong result, never a crash."""
import os
import subprocess
import sys

import numpy as np
import pytest

from tinymlir import jit, store

PROGRAM = """
import sys
import numpy as np
from tinymlir import jit
x = np.linspace(0, 1, 12).reshape(3, 4)
y = jit(lambda x: np.tanh(x) @ x.T)(x)
print(np.allclose(y, np.tanh(x) @ x.T), "mlir" in sys.modules)
"""


def run(folder):
    done = subprocess.run([sys.executable, "-c", PROGRAM], text=True, capture_output=True,
                          env={**os.environ, "TINYMLIR_CACHE": str(folder)})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYMLIR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_second_process_compiles_nothing(folder):
    assert run(folder) == ("True True", "")
    assert run(folder) == ("True False", "")
    assert len(list(folder.iterdir())) == 3  # the function, the product, the pool


@pytest.mark.parametrize("damage", [b"", b"x", b"x" * 5000])
def test_damaged_entries_are_made_again(folder, damage):
    run(folder)
    for file in folder.iterdir():
        file.write_bytes(damage or file.read_bytes()[:-1])
    assert run(folder) == ("True True", "")
    assert run(folder) == ("True False", "")


def test_two_processes_at_once(folder):
    env = {**os.environ, "TINYMLIR_CACHE": str(folder)}
    both = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, text=True,
                             stdout=subprocess.PIPE) for _ in range(2)]
    assert all(p.communicate()[0].startswith("True") for p in both)
    assert run(folder) == ("True False", "")
    assert not [f for f in folder.iterdir() if f.name.startswith("new-")]


def test_a_folder_that_cannot_be_written_warns_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    out, err = run(tmp_path / "file" / "cache")
    assert out == "True True" and err.count("RuntimeWarning: compiled code is not kept") == 1


def test_off_and_the_usual_folders(monkeypatch):
    monkeypatch.setenv("TINYMLIR_CACHE", "off")
    assert store.folder() is None and store.read("0" * 64) is None
    store.write("0" * 64, [], b"")  # nowhere, and without a word
    monkeypatch.delenv("TINYMLIR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert sys.platform == "darwin" or str(store.folder()) == "/somewhere/tinymlir"


def test_another_processor_has_other_keys(monkeypatch, folder):
    here = store.key_of("graph")
    store.toolchain.cache_clear()
    monkeypatch.setattr(store, "host", lambda: "another processor")
    assert store.key_of("graph") != here
    store.toolchain.cache_clear()


def test_the_folder_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(store, "LIMIT", 3000)
    monkeypatch.setattr(store, "TRIM", ("0", "f"))
    for i in range(6):
        store.write(f"{i:064}", [], bytes(1000))
        os.utime(folder / f"{i:064}", (i, i))
    store.write("f" * 64, [], bytes(1000))
    left = sorted(f.name for f in folder.iterdir())
    assert left == [f"{5:064}", "f" * 64]
    assert store.read("f" * 64) == ([], bytes(1000))


def test_programs_that_differ_in_one_bit_have_other_keys():
    x = np.ones(3)
    programs = [lambda x: x * 0.1, lambda x: x * np.nextafter(0.1, 1), lambda x: x + 0.1,
                lambda x: 0.1 * x, lambda x: (x * 0.1, x), lambda x: x * -0.0,
                lambda x: x * 0.0, lambda x: x[1:], lambda x: x[:2], lambda x: x.sum()]
    graphs = [jit(f).compile(x).graph for f in programs]
    graphs += [jit(programs[0]).compile(np.ones(n)).graph for n in (1, 2)]
    assert len({store.fingerprint(g) for g in graphs}) == len(graphs)


def test_a_changed_cell_of_a_chapter_keeps_away_from_the_cache(folder, tmp_path):
    program = """
import numpy as np
from tinymlir import literate
literate.begin("tinymlir.scalars")
chapter = literate._modules["tinymlir.scalars"]
for _, _, code in chapter.blocks:
    chapter.run(code.replace('(Op.SQRT, "f"): math.sqrt', '(Op.SQRT, "f"): math.absf'))
from tinymlir import jit
print(float(jit(lambda x: np.sqrt(x) + 1)(np.array(4.0))))
"""
    env = {**os.environ, "TINYMLIR_CACHE": str(folder)}
    env.pop("TINYMLIR_STRICT", None)
    plain = ("import numpy as np\nfrom tinymlir import jit\n"
             "print(float(jit(lambda x: np.sqrt(x) + 1)(np.array(4.0))))")
    for code, result in ((program, "5.0"), (plain, "3.0"), (program, "5.0"), (plain, "3.0")):
        done = subprocess.run([sys.executable, "-c", code], text=True, env=env,
                              capture_output=True)
        assert done.stdout.strip() == result, done.stderr


def test_every_module_that_makes_code_is_part_of_the_key(tmp_path):
    """What is imported to compile, and not to load what was compiled, decides the code."""
    code = ("import sys, numpy as np\nfrom tinymlir import jit\n"
            "x = np.ones((2, 40, 40))\njit(lambda x: np.exp(x @ x) @ np.tanh(x))(x)\n"
            "print(*(n.split('.')[1] for n in sys.modules if n.startswith('tinymlir.')))")
    env = {**os.environ, "TINYMLIR_CACHE": str(tmp_path)}
    cold, warm = (set(subprocess.run([sys.executable, "-c", code], env=env, text=True,
                                     capture_output=True, check=True).stdout.split())
                  for _ in range(2))
    assert {"bands", "schedule", "passes"} <= cold - warm <= set(store.SOURCES)
