"""Kernels in a folder: written here, run by a process that cannot import a compiler."""
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import tiny
from tinymlir.cli import main
from tinymlir.cuda import settings
from tinymlir.device import use
from tinymlir.saved import KernelsError, read_kernels, seal, use_kernels, write_kernels
from tinymlir.standin import StandIn

PROMPT = "A story"  # seven bytes, so seven tokens of the small model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"))


def compiled(folder, model, *more):
    words = ["compile", "--gpu", "--chip", "sm_80", "--out", folder, "--model", model, *more]
    assert main([str(word) for word in words]) == 0
    return folder


@pytest.fixture(scope="module")
def fused(tmp_path_factory, model):
    return compiled(tmp_path_factory.mktemp("kernels") / "fused", model, "--fused",
                    "--lengths", "5-8")


@pytest.fixture
def copied(fused, tmp_path):
    """The folder again, to be damaged."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in fused.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(autouse=True)
def no_device():
    yield
    use()
    settings.find = None


# ---------------------------------------------------------------- the other machine

RUN = """
import importlib.abc, sys

HERE = {*sys.stdlib_module_names, "tinymlir", "numpy", "safetensors", "tokenizers", "cuda"}

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] not in HERE:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Block())
from tinymlir.cli import main
from tinymlir.device import use
from tinymlir.standin import StandIn
use(StandIn(capability=(9, 0)))
status = main(sys.argv[1:])
loaded = [name for name in sys.modules if name.split(".")[0] in ("mlir", "llvm")]
assert not loaded, loaded
compilers = {"passes", "builder", "schedule", "gpu", "updates_gpu", "updates_mlir"} & {
    name.removeprefix("tinymlir.") for name in sys.modules}
assert not compilers, compilers
sys.exit(status)
"""


def elsewhere(*words):
    """A command in a process that has the four packages of a GPU machine, and a stand-in."""
    env = {k: v for k, v in os.environ.items() if k != "TINYMLIR_CACHE"}
    return subprocess.run([sys.executable, "-c", RUN, *map(str, words)], text=True,
                          capture_output=True, timeout=600, env=env)


@pytest.mark.parametrize("mode", [[], ["--fused"]], ids=["per sublayer", "fused"])
def test_verify_runs_without_a_compiler(model, tmp_path, mode):
    folder = compiled(tmp_path / "kernels", model, *mode, "--prompt", PROMPT, "--tokens", "2")
    done = elsewhere("verify", "--gpu", "--kernels", folder, "--model", model, *mode,
                     "--prompt", PROMPT, "--tokens", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nOK\n")
    assert len(re.findall(r"^(embedding|block|logits|token) ?.* OK$", done.stdout, re.M)) == 7


def test_generate_runs_without_a_compiler(model, fused):
    done = elsewhere("generate", PROMPT, "--gpu", "--kernels", fused, "--model", model,
                     "--fused", "--tokens", "2")
    assert done.returncode == 0, done.stderr
    here = subprocess.run([sys.executable, "-m", "tinymlir", "generate", PROMPT, "--model",
                           model, "--tokens", "2"], text=True, capture_output=True)
    assert done.stdout == here.stdout


@pytest.mark.parametrize("words, told", [
    (["--prompt", PROMPT * 2, "--fused"], "no kernels for 10 tokens after a prompt of 14; "
     "write it again with `tinymlir compile --gpu --lengths 14-23`"),
    (["--prompt", PROMPT], "its kernels are for fused True, expected False"),
], ids=["another length", "another mode"])
def test_what_was_not_compiled_is_one_line(model, fused, words, told):
    done = elsewhere("verify", "--gpu", "--kernels", fused, "--model", model, *words)
    assert done.returncode == 1 and done.stdout == ""
    assert told in done.stderr and done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("tokens, fine", [(2, True), (3, False)])
def test_generate_knows_before_it_begins_that_a_length_is_missing(model, tmp_path, tokens, fine):
    """Kernels for each length: 7 and 8 suffice for two tokens after seven, not for three."""
    folder = compiled(tmp_path / "k", model, "--lengths", "7-8")
    done = elsewhere("generate", PROMPT, "--gpu", "--kernels", folder, "--model", model,
                     "--tokens", tokens)
    assert done.returncode == (not fine) and bool(done.stdout) == fine
    if not fine:
        assert done.stderr.splitlines()[1:] == [
            f"error: {folder}: no kernels for 3 tokens after a prompt of 7; write it again with "
            f"`tinymlir compile --gpu --lengths 7-9`, and the other options as they are here"]


def test_a_cache_runs_without_a_compiler(model, tmp_path):
    """One folder for any prompt of five to eight tokens, and any text after it."""
    folder = compiled(tmp_path / "k", model, "--cache", "--lengths", "7")
    for prompt, tokens in ((PROMPT, 12), (PROMPT[:5], 3)):
        words = ["generate", prompt, "--tokens", tokens, "--model", model]
        done = elsewhere(*words, "--gpu", "--kernels", folder, "--cache")
        here = subprocess.run([sys.executable, "-m", "tinymlir", *map(str, words)], text=True,
                              capture_output=True)
        assert done.returncode == 0 and done.stdout == here.stdout, done.stderr
    done = elsewhere("verify", "--gpu", "--kernels", folder, "--cache", "--model", model,
                     "--prompt", PROMPT, "--tokens", 3)
    assert done.returncode == 0 and done.stdout.endswith("\nOK\n"), done.stderr
    done = elsewhere("generate", PROMPT * 2, "--gpu", "--kernels", folder, "--cache", "--model",
                     model)
    assert done.returncode == 1 and done.stdout == "" and "a prompt of 14" in done.stderr
    done = elsewhere("generate", PROMPT, "--gpu", "--kernels", folder, "--model", model)
    assert done.returncode == 1 and "cache True, expected False" in done.stderr


def test_without_a_folder_and_without_a_compiler(model):
    done = elsewhere("generate", PROMPT, "--gpu", "--model", model)
    assert done.returncode == 1
    assert "error: there is no compiler on this machine" in done.stderr
    assert "--kernels" in done.stderr and "Traceback" not in done.stderr


def test_without_a_gpu_it_is_one_line(model):
    code = ("import sys; sys.modules['cuda'] = None\nfrom tinymlir.cli import main\n"
            "sys.exit(main(sys.argv[1:]))")
    for words in (["generate", PROMPT], ["verify"]):
        done = subprocess.run([sys.executable, "-c", code, *words, "--gpu", "--model", model],
                              text=True, capture_output=True)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.splitlines()[-1].startswith("error: no GPU: the package cuda-bind")


# ---------------------------------------------------------------- what is refused

def reseal(folder, **changes):
    """Change the manifest as somebody would who knows how to seal it."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps({**manifest, "seal": seal(manifest)}))


