"""Parity with a reference: the report, the search for the culprit, and other references."""
import ast
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import tiny
from mlir.dialects import arith, math

from tinymlir import errors, fused, jit, load_model, upstream, verify
from tinymlir.blame import Case, blame, first_wrong
from tinymlir.cli import main
from tinymlir.expr import Op
from tinymlir.fused import last_logits
from tinymlir.model import COMPILED, PLAIN, generate_ids
from tinymlir.scalars import SCALAR, like
from tinymlir.upstream import Upstream, UpstreamError
from tinymlir.verify import KNOWN, ByNumPy, Known, Step, Text, choose_prompt, compare, table

ROOT, GIT = Path(__file__).parents[1], shutil.which("git")
PROMPT = "abc"
NAMES = ["embedding", *(f"block {i} {half}" for i in range(tiny.BLOCKS)
                        for half in ("attention", "feed-forward")), "logits", "token"]
both = pytest.mark.parametrize("kind", ["sublayers", "fused"])


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def models(folder):
    return {kind: load_model(folder, fused=kind == "fused") for kind in ("sublayers", "fused")}


@pytest.fixture
def model(models):
    return models["sublayers"][0]


@pytest.fixture
def tokenizer(models):
    return models["sublayers"][1]


def run_command(capsys, *words):
    """Exit status, output and last line of the errors of `tinymlir verify`."""
    status = main(["verify", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err.splitlines()[-1]


# ---------------------------------------------------------------- two arrays

ONE = np.array([1.0, 2.0])


@pytest.mark.parametrize(("ours", "want", "ok"), [
    (ONE, ONE, True),
    (ONE + 5e-4, ONE, True),
    (ONE + 7e-4, ONE, False),  # too much for the first element
    (ONE.astype(np.float32), ONE, False),
    (ONE[:1], ONE, False),
    (ONE[None], ONE, False),
    (np.array([1, np.nan]), ONE, False),
    (np.array([1, np.nan]), np.array([1, np.nan]), False),
    (ONE, np.array([1, np.nan]), False),
    (np.array([1, np.inf]), ONE, False),
    (ONE, np.array([1, np.inf]), False),
    (np.array([1, -np.inf]), np.array([1, np.inf]), False),
    (np.array([1, np.inf]), np.array([1, np.inf]), True),
    (np.zeros(2), np.array([0.0, -0.0]), True),
    (np.zeros(2), np.array([0.0, 2.9e-4]), True),
])
def test_compare(ours, want, ok):
    row = compare("x", 3, ours, want)
    assert (row.name, row.step, row.ok) == ("x", 3, ok)
    assert row.largest >= 0 and row.ulps >= 0
    if ours.shape == want.shape and ours.dtype == want.dtype:
        assert row.note == "" and (ok or row.largest > 3e-4)
    else:
        assert row.note == f"got {ours.dtype} {ours.shape}"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ulps(dtype):
    one = np.ones(3, dtype)
    row = compare("x", 1, np.nextafter(np.nextafter(one, dtype(2)), dtype(2)), one)
    assert row.ulps == 2 and row.largest == 2 * np.finfo(dtype).eps


def test_token_ids_have_no_tolerance():
    row = compare("token", 1, np.array(50000), np.array(50001), 0)
    assert not row.ok and row.largest == 1


# ---------------------------------------------------------------- the report

@both
def test_report(models, kind):
    model, tokenizer = models[kind]
    report = verify.verify(model, tokenizer, PROMPT, 3)
    assert [row.name for row in report.rows] == NAMES
    assert report.ok and report.first is None and all(row.ok for row in report.rows)
    assert report.rows[0].dtype == np.float32 and report.rows[0].largest == 0
    assert {str(row.dtype) for row in report.rows[1:-1]} == {"float64"}
    assert [row.shape for row in report.rows[:-2]] == [(5, tiny.WIDTH)] * (len(NAMES) - 2)
    assert report.rows[-2].shape == (1, tiny.VOCABULARY)
    assert report.worst.largest == max(row.largest for row in report.rows) < 1e-4
    ids = generate_ids(model, tokenizer.encode(PROMPT).ids, 3)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert report.texts == (Text("tinymlir", ids, text), Text("the reference", ids, text))
    assert blame(model, report) == "no residual is wrong"


def test_table_lines_up(models):
    report = verify.verify(*models["fused"], PROMPT, 2)
    lines = table(report).splitlines()
    assert [line[:20].strip() for line in lines[1:]] == NAMES
    assert lines[0].split() == ["tensor", "dtype", "shape", "max", "abs", "max", "ulp"]
    assert all(line.endswith("  OK") for line in lines[1:])
    assert len({line.index("OK") for line in lines[1:]}) == 1


def test_numpy_agrees_with_itself(model, tokenizer):
    report = verify.verify(replace(model, run=PLAIN), tokenizer, PROMPT, 2)
    assert report.ok and report.worst.largest < 1e-5


@both
def test_command(models, folder, kind, capsys):
    words = ["--model", folder, "--prompt", PROMPT, "--tokens", "2", "--fused"]
    status, out, err = run_command(capsys, *words[:6 + (kind == "fused")])
    lines = out.splitlines()
    assert (status, err, lines[-1]) == (0, f"model: {folder}", "OK")
    assert [line[:20].strip() for line in lines[1:1 + len(NAMES)]] == NAMES
    assert "reference: tinymlir.reference, run by NumPy" in lines
    ids = generate_ids(models[kind][0], models[kind][1].encode(PROMPT).ids, 2)
    assert f"tokens: {ids}" in lines


def test_script_of_the_tutorial(folder):
    done = subprocess.run(
        [sys.executable, ROOT / "verify.py", "--model", folder, "--fused", "--prompt", PROMPT,
         "--tokens", "1"], capture_output=True, encoding="utf-8", timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])})
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "OK"), done.stderr


