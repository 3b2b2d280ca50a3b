"""The command: what goes to standard output, what to standard error, and the exit status."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

import tinymlir
from tinymlir import generate, load_model
from tinymlir.checkpoint import BUNDLED
from tinymlir.cli import main
from tinymlir.model import generate_ids
from tinymlir.ops import EXAMPLES

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "tinymlir"]
STAGES = ["graph", "linalg", "fused", "bufferized", "lowered", "llvm"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


def environment(**changes):
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **changes}


def run(*words, command=COMMAND, **options):
    """A real process; text in and out."""
    options.setdefault("env", environment())
    return subprocess.run([*command, *map(os.fspath, words)], capture_output=True,
                          encoding="utf-8", timeout=120, **options)


def expected(folder, prompt, tokens):
    return generate(*load_model(folder), prompt, tokens)


# ---------------------------------------------------------------- generate

def test_text_alone_on_standard_output(folder):
    done = run("generate", "Grüße", "--tokens", "7", "--model", folder)
    assert done.stdout == expected(folder, "Grüße", 7) + "\n"
    assert done.stderr == f"model: {folder}\n"
    assert done.returncode == 0


def test_ten_tokens_by_default(folder, capsys):
    assert main(["generate", "abc", "--model", str(folder)]) == 0
    assert capsys.readouterr().out == expected(folder, "abc", 10) + "\n"


def test_no_tokens(folder, capsys):
    assert main(["generate", "abc", "--tokens", "0", "--model", str(folder)]) == 0
    assert capsys.readouterr().out == "\n"


def test_model_in_the_current_folder(tmp_path, monkeypatch, capsys):
    tiny.write_checkpoint(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "abc", "--tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == expected(tmp_path / "model", "abc", 3) + "\n" and err == "model: ./model\n"


def test_bundled_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "Once upon a time", "--tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == expected(BUNDLED, "Once upon a time", 3) + "\n"
    assert err == "model: the bundled one (tales)\n"


def test_half_a_model_in_the_current_folder_is_none(tmp_path, monkeypatch, capsys):
    tiny.write_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "Once", "--tokens", "1"]) == 0
    assert "bundled" in capsys.readouterr().err


def test_stop(folder, capsys, monkeypatch):
    """The weights are such that the first token ends the text."""
    words = tiny.make_tensors()["wte.weight"]
    words[tiny.END] = 0
    tensors = {"wte.weight": words, "ln_f.weight": words[0], "ln_f.bias": words[0]}
    ends = folder.parent / "ends"
    tiny.write_weights(tiny.write_checkpoint(ends), **tensors)  # all logits equal
    ask = ["generate", "abc", "--tokens", "3", "--model", str(ends)]
    assert main(ask) == 0 and capsys.readouterr().out == "<|endoftext|>" * 3 + "\n"
    assert main([*ask, "--stop"]) == 0 and capsys.readouterr().out == "\n"


def test_dice(folder, capsys):
    def text(*words):
        assert main(["generate", "abc", "--tokens", "8", "--model", str(folder), *words]) == 0
        return capsys.readouterr().out

    hot = ["--temperature", "2"]
    assert text(*hot) == text(*hot, "--seed", "0") != text(*hot, "--seed", "1")
    assert text(*hot, "--top-k", "1") == text() == text("--temperature", "1e-9")


@pytest.mark.parametrize(("words", "told"), [
    (["", "--tokens", "1"], ["empty"]),
    (["abc", "--tokens", "22"], ["3", "22", "24"]),
    (["a" * 25], ["25", "10", "24"]),
])
def test_refused_in_one_line(folder, capsys, words, told):
    assert main(["generate", *words, "--model", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 2 and all(word in err for word in told)
    assert err.splitlines()[1].startswith("error: ")


def test_refused_in_a_process(tmp_path):
    done = run("generate", "abc", "--model", tmp_path / "nowhere")
    assert done.returncode == 1 and done.stdout == ""
    assert "Traceback" not in done.stderr and "config.json" in done.stderr.splitlines()[-1]


def test_one_line_whatever_is_named(tmp_path, capsys):
    assert main(["generate", "abc", "--model", str(tmp_path / "two\nlines")]) == 1
    assert "two lines" in capsys.readouterr().err.splitlines()[-1]


def test_prompt_that_is_no_text(folder):
    done = run("generate", b"\xff\xfe", "--model", folder, env=environment(LC_ALL="C.UTF-8"))
    assert done.returncode == 1 and "Traceback" not in done.stderr and "UTF-8" in done.stderr


def test_terminal_without_the_letters(folder):
    text = expected(folder, "abc", 12)
    assert not text.isascii()
    done = run("generate", "abc", "--tokens", "12", "--model", folder,
               env=environment(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0
    assert done.stdout.strip("\n") == text.encode("ascii", "replace").decode().strip("\n")


def test_reader_that_goes_away(folder):
    process = subprocess.Popen(
        [*COMMAND, "generate", "abc", "--tokens", "20", "--model", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    process.stdout.close()
    assert process.stderr.read() == f"model: {folder}\n"
    assert process.wait(60) == 141


def test_reader_of_emit_that_goes_away():
    process = subprocess.Popen([*COMMAND, "emit", "gelu"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=environment())
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 141


def test_interrupt(tmp_path):
    """Control-C while it waits, here for weights that never come."""
    folder = tiny.write_checkpoint(tmp_path / "checkpoint")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "pipe")
    code = ("import pathlib, sys, tinymlir.cli, tinymlir.model as m\n"
            "m.load_model = lambda d, **o: pathlib.Path(d, 'pipe').read_bytes()\n"
            "sys.exit(tinymlir.cli.main(sys.argv[1:]))")
    process = subprocess.Popen(
        [sys.executable, "-c", code, "generate", "abc", "--model", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # not inherited
    assert process.stderr.readline() == f"model: {folder}\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_script_of_the_tutorial(folder):
    done = run("abc", "--tokens", "4", "--model", folder,
               command=[sys.executable, ROOT / "example.py"])
    assert (done.returncode, done.stdout) == (0, expected(folder, "abc", 4) + "\n")


# ---------------------------------------------------------------- usage

def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"tinymlir {tinymlir.__version__}\n")


@pytest.mark.parametrize("words", [
    [], ["paint"], ["generate"], ["generate", "a", "b"], ["emit"], ["emit", "paint"],
    ["emit", "gelu", "--stage", "paint"], ["emit", "gelu", "--diff", "graph", "paint"],
    ["emit", "gelu", "--diff", "graph"], ["generate", "a", "--tokens", "-1"],
    ["generate", "a", "--tokens", "1.5"], ["generate", "a", "--temperature", "0"],
    ["generate", "a", "--temperature", "nan"], ["generate", "a", "--temperature", "inf"],
    ["generate", "a", "--temperature", "1", "--top-k", "0"],
    ["generate", "a", "--temperature", "1", "--seed", "-1"],
    ["generate", "a", "--top-k", "3"], ["generate", "a", "--seed", "3"],
    ["generate", "a", "--kernels", "k"], ["fetch", "a", "b"], ["--stop"],
    ["generate", "a", "--precision", "tf32"], ["verify", "--precision", "tf32"],
    ["generate", "a", "--gpu", "--precision", "half"], ["emit", "gelu", "--precision", "tf32"],
    ["compile", "--out", "k", "--precision", "tf32"]])
def test_usage(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and "usage: tinymlir" in err


HEAVY = ["numpy", "mlir", "safetensors", "tokenizers", "huggingface_hub", "tqdm"]


@pytest.mark.parametrize("code", [
    "import tinymlir",
    "import tinymlir.cli; tinymlir.cli.make_parser().format_help()",
    "import tinymlir.cli as c, contextlib\nwith contextlib.suppress(SystemExit):\n"
    "    c.main(['generate', '--help'])"])
def test_help_imports_nothing_heavy(code):
    code = f"{code}\nimport sys\nprint([m for m in {HEAVY} if m in sys.modules])"
    done = run("-c", code, command=[sys.executable])
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and all(word in out for word in ("generate", "emit", "fetch"))


# ---------------------------------------------------------------- emit

def test_list(capsys):
    assert main(["emit", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXAMPLES)
    assert all(len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_has_a_graph(name, capsys):
    assert main(["emit", name]) == 0
    assert capsys.readouterr().out.startswith(f"graph {name}(")


def test_every_stage(capsys):
    assert main(["emit", "gelu", "--stage", "all"]) == 0
    out = capsys.readouterr().out
    heads = [line.removeprefix("==== ") for line in out.splitlines() if line[:5] == "==== "]
    assert [head for head in heads if head in STAGES] == STAGES
    assert main(["emit", "gelu", "--stage", "fused"]) == 0
    fused = capsys.readouterr().out.strip()
    assert fused and f"==== fused\n{fused}\n" in out


def test_diff(capsys):
    assert main(["emit", "gelu", "--diff", "linalg", "fused"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("@@") and {line[0] for line in lines} >= {"-", "+"}
    assert main(["emit", "gelu", "--diff", "fused", "fused"]) == 0
    assert capsys.readouterr().out == "(no change)\n"


def test_precision(capsys):
    """Tensor cores only if asked for, and only on chips that have them."""
    words = ["emit", "linear", "--gpu", "--chip", "sm_90", "--stage", "ptx"]
    for more, used in (([], False), (["--precision", "float32"], False),
                       (["--precision", "tf32"], True)):
        assert main([*words, *more]) == 0
        assert ("mma.sync" in capsys.readouterr().out) == used
    words[words.index("sm_90")] = "sm_75"
    assert main([*words, "--precision", "tf32"]) == 1
    assert capsys.readouterr().err == (
        "error: precision 'tf32' needs a chip of sm_80 or later, not sm_75\n")


def test_types_of_the_examples():
    """NumPy's: the strong numbers are in gelu and in attention, and nowhere else."""
    dtypes = {name: str(e.function(*e.arrays, **e.static).dtype)
              for name, e in EXAMPLES.items()}
    wide = [name for name, dtype in dtypes.items() if dtype == "float64"]
    assert wide == ["gelu", "attention", "feed_forward", "attention_sublayer",
                    "feed_forward_sublayer"]
    assert {dtypes[name] for name in dtypes if name not in wide} == {"float32"}


def test_command_and_library_agree(folder):
    model, tokenizer = load_model(folder)
    ids = tokenizer.encode("xyz").ids
    assert expected(folder, "xyz", 5) == tokenizer.decode(
        generate_ids(model, ids, 5), skip_special_tokens=False)
