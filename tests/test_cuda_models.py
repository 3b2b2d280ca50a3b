"""GPT-2 on the stand-in: the very PTX that a GPU would get, executed by NumPy."""
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tiny
from tinymlir import jit, ops
from tinymlir.cli import main
from tinymlir.cuda import settings
from tinymlir.devarray import DeviceArray, put
from tinymlir.device import device, use
from tinymlir.model import generate_ids, load_model
from tinymlir.standin import StandIn

ROOT = Path(__file__).parents[1]
IDS = [5, 9, 200, 17, 3, 250]
MODES = pytest.mark.parametrize("fused", [False, True], ids=["per sublayer", "fused"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def stand_in():
    api = StandIn(memory=1 << 28)
    use(api)
    yield api
    use()
    settings.find = None


# ---------------------------------------------------------------- the functions of chapter 5

@pytest.mark.parametrize("name", ops.EXAMPLES)
def test_every_function_of_chapter_5(name):
    function, arrays, static = ops.EXAMPLES[name]
    want, got = function(*arrays, **static), jit(function, target="gpu")(*arrays, **static)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_structures_and_empty_arrays_and_constants():
    mask = np.triu(np.ones((3, 3), np.float32))

    def f(x, pair):
        return {"a": x @ mask, "b": (pair[0] * 2, x[:0]), "c": pair[1] + 1}

    x, pair = np.arange(9, dtype=np.float32).reshape(3, 3), (np.arange(4), np.zeros((0, 2)))
    want, fast = f(x, pair), jit(f, target="gpu")
    for got in (fast(x, pair), fast(put(x), pair)):
        assert isinstance(got["a"], np.ndarray) != isinstance(got["a"], DeviceArray)
        for ours, theirs in ((got["a"], want["a"]), (got["b"][0], want["b"][0]),
                             (got["b"][1], want["b"][1]), (got["c"], want["c"])):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(np.asarray(ours), theirs)


def test_scalars_and_views_are_arguments():
    fast = jit(lambda a, b: a + b, target="gpu")
    x = np.arange(24.0).reshape(4, 6)
    for a, b in ((x.T, np.float64(3)), (x[::-1, ::2], np.array(2.0)), (x[:, 1:], x[:, :-1])):
        np.testing.assert_array_equal(fast(a, b), a + b)


def test_a_float32_option_holds_on_the_gpu():
    fast = jit(ops.gelu, target="gpu", dtype="float32")
    x = np.linspace(-4, 4, 50, dtype=np.float32)
    assert fast(x).dtype == np.float32
    np.testing.assert_allclose(fast(x), ops.gelu(x), rtol=1e-5, atol=1e-6)


def test_operations_that_have_no_kernel_are_written_with_others():
    from tinymlir.updates import attend, update
    buffer, rows = np.arange(18.0).reshape(6, 3), -np.ones((2, 3))
    fast = jit(update, target="gpu")
    for at in (0, 2, 4):
        want = buffer.copy()
        want[at:at + 2] = rows
        np.testing.assert_array_equal(fast(put(buffer), rows, np.array(at)).numpy(), want)
    for at in (-1, 5, 2**40):
        with pytest.raises(IndexError):
            fast(buffer, rows, np.array(at))
    x = np.random.default_rng(0).normal(size=(3, 1, 4)), *np.random.default_rng(1).normal(
        size=(2, 5, 12)), np.array(3)
    here, there = (jit(lambda q, k, v, at: attend(q, k, v, at, 2.0), target=target)
                   for target in ("cpu", "gpu"))
    np.testing.assert_allclose(there(*x), here(*x), rtol=1e-12)


def test_bound_arguments():
    x, w, b = np.arange(6.0).reshape(2, 3), np.ones((3, 4)), np.arange(4.0)
    fast = jit(lambda x, w, b: x @ w + b, target="gpu").compile(x, w, b).bind(w=put(w))
    result = fast(x, b)
    assert isinstance(result, DeviceArray)
    np.testing.assert_array_equal(result.numpy(), x @ w + b)
    np.testing.assert_array_equal(fast.bind(b=b)(x + 1).numpy(), (x + 1) @ w + b)


# ---------------------------------------------------------------- models

@MODES
def test_every_residual_is_that_of_the_processor(model, fused):
    here, _ = load_model(model, fused=fused)
    there, _ = load_model(model, target="gpu", fused=fused)
    want, got = {}, {}
    a, b = here(IDS, trace=want), there(IDS, trace=got)
    assert list(got) == list(want)
    for name in want:
        assert isinstance(got[name], np.ndarray)
        assert (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape)
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(there(IDS), b, rtol=1e-9)


@MODES
def test_the_same_text(model, fused):
    here, _ = load_model(model)
    there, _ = load_model(model, target="gpu", fused=fused)
    assert generate_ids(there, IDS, 3) == generate_ids(here, IDS, 3)


@MODES
def test_weights_go_there_once_and_only_logits_come_back(model, fused, stand_in):
    there, _ = load_model(model, target="gpu", fused=fused)
    there(IDS)
    there(IDS)
    before = dict(stand_in.calls)
    there(IDS)
    new = {name: n - before[name] for name, n in stand_in.calls.items()}
    assert new["cuMemcpyHtoDAsync"] <= 2  # ids, and which of them is the last
    assert new["cuMemcpyDtoHAsync"] <= 3  # logits, and what was gathered
    assert new["cuMemAlloc"] == new["cuModuleLoadDataEx"] == 0


def test_mapped_weights_of_the_host_are_uploaded_once(model, stand_in):
    from tinymlir.fused import FusedModel, compiled
    here, _ = load_model(model)
    there = FusedModel(here.config, here.params, compiled("gpu", None, "float32"))
    there(IDS)
    before = stand_in.calls["cuMemcpyHtoDAsync"]
    there(IDS)
    assert stand_in.calls["cuMemcpyHtoDAsync"] - before <= 2


def test_the_fused_model_is_one_cuda_graph(model, stand_in):
    with mock.patch("tinymlir.launcher.GRAPH_FROM", 4):
        from tinymlir import fused
        fused.compiled("gpu", None, "float32").cache_clear()
        here, _ = load_model(model)
        there, _ = load_model(model, target="gpu", fused=True)
        for shift in range(4):
            ids = [(i + shift) % 257 for i in IDS]
            np.testing.assert_allclose(there(ids), here(ids), rtol=2e-5, atol=2e-5)
        assert stand_in.calls["cuGraphLaunch"] == 3
        assert stand_in.calls["cuGraphInstantiate"] == 1
        fused.compiled("gpu", None, "float32").cache_clear()


def test_another_context_than_the_kernels_know_is_refused(model):
    there, _ = load_model(model, target="gpu")
    with pytest.raises(ValueError, match="do not fit a context"):
        there(list(range(25)))
    with pytest.raises(IndexError):
        there([257])


# ---------------------------------------------------------------- commands

def told(capsys, *words):
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


@MODES
def test_generate(model, capsys, fused):
    words = ["generate", "A tale", "--tokens", "2", "--model", model]
    more = ["--fused"] if fused else []
    assert told(capsys, *words, "--gpu", *more) == told(capsys, *words)


@MODES
def test_verify(model, capsys, fused):
    more = ["--fused"] if fused else []
    status, out, _ = told(capsys, "verify", "--gpu", "--prompt", "A tale", "--tokens", "1",
                          "--model", model, *more)
    assert status == 0 and out.endswith("\nOK\n") and "NOT OK" not in out


@MODES
def test_verify_finds_a_wrong_processor_and_names_the_operation(model, capsys, fused):
    """A stand-in whose divisions are a hundredth off: not a wrong program, a wrong GPU."""
    from tinymlir import ptxops
    right = ptxops.COMPUTE["div"]
    wrong = {"div": lambda a, b, name: right(a, b, name) * a.dtype.type(
        1 if ptxops.integer(name) else 1.01)}
    more = ["--fused"] if fused else []
    with mock.patch.dict(ptxops.COMPUTE, wrong):
        status, out, _ = told(capsys, "verify", "--gpu", "--prompt", "A tale", "--tokens", "1",
                              "--model", model, *more)
    assert status == 1 and out.endswith("\nNOT OK\n")
    named = next(line for line in out.splitlines() if line.startswith("first wrong operation"))
    assert named.startswith("first wrong operation: div:"), named


def test_emit_needs_no_device(capsys):
    use()
    with mock.patch("tinymlir.cuda.available", lambda: False):
        status, out, _ = told(capsys, "emit", "softmax", "--gpu", "--chip", "sm_90", "--stage",
                              "ptx")
        assert status == 0 and ".target sm_90" in out and ".visible .entry" in out
        status, out, _ = told(capsys, "emit", "softmax", "--gpu", "--stage", "ptx")
        assert status == 0 and ".target sm_80" in out
        status, _, err = told(capsys, "emit", "gelu", "--gpu", "--chip", "sm_1", "--stage",
                              "ptx")
        assert status == 1 and "chip 'sm_1' is not supported" in err
    assert settings.chip == ""


@pytest.mark.parametrize("words", [
    ["generate", "x", "--kernels", "k"], ["emit", "gelu", "--chip", "sm_80"],
    ["compile", "--out", "k"]])
def test_options_that_need_the_gpu(words, capsys):
    with pytest.raises(SystemExit) as status:
        main(words)
    assert status.value.code == 2 and "--gpu" in capsys.readouterr().err


def test_the_command_in_development_mode(model):
    code = ("import sys\nfrom tinymlir.cli import main\nfrom tinymlir.device import use\n"
            "from tinymlir.standin import StandIn\nuse(StandIn())\nsys.exit(main(sys.argv[1:]))")
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", code, "generate", "A tale", "--gpu",
         "--tokens", "1", "--model", str(model)], text=True, capture_output=True)
    assert done.returncode == 0 and done.stderr == f"model: {model}\n"