@pytest.mark.parametrize(("words", "told"), [
    (["--prompt", ""], "empty"),
    (["--prompt", "abc", "--tokens", "22"], "do not fit a context of 24"),
    (["--prompt", "abc", "--reference", "nowhere"], "nowhere: expected a checkout"),
])
def test_refused_in_one_line(folder, capsys, words, told):
    status, out, err = run_command(capsys, "--model", folder, *words)
    assert (status, out) == (1, "") and err.startswith("error: ") and told in err


@pytest.mark.parametrize("words", [["--tokens", "0"], ["abc"], ["--kernels", "k"], ["--reference"]])
def test_usage(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["verify", *words])
    assert caught.value.code == 2 and "usage: tinymlir" in capsys.readouterr().err


def test_no_steps(model, tokenizer):
    with pytest.raises(errors.GenerationError, match="tokens: expected 1 or more, got 0"):
        verify.verify(model, tokenizer, PROMPT, 0)


# ---------------------------------------------------------------- other numbers, same code

@dataclass
class Changed:
    """NumPy's steps, each passed through a function."""

    inner: ByNumPy
    change: object
    about: str = "a changed reference"

    def __call__(self, prompt, ids, tokens):
        return map(self.change, self.inner(prompt, ids, tokens))


def changed(model, tokenizer, change, tokens=2):
    reference = Changed(ByNumPy(model.params, model.config.heads), change)
    return verify.verify(model, tokenizer, PROMPT, tokens, reference)


def test_another_dtype(model, tokenizer):
    def narrow(step):
        x = step.residuals["block 1 attention"].astype(np.float32)
        return step._replace(residuals={**step.residuals, "block 1 attention": x})

    report = changed(model, tokenizer, narrow, 1)
    assert [row.name for row in report.rows if not row.ok] == ["block 1 attention"]
    assert report.first[:2] == ("block 1 attention", 1)
    assert table(report).splitlines()[4].endswith(f"NOT OK got float64 (3, {tiny.WIDTH})")