def first_plan(folder):
    return next(path for path in sorted(folder.iterdir()) if path.name != "manifest.json")


def truncate(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-40])


def edit(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"fused": true', '"fused": false'))


DAMAGE = {
    "no folder": lambda f: [p.unlink() for p in f.iterdir()] and f.rmdir(),
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "half a manifest": truncate,
    "an edited manifest": edit,
    "not JSON": lambda f: (f / "manifest.json").write_bytes(b"\xff\x00"),
    "too deep": lambda f: (f / "manifest.json").write_text("[" * 100_000),
    "a list": lambda f: (f / "manifest.json").write_text("[1]"),
    "another program's": lambda f: (f / "manifest.json").write_text('{"name": "my app"}'),
    "another format": lambda f: reseal(f, version=2),
    "another tinymlir": lambda f: reseal(f, tinymlir="0.0.1"),
    "no plans": lambda f: reseal(f, plans=None),
    "plans of nonsense": lambda f: reseal(f, plans={"a": 1}),
    "a model": lambda f: tiny.write_checkpoint(f) and (f / "manifest.json").unlink(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_manifest_that_is_refused(copied, name):
    DAMAGE[name](copied)
    with pytest.raises(KernelsError) as told:
        read_kernels(copied)
    assert "\n" not in str(told.value) and "tinymlir compile --gpu" in str(told.value)
    assert str(copied) in str(told.value)


PLANS = {
    "missing": lambda path: path.unlink(),
    "damaged": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path: path.write_bytes(path.read_bytes().replace(b"sm_80", b"sm_81", 1)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_is_refused(copied, model, name):
    for path in copied.iterdir():
        if path.name != "manifest.json":
            PLANS[name](path)
    use(StandIn())
    from tinymlir.model import load_model
    from tinymlir import fused as module
    module.compiled("gpu", None, "float32").cache_clear()
    use_kernels(copied)
    gpt, _ = load_model(model, target="gpu", fused=True)
    with pytest.raises(KernelsError, match="missing|damaged"):
        gpt([1, 2, 3, 4, 5])


def test_a_sealed_plan_of_nonsense_is_refused(copied, model):
    import hashlib
    plans = json.loads((copied / "manifest.json").read_text())["plans"]
    for name in plans:
        for text in ("[]", "{}", "nonsense", '{"chip": 1, "ptx": 2}'):
            (copied / f"{name}.json").write_text(text)
            digest = hashlib.sha256(text.encode()).hexdigest()
            reseal(copied, plans={name: {"about": "", "sha256": digest}})

            class Graph:
                pass

            kernels = read_kernels(copied)
            from tinymlir import saved
            before, saved.identity = saved.identity, lambda graph, name=name: name
            try:
                with pytest.raises(KernelsError, match="not a plan"):
                    kernels.find(Graph)
            finally:
                saved.identity = before


def test_a_model_of_other_sizes(copied, capsys, tmp_path):
    reseal(copied, model={"blocks": 12})
    use(StandIn())
    model = tiny.write_checkpoint(tmp_path / "model")
    assert main(["generate", PROMPT, "--gpu", "--fused", "--kernels", str(copied), "--model",
                 str(model)]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "its kernels are for model {'blocks': 12}, expected {'blocks': 2" in told


def test_a_chip_that_the_device_is_too_old_for(fused, model, capsys):
    use(StandIn(capability=(7, 5)))
    from tinymlir import fused as module
    module.compiled("gpu", None, "float32").cache_clear()
    assert main(["generate", PROMPT, "--gpu", "--fused", "--kernels", str(fused), "--model",
                 str(model), "--tokens", "1"]) == 1
    assert "the kernels are for sm_80, and stand-in is sm_75" in capsys.readouterr().err


# ---------------------------------------------------------------- writing

def test_a_folder_of_something_else_is_not_touched(tmp_path, model, capsys):
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.json").write_text("{}")
    assert main(["compile", "--gpu", "--out", str(folder), "--model", str(model), "--fused",
                 "--lengths", "4"]) == 1
    assert [path.name for path in folder.iterdir()] == ["thesis.json"]
    assert "expected a folder of kernels" in capsys.readouterr().err


def test_a_folder_of_kernels_is_written_again(copied):
    write_kernels(copied, "sm_90", {"abc": ("f(x)", "{}")}, fused=False, model=None)
    assert sorted(path.name for path in copied.iterdir()) == ["abc.json", "manifest.json"]
    assert read_kernels(copied).manifest["chip"] == "sm_90"


@pytest.mark.parametrize("words", [
    ["--lengths", "0-3"], ["--lengths", "9-3"], ["--lengths", "x"], ["--lengths", ""],
    ["--tokens", "0"]])
def test_lengths_that_are_none(words, tmp_path):
    with pytest.raises(SystemExit) as told:
        main(["compile", "--gpu", "--out", str(tmp_path), *words])
    assert told.value.code == 2


def test_a_chip_that_llvm_does_not_know(tmp_path, model, capsys):
    assert main(["compile", "--gpu", "--chip", "sm_12", "--out", str(tmp_path / "k"), "--model",
                 str(model)]) == 1
    assert "chip 'sm_12' is not supported" in capsys.readouterr().err
    assert not (tmp_path / "k").exists()


def test_compiling_leaves_nothing_behind(fused):
    assert (settings.pretend, settings.find, settings.chip) == (None, None, "")


def test_nothing_in_a_manifest_depends_on_the_machine(fused):
    text = "".join(path.read_text() for path in fused.iterdir())
    assert os.path.expanduser("~") not in text and "/work" not in text
    numbers = np.array(json.loads((fused / "manifest.json").read_text())["lengths"])
    assert numbers.tolist() == [5, 6, 7, 8]


# ---------------------------------------------------------------- what is not ours

def test_other_files_in_the_folder_stay(copied, model):
    """The folder of the checkpoint is a natural place; its JSON files are not plans."""
    for name in ("config.json", "tokenizer.json"):
        (copied / name).write_bytes((model / name).read_bytes())
    before = {path.name for path in copied.iterdir()}
    compiled(copied, model, "--fused", "--lengths", "3")
    after = {path.name for path in copied.iterdir()}
    assert {"config.json", "tokenizer.json", "manifest.json"} <= after
    assert {f"{name}.json" for name in read_kernels(copied).manifest["plans"]} <= after
    assert len(after & before) == 3  # the plans of before have gone


def test_kernels_in_float32_are_another_purpose(tmp_path, model):
    folder = compiled(tmp_path / "k", model, "--fused", "--lengths", "5", "--dtype", "float32")
    assert read_kernels(folder).manifest["dtype"] == "float32"
    with pytest.raises(KernelsError, match="dtype"):
        read_kernels(folder).check(dtype=None)


@pytest.mark.parametrize("words", [["--kernels", "k"], ["--lengths", "1-99999999999"]])
def test_what_compile_does_not_do_is_a_usage_error(tmp_path, model, words):
    with pytest.raises(SystemExit, match="2"):
        compiled(tmp_path / "k", model, *words)