# ---------------------------------------------------------------- the check of benchmarks/

def test_the_check_on_a_gpu_is_rehearsed(tmp_path):
    done = subprocess.run(["sh", "benchmarks/gpu.sh", "rehearse", str(tmp_path)], cwd=ROOT,
                          text=True, capture_output=True,
                          env={**os.environ, "PYTHON": sys.executable})
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["failed"] == [] and report["machine"]["device"]["stand_in"] is True
    assert len(report["cases"]) > 200 and len(report["models"]) == len(report["tokens"]) == 5
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert {line["part"] for line in lines} == {
        "machine", "cases", "models", "ceilings", "kernels", "tokens"}
    assert "A STAND-IN: no number below is of a GPU" in (tmp_path / "gpu.txt").read_text()


def test_the_check_has_every_operation(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gpu_cases import cases

    from tinymlir.expr import Op
    from tinymlir.graph import trace
    seen = set()
    for case in cases().values():
        graph, _ = trace(case.function, case.arrays, {})
        seen |= {node.op for node in graph.nodes}
    assert seen >= set(Op) - {Op.CALL, Op.RESULT}


def test_the_check_finds_a_wrong_kernel(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    import gpu_cases

    from tinymlir import ptxops
    every = gpu_cases.cases()
    few = {name: every[name] for name in ("add float32", "mul float32", "neg int32")}
    monkeypatch.setattr(gpu, "cases", lambda: few)
    report = gpu.Report(tmp_path)
    wrong = {"mul": lambda a, b, name: ptxops.product(a, b, name) + (
        1 if name[-1] == "f32" else 0)}
    with mock.patch.dict(ptxops.COMPUTE, wrong):
        gpu.check_cases(report)
    assert report.failed == ["mul float32"]


def test_a_lost_device_ends_the_check(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    report = gpu.Report(tmp_path)
    device().driver.broken = "gone"
    with pytest.raises(SystemExit), gpu.watched(report, "something"):
        put(np.ones(3))
    assert report.failed == ["something"]


def test_a_check_without_time_says_what_it_left_out(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    report = gpu.Report(tmp_path)
    monkeypatch.setitem(gpu.SECONDS, "kernels", 0)
    report.begins("kernels")
    gpu.check_cases(report)
    assert len(report.left_out) > 200 and not report.failed
    assert report.end() == 1 and "no time for" in (tmp_path / "gpu.txt").read_text()
    assert json.loads((tmp_path / "gpu.json").read_text())["left out"] == report.left_out


@pytest.mark.parametrize("hangs", ["HANG = 0.2", "limit = 0.2"])
def test_a_check_that_hangs_ends_itself_and_keeps_its_figures(tmp_path, hangs):
    """The main thread is inside of C, as it is while it waits for a GPU."""
    code = ("import sys, time\nsys.path.insert(0, 'benchmarks')\nimport gpu\n"
            f"from pathlib import Path\nlimit = 99\n{hangs}\ngpu.HANG = vars().get('HANG', 99)\n"
            "report = gpu.Report(Path(sys.argv[1]), limit)\nreport.watch()\n"
            "report.begins('kernels')\nreport.keep('cases', 'one', ulps=0)\n"
            "report.has_time('two')\ntime.sleep(60)")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, text=True,
                          capture_output=True, timeout=50)
    assert done.returncode == 1 and "NOT OK  two: cut after" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["one", "two"]


def test_a_reference_in_parts_is_the_whole_one(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu
    x = np.random.default_rng(0).normal(size=(200, 9)).astype(np.float32)
    np.testing.assert_array_equal(gpu.in_parts(ops.softmax, (x,), 1), ops.softmax(x))
    np.testing.assert_array_equal(gpu.in_parts(np.add, (x, x[::-1]), 2), x + x[::-1])
    y = x.copy()
    y[150, 3] += np.spacing(np.abs(x).max()) * 5
    assert abs(gpu.away(y, x, (x,)) - 5) < 1 and gpu.away(x, x.copy(), (x,)) == 0
    assert gpu.away(x, x.astype(float), (x,)) == gpu.away(x[1:], x, (x,)) == np.inf