def test_another_token(model, tokenizer):
    report = changed(model, tokenizer, lambda s: s._replace(token=s.token + 1), 1)
    assert [row.name for row in report.rows if not row.ok] == ["token"]
    ours, theirs = report.texts
    assert theirs.tokens == [ours.tokens[0] + 1]
    assert f"but the reference has {theirs.tokens}" in verify.summary(report)
    assert not report.ok and "none; the best logits" in blame(model, report)


def test_another_text(model, tokenizer):
    report = changed(model, tokenizer, lambda step: step._replace(text="no"))
    assert not report.ok and all(row.ok for row in report.rows)
    assert verify.summary(report).endswith("'no'")


@both
def test_other_weights(models, kind):
    """Nothing is wrong with any operation, and that is what is said."""
    model, tokenizer = models[kind]
    norm = model.params.norm._replace(gain=model.params.norm.gain * np.float32(1.1))
    report = verify.verify(model, tokenizer, PROMPT, 1, ByNumPy(
        model.params._replace(norm=norm), model.config.heads))
    assert report.first.name == "logits" and not report.ok
    assert "first wrong: logits, step 1\nfirst wrong operation: none" in blame(model, report)


def test_plain_functions_have_no_code_to_blame(model, tokenizer):
    plain = replace(model, run=PLAIN)
    report = changed(plain, tokenizer, lambda step: Step(
        {name: x + 1 for name, x in step.residuals.items()}, step.token), 1)
    assert report.first.name == "embedding"
    assert "none; each one does what NumPy does" in blame(plain, report)


# ---------------------------------------------------------------- a wrong compiler

@pytest.fixture
def plant(monkeypatch):
    """Make the lowering of one operation wrong, and compile everything anew."""
    def forget():
        for function in (*COMPILED, last_logits):
            function.cache_clear()

    def break_(op, function):
        monkeypatch.setenv("TINYMLIR_CACHE", "off")
        monkeypatch.setitem(SCALAR, (op, "f"), function)
        forget()

    yield break_
    monkeypatch.undo()
    forget()


def scaled(function, factor):
    return lambda x: function(arith.mulf(x, like(x, factor)))


WRONG = {
    Op.TANH: (scaled(math.tanh, 1.01), "feed-forward", "np.tanh"),
    Op.EXP: (scaled(math.exp, 1.01), "attention", "np.exp"),
    Op.SQRT: (scaled(math.sqrt, 1.01), "attention", "np.sqrt"),
}


@both
@pytest.mark.parametrize("op", WRONG, ids=str)
def test_the_operation_is_named(models, folder, kind, op, plant, capsys):
    function, half, source = WRONG[op]
    plant(op, function)
    words = ["--model", folder, "--prompt", PROMPT, "--tokens", "2", "--fused"]
    status, out, _ = run_command(capsys, *words[:6 + (kind == "fused")])
    lines = out.splitlines()
    assert (status, lines[-1]) == (1, "NOT OK")
    assert f"first wrong: block 0 {half}, step 1" in lines
    told = next(line for line in lines if line.startswith("first wrong operation"))
    file = {"sublayers": "ops.py", "fused": "reference.py"}[kind]
    assert told.startswith(f"first wrong operation: {op}: f") and source in told
    line = int(told.partition(f"{file}, line ")[2].partition(",")[0])
    text = (ROOT / "src/tinymlir" / file).read_text().splitlines()[line - 1]
    assert source in text and told.endswith(f"in `{text.strip()}`")
    assert "block 0 attention" in out and out.count("NOT OK") > 2


def test_after_the_repair_all_is_well(models):
    assert verify.verify(*models["sublayers"], PROMPT, 1).ok


def test_inside_a_call(plant):
    """The operation is in a body that three calls share."""
    def tower(x, weights):
        for w in weights:
            x = np.log(np.abs(x @ w) + 2.0)
        return x, x.sum()

    plant(Op.LOG, scaled(math.log, 1.001))
    rng = np.random.default_rng(0)
    x, weights = rng.random((3, 4)), [rng.random((4, 4)) for _ in range(4)]
    graph = jit(tower).compile(x, weights).graph
    assert any(node.op is Op.CALL for node in graph.nodes)
    for wrong in graph.outputs:
        node = first_wrong(Case(graph, [x, *weights], wrong))
        assert node.op is Op.LOG and "np.log" in node.source.code()
        assert id(node) not in map(id, graph.nodes)  # it is the body's


def test_rounding_inside_a_call_is_no_error():
    """Single precision in the body, double precision outside."""
    def tower(x, weights):
        for w in weights:
            x = np.sqrt(np.abs(x.astype(np.float32) @ w)).astype(np.float64) * 3
        return x

    rng = np.random.default_rng(0)
    x, weights = rng.random((3, 40)), [rng.random((40, 40)).astype(np.float32) for _ in range(4)]
    graph = jit(tower).compile(x, weights).graph
    assert any(node.op is Op.CALL for node in graph.nodes)
    assert first_wrong(Case(graph, [x, *weights], graph.outputs[0])) is None


def test_what_is_right_is_not_searched(plant):
    def twice(x):
        y = np.log(x)
        return y, y * 2.0

    plant(Op.LOG, scaled(math.log, 1.001))
    x = np.random.default_rng(0).random((3, 4))
    graph = jit(twice).compile(x).graph
    log, double = graph.outputs
    assert first_wrong(Case(graph, [x], double)) is log
    case = Case(graph, [x], double, (log,))
    assert [node.op for node in case.suspects()] == [Op.MUL] and first_wrong(case) is None


# ---------------------------------------------------------------- the known text

def test_what_the_tutorial_says():
    known, = KNOWN
    assert known.prompt == "Alan Turing theorized that computers would one day become"
    assert known.text.tokens == [262, 749, 3665, 8217, 319, 262, 5440, 13, 198, 198]
    assert known.text.text == " the most powerful machines on the planet.\n\n"


@pytest.fixture
def famous(folder, models, monkeypatch):
    """The tiny checkpoint as one whose text is known."""
    model, tokenizer = models["fused"]
    ids = generate_ids(model, tokenizer.encode(PROMPT).ids, 2)
    text = Text("the tutorial", ids, tokenizer.decode(ids, skip_special_tokens=False))
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    known = [Known(digest, PROMPT, text)]
    monkeypatch.setattr(verify, "KNOWN", known)
    return known


def test_known_checkpoint(famous, folder, tmp_path):
    text = famous[0].text
    assert choose_prompt(folder, None, 2) == (PROMPT, text) == choose_prompt(folder, PROMPT, 2)
    assert choose_prompt(folder, None, 3) == (PROMPT, None)
    assert choose_prompt(folder, "x", 2) == ("x", None)
    other = tiny.write_checkpoint(tmp_path)
    tiny.write_weights(other, **{"wpe.weight": np.zeros((tiny.CONTEXT, tiny.WIDTH), "f4")})
    assert choose_prompt(other, None, 2) == (verify.TALE, None)


def test_known_text_comes_out(famous, folder, capsys):
    assert run_command(capsys, "--model", folder, "--tokens", "2", "--fused")[0] == 0
    wrong = famous[0].text._replace(tokens=[1, 2])
    famous[0] = famous[0]._replace(text=wrong)
    status, out, _ = run_command(capsys, "--model", folder, "--tokens", "2", "--fused")
    assert status == 1 and "but the tutorial has [1, 2]" in out
    assert out.endswith("no residual is wrong\nNOT OK\n")


# ---------------------------------------------------------------- somebody else's reference

# A package with the layout of sdiehl/tiny-gpt2, as far as our runner touches it.
STANDIN = {
    "pyproject.toml": "[project]\nname = 'standin'\nversion = '0'\n",
    "tinygpt2/__init__.py": "",
    "tinygpt2/gpt2_tensors.py": """
        from dataclasses import make_dataclass
        LayerNormParams = make_dataclass("LayerNormParams", ["g", "b"])
        LinearParams = make_dataclass("LinearParams", ["w", "b"])
        MLPParams = make_dataclass("MLPParams", ["c_fc", "c_proj"])
        AttentionParams = make_dataclass("AttentionParams", ["c_attn", "c_proj"])
        TransformerBlockParams = make_dataclass(
            "TransformerBlockParams", ["ln_1", "ln_2", "mlp", "attn"])
        ModelParams = make_dataclass("ModelParams", ["wte", "wpe", "blocks", "ln_f"])
        """,
    "tinygpt2/gpt2_ops.py": """
        import numpy as np

        def layer_norm(x, g, b, eps=1e-5):
            centred = x - x.mean(axis=-1, keepdims=True)
            return g * centred / np.sqrt(x.var(axis=-1, keepdims=True) + eps) + b

        def ffn(x, up_w, up_b, down_w, down_b):
            h = x @ up_w + up_b
            bent = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
            return bent @ down_w + down_b

        def head(q, k, v):
            scores = q @ k.T / np.sqrt(q.shape[-1])
            scores = np.where(np.tri(len(q), dtype=bool), scores, -1e10)
            odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
            return odds / odds.sum(axis=-1, keepdims=True) @ v

        def mha(x, c_attn, c_proj, n_head):
            qkv = np.split(x @ c_attn.w + c_attn.b, 3, axis=-1)
            parts = zip(*(np.split(part, n_head, axis=-1) for part in qkv))
            mixed = np.concatenate([head(*part) for part in parts], axis=-1)
            return mixed @ c_proj.w + c_proj.b
        """,
    "tinygpt2/gpt2_minimal.py": """
        from tinygpt2 import gpt2_ops as ops

        def gpt2(inputs, params, n_head):
            x = params.wte[inputs] + params.wpe[:len(inputs)]
            for b in params.blocks:
                x = x + ops.mha(ops.layer_norm(x, b.ln_1.g, b.ln_1.b), b.attn.c_attn,
                                b.attn.c_proj, n_head)
                x = x + ops.ffn(ops.layer_norm(x, b.ln_2.g, b.ln_2.b), b.mlp.c_fc.w,
                                b.mlp.c_fc.b, b.mlp.c_proj.w, b.mlp.c_proj.b)
            return ops.layer_norm(x, params.ln_f.g, params.ln_f.b) @ params.wte.T
        """,
    "tinygpt2/gpt2_run.py": """
        from tinygpt2 import gpt2_minimal

        def gpt2(inputs, params, n_head):
            assert len(params.blocks) == 12
            return gpt2_minimal.gpt2(inputs, params, n_head)
        """,
}


def script(path, text):
    """An executable of /bin/sh."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A stand-in whose environment is there already; no uv, wherever one might be."""
    place = tmp_path / "standin"
    for name, text in STANDIN.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(dedent(text))
    script(place / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
    monkeypatch.setattr(upstream.shutil, "which", lambda name, path=None: None)
    return place


def edit(checkout, name, old, new):
    path = checkout / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def asked(folder, checkout, *words):
    return ["--model", folder, "--prompt", PROMPT, "--tokens", "2", "--reference", checkout,
            *words]


def files(place):
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


@both
def test_outside_reference(folder, checkout, kind, capsys):
    before = files(checkout)
    words = ["--fused"] if kind == "fused" else []
    status, out, _ = run_command(capsys, *asked(folder, checkout, *words))
    lines = out.splitlines()
    assert (status, lines[-1]) == (0, "OK")
    assert [line[:20].strip() for line in lines[1:1 + len(NAMES)]] == NAMES
    assert (f"reference: tinygpt2.gpt2_ops of {checkout}, whose gpt2_minimal.gpt2 agrees "
            f"with it") in lines
    assert files(checkout) == before


def test_twelve_blocks(checkout, tmp_path, monkeypatch, capsys):
    """Then it is the function with the blocks written out that is checked."""
    monkeypatch.setattr(tiny, "BLOCKS", 12)
    folder = tiny.write_checkpoint(tmp_path / "twelve")
    tiny.write_config(folder, n_layer=12)
    status, out, _ = run_command(capsys, *asked(folder, checkout, "--fused"))
    assert status == 0 and "whose gpt2_run.gpt2 agrees" in out


def test_its_own_tokenizer(models, folder, checkout, monkeypatch):
    """Its tokens of the prompt, and its text, have to be ours."""
    model, tokenizer = models["fused"]
    (checkout / "model").mkdir()
    (checkout / "model/encoder.json").write_text("{}")
    (checkout / "tinygpt2/encoder.py").write_text(dedent("""
        from pathlib import Path

        class Encoder:
            def encode(self, text):
                return [IDS]

            def decode(self, ids):
                return " ".join(map(str, ids))

        def get_encoder(name, folder):
            assert (Path(folder) / name / "encoder.json").exists()
            return Encoder()
        """).replace("IDS", ", ".join(map(str, tokenizer.encode(PROMPT).ids))))
    runner = checkout / "upstream_runner.py"
    source = Path(upstream.__file__).with_name("upstream_runner.py").read_text()
    runner.write_text(source.replace("50257", str(tiny.VOCABULARY)))
    monkeypatch.setattr(upstream, "__file__", str(checkout / "upstream.py"))
    reference = Upstream(checkout, folder, model.config, model.params)
    report = verify.verify(model, tokenizer, PROMPT, 2, reference)
    assert report.texts[1].text == " ".join(map(str, report.texts[0].tokens))
    with pytest.raises(UpstreamError, match="its tokens of the prompt are"):
        verify.verify(model, tokenizer, "xyz", 2, reference)


def test_a_reference_that_computes_something_else(folder, checkout, capsys):
    edit(checkout, "tinygpt2/gpt2_ops.py", "0.044715", "0.44715")
    status, out, _ = run_command(capsys, *asked(folder, checkout))
    assert status == 1 and "first wrong: block 0 feed-forward, step 1" in out
    assert "none; each one does what NumPy does" in out and out.endswith("NOT OK\n")


def test_a_whole_function_that_disagrees(folder, checkout, capsys):
    edit(checkout, "tinygpt2/gpt2_minimal.py", "@ params.wte.T", "@ params.wte.T * 2")
    status, out, err = run_command(capsys, *asked(folder, checkout))
    assert (status, out) == (1, "")
    assert "tinygpt2.gpt2_minimal.gpt2 has other logits than the residuals lead to" in err


@pytest.mark.parametrize("name", upstream.NEEDED)
def test_not_a_checkout(folder, checkout, name, capsys):
    (checkout / name).unlink()
    status, out, err = run_command(capsys, *asked(folder, checkout))
    assert (status, out) == (1, "") and f"{checkout}: expected a checkout" in err and name in err


def test_a_broken_environment(folder, checkout, capsys):
    script(checkout / ".venv/bin/python", "echo 'ImportError: no NumPy' >&2; exit 3")
    status, _, err = run_command(capsys, *asked(folder, checkout))
    assert status == 1 and f"{checkout}: the reference failed: ImportError: no NumPy" in err


def test_a_reference_that_raises(folder, checkout, capsys):
    edit(checkout, "tinygpt2/gpt2_ops.py", "import numpy as np", "import numpie")
    status, _, err = run_command(capsys, *asked(folder, checkout))
    assert status == 1 and "No module named 'numpie'" in err and err.count("error: ") == 1


def test_no_uv(folder, checkout, capsys):
    shutil.rmtree(checkout / ".venv")
    status, _, err = run_command(capsys, *asked(folder, checkout))
    assert status == 1 and "there is no uv to make one" in err


@pytest.fixture
def uv(tmp_path, monkeypatch):
    """A stand-in for uv, which notes how it was called."""
    def make(text):
        log = tmp_path / "uv.log"
        tool = script(tmp_path / "tools/uv", f'echo "$@" >> "{log}"\n{text}')
        monkeypatch.setattr(upstream.shutil, "which", lambda name, path=None: str(tool))
        return log
    return make


def test_uv_makes_the_environment(folder, checkout, uv, capsys):
    (checkout / "uv.lock").write_text("")
    moved = (checkout / ".venv").rename(checkout.parent / "made")
    log = uv(f'mv "{moved}" "$UV_PROJECT_ENVIRONMENT"')
    assert run_command(capsys, *asked(folder, checkout))[0] == 0
    words = log.read_text().split()
    assert words[0] == "sync" and {"--frozen", "--no-dev", "--inexact"} < set(words)
    assert words[words.index("--project") + 1] == str(checkout)


def test_an_environment_that_cannot_be_installed(folder, checkout, uv, capsys):
    uv("echo 'Resolving' >&2; echo 'error: Failed to fetch numpy' >&2\n"
       "echo '  cause: dns' >&2; exit 2")
    status, out, err = run_command(capsys, *asked(folder, checkout))
    assert (status, out) == (1, "")
    assert (f"{checkout}: its environment cannot be installed: Failed to fetch numpy cause: dns; "
            "check the network") in err


# ---------------------------------------------------------------- the same checkpoint?

def test_its_own_weights(folder, checkout, capsys):
    """Of the same shapes: they are used, so they have to be the same."""
    (checkout / "model").mkdir()
    shutil.copy(folder / "model.safetensors", checkout / "model")
    assert run_command(capsys, *asked(folder, checkout))[0] == 0
    bias = tiny.make_tensors()["h.1.mlp.c_fc.bias"]
    bias[3] = np.nextafter(bias[3], np.float32(9))  # one bit
    tiny.write_weights(checkout / "model", **{"h.1.mlp.c_fc.bias": bias})
    status, out, err = run_command(capsys, *asked(folder, checkout))
    assert (status, out) == (1, "") and "h.1.mlp.c_fc.bias: expected the numbers" in err
    assert f"{checkout}/model/model.safetensors" in err


def test_its_weights_are_of_another_model(folder, checkout, capsys):
    (checkout / "model").mkdir()
    tiny.write_weights(checkout / "model", **{"wpe.weight": np.zeros((3, tiny.WIDTH), "f4")})
    assert run_command(capsys, *asked(folder, checkout))[0] == 0


def test_its_weights_are_damaged(folder, checkout, capsys):
    (checkout / "model").mkdir()
    (checkout / "model/model.safetensors").write_bytes(b"no weights")
    status, _, err = run_command(capsys, *asked(folder, checkout))
    assert status == 1 and "expected a whole safetensors file" in err


def test_another_checkpoint_on_the_other_side(models, checkout, tmp_path):
    model, tokenizer = models["fused"]
    other = tiny.write_checkpoint(tmp_path / "other")
    tiny.write_weights(other, **{"ln_f.bias": np.zeros(tiny.WIDTH, "f4")})
    with pytest.raises(UpstreamError, match=r"other/model\.safetensors: ln_f\.bias: expected"):
        verify.verify(model, tokenizer, PROMPT, 1,
                      Upstream(checkout, other, model.config, model.params))


# ---------------------------------------------------------------- fetching it

@pytest.fixture
def repository(checkout, tmp_path, monkeypatch):
    """The stand-in as a Git repository, whose second commit is not the pinned one."""
    if not GIT:
        pytest.skip("needs git")
    (checkout / ".gitignore").write_text(".venv\n")

    def git(*words):
        return subprocess.run(
            ["git", "-C", checkout, "-c", "user.name=t", "-c", "user.email=t@example.org",
             *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    monkeypatch.setattr(upstream, "REVISION", git("rev-parse", "HEAD"))
    (checkout / "pyproject.toml").write_text("later")
    git("commit", "--quiet", "-am", "two")
    monkeypatch.setattr(upstream, "REPOSITORY", str(checkout))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return checkout


def test_fetched_once(folder, repository, uv, capsys):
    uv(f'cp -r "{repository}/.venv" "$UV_PROJECT_ENVIRONMENT"')
    words = ["--model", folder, "--prompt", PROMPT, "--tokens", "1", "--fetch-reference"]
    assert run_command(capsys, *words)[0] == 0
    place = upstream.fetch_checkout()
    assert place.name == upstream.REVISION
    assert (place / "pyproject.toml").read_text() == STANDIN["pyproject.toml"]
    shutil.rmtree(repository / ".git")
    assert run_command(capsys, *words)[0] == 0  # it is there already
    assert [p.name for p in place.parent.iterdir()] == [upstream.REVISION]


def test_no_such_revision(folder, repository, monkeypatch, capsys):
    monkeypatch.setattr(upstream, "REVISION", "f" * 40)
    status, _, err = run_command(capsys, "--model", folder, "--fetch-reference")
    assert status == 1 and "the reference cannot be fetched: fatal: " in err


def test_no_network(folder, repository, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(upstream, "REPOSITORY", str(tmp_path / "nowhere"))
    status, _, err = run_command(capsys, "--model", folder, "--fetch-reference")
    assert status == 1 and "git and the network are needed" in err
    assert not any((tmp_path / "cache/tinymlir-reference").iterdir())


def test_no_git(folder, repository, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    status, _, err = run_command(capsys, "--model", folder, "--fetch-reference")
    assert status == 1 and "'git'" in err and "git and the network are needed" in err


# ---------------------------------------------------------------- the other side's program

def test_the_runner_imports_nothing_of_ours():
    tree = ast.parse(Path(upstream.__file__).with_name("upstream_runner.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
             for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("tinymlir") for name in names)


def test_the_runner_alone(folder, checkout, tmp_path):
    """It is a program: a request in a folder, and the answer beside it."""
    request = {"weights": str(folder / "model.safetensors"), "blocks": tiny.BLOCKS,
               "heads": tiny.HEADS, "whole": "gpt2_minimal", "prompt": "", "ids": [1, 2],
               "tokenizer": str(checkout / "model"), "tokens": 2}
    (tmp_path / "request.json").write_text(json.dumps(request))
    runner = Path(upstream.__file__).with_name("upstream_runner.py")
    subprocess.run([sys.executable, runner, tmp_path], check=True, timeout=60,
                   env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"})
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert len(answer["tokens"]) == 2 and answer["texts"] == [None, None]
    assert set(answer["digests"]) == set(tiny.make_tensors())
    with np.load(tmp_path / "1.npz") as file:
        assert list(file) == NAMES[:-1] and file["embedding"].shape == (3, tiny.WIDTH)


def test_padding_is_not_compared(models):
    """Three tokens run as four; the residuals of the table are those of three."""
    model, tokenizer = models["fused"]
    assert len(fused.padded(np.arange(3), 24)) == 4
    assert verify.verify(model, tokenizer, PROMPT, 1).rows[0].shape == (3, tiny.WIDTH)


# ---------------------------------------------------------------- float32

@both
def test_float32_command(folder, kind, capsys):
    words = ["--model", folder, "--prompt", PROMPT, "--tokens", "2", "--dtype", "float32",
             "--fused"]
    status, out, err = run_command(capsys, *words[:8 + (kind == "fused")])
    rows = [line.split()[:2] for line in out.splitlines()[1:1 + len(NAMES)]]
    assert (status, out.splitlines()[-1]) == (0, "OK"), out
    assert {row[-1] for row in rows[:1]} == {"float32"} and "float64" not in out


def test_float32_and_somebody_elses_reference(folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--model", str(folder), "--dtype", "float32", "--reference", "x"])
    assert stop.value.code == 2 and "leave out --dtype" in capsys.readouterr().err
