"""Decoding with a cache on a GPU: on the stand-in and on the emulator, against NumPy."""
import dataclasses
import re
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

import test_gpu
import tiny
from tinymlir import cache, gpu, jit, occupancy
from tinymlir.cli import main
from tinymlir.cuda import settings
from tinymlir.devarray import DeviceArray, borrow, put
from tinymlir.device import use
from tinymlir.errors import ArgumentError, OutOfRangeError
from tinymlir.expr import Op
from tinymlir.graph import trace
from tinymlir.model import PLAIN, Model, generate_ids, load_model
from tinymlir.rewrites import improve, narrow
from tinymlir.standin import StandIn
from tinymlir.updates import attend, update

IDS = [5, 9, 200, 17, 3, 250]
targets = pytest.mark.parametrize("target", ["emulator", "gpu"])
modes = pytest.mark.parametrize("dtype", [None, "float32"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def stand_in():
    api = StandIn(memory=1 << 28)
    use(api)
    yield api
    use()
    settings.find = None


# ---------------------------------------------------------------- the two operations

def window_of(q, k, v, keys, values, position):
    keys, values = update(keys, k, position), update(values, v, position)
    return attend(q, keys, values, position, np.sqrt(4)), keys, values


def case(n, room, dtype, heads=3, size=4, seed=0):
    dice = np.random.default_rng(seed)
    q = dice.normal(size=(heads, n, size))
    rows, whole = (dice.normal(size=(2, m, heads * size)) for m in (n, room))
    return [x.astype(dtype) for x in (q, *rows, *whole)]


@targets
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [
    (1, 1, 3, 4), (1, 9, 3, 4), (3, 9, 1, 5), (8, 8, 2, 1), (2, 300, 1, 6), (1, 129, 2, 64),
    (2, 130, 1, 130), (1, 260, 1, 300)], ids=str)
def test_every_size_at_both_ends_and_between(target, dtype, shape):
    n, room, heads, size = shape
    arrays = case(n, room, dtype, heads, size)
    run = jit(window_of, target=target)
    giving = jit(window_of, target=target, donate=("keys", "values"))
    for at in sorted({0, (room - n) // 2, room - n}):
        want, copies = window_of(*arrays, at), [x.copy() for x in arrays]
        for got in (run(*arrays, np.array(at)), giving(*copies, np.array(at))):
            for ours, theirs in zip(got, want, strict=True):
                assert ours.dtype == theirs.dtype
                np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)
        assert got[1] is copies[3] and got[2] is copies[4]
        assert all(map(np.array_equal, arrays, case(n, room, dtype, heads, size)))
    assert len(run.cache) == len(giving.cache) == 1


@targets
@pytest.mark.parametrize("dtypes", [
    ("float32", "float64", "float32"), ("float64", "float32", "float32"),
    ("float32", "float32", "float64")], ids=str)
@pytest.mark.parametrize("scale", [2.0, np.float32(2), np.float64(2)], ids=repr)
def test_mixed_types_are_promoted_as_numpy_does(target, dtypes, scale):
    q, _, _, keys, values = case(2, 7, "float64")
    arrays = [x.astype(t) for x, t in zip((q, keys, values), dtypes)]
    want = attend(*arrays, 4, scale)
    got = jit(lambda *a: attend(*a, scale), target=target)(*arrays, np.array(4))
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@targets
def test_nobody_looks_behind_the_last_row(target):
    q, _, _, keys, values = case(2, 300, "float64")
    keys[200:], values[200:] = np.nan, np.inf
    got = jit(lambda *a: attend(*a, 2.0), target=target)(q, keys, values, np.array(198))
    np.testing.assert_allclose(got, attend(q, keys, values, 198, 2.0), rtol=1e-12)
    assert np.isfinite(got).all()


@targets
def test_scores_that_are_no_numbers_are_those_of_numpy(target):
    q, _, _, keys, values = case(1, 200, "float64")
    run = jit(lambda *a: attend(*a, 2.0), target=target)
    for row, bad in ((3, np.nan), (3, np.inf), (150, np.inf), (150, np.nan), (150, 1e300)):
        wrong = keys.copy()
        wrong[row] = bad
        with np.errstate(all="ignore"):
            want = attend(q, wrong, values, 180, 2.0)
        np.testing.assert_allclose(run(q, wrong, values, np.array(180)), want, rtol=1e-12)


@targets
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, bool])
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 8), (6, 2, 5), (6, 1)], ids=str)
def test_rows_of_every_type_and_shape(target, dtype, shape):
    whole = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(dtype)
    rows = (np.arange(2 * whole[0].size).reshape(2, *shape[1:]) % 3).astype(dtype)
    for donate in ((), ("buffer",)):
        run = jit(update, target=target, donate=donate)
        for at in (0, 3, 4):
            given = whole.copy()
            want = update(whole, rows, at)
            got = run(given, rows, np.array(at, np.int32))
            np.testing.assert_array_equal(got, want)
            assert (got is given) == bool(donate)


@targets
@pytest.mark.parametrize("position", [-1, 7, 2**40, -2**40])
def test_a_position_outside_is_refused(target, position):
    arrays = case(2, 8, "float64")
    for donate in ((), ("keys", "values")):
        run = jit(window_of, target=target, donate=donate)
        with pytest.raises(OutOfRangeError, match=f"position {position} is out of bounds"):
            run(*arrays, np.array(position))


@targets
def test_a_view_is_written_without_a_copy(target):
    """The keys in the middle of a projection are read where they lie."""
    def write(buffer, x, at):
        q, k, v = np.split(x * 2, 3, axis=-1)
        return update(buffer, k, at), q, v

    buffer, x = np.zeros((5, 4)), np.arange(24.0).reshape(2, 12)
    got = jit(write, target=target, donate=("buffer",))(buffer, x, np.array(3))
    np.testing.assert_array_equal(got[0], np.concatenate([np.zeros((3, 4)), x[:, 4:8] * 2]))


# ---------------------------------------------------------------- what is given away

def both(buffer, rows, at):
    new = update(buffer, rows, at)
    return buffer.sum(), new, new * 2, buffer + new, new, buffer


def turn(a, b, rows):
    a, b = update(update(a, rows, 0), rows * 2, 1), update(b, rows * 3, 2)
    return b, a


def from_itself(buffer, at):
    return update(buffer, buffer[:1] * 2, at)


def between(buffer, rows, at):
    first = update(buffer, rows, at)
    return update(first, rows * 2, at), first.sum(axis=0)


@targets
@pytest.mark.parametrize("function, count", [(both, 1), (turn, 2), (from_itself, 1),
                                             (between, 1)])
def test_given_away_and_read_again(target, function, count):
    arrays = [np.arange(8.0).reshape(4, 2) + i for i in range(count)]
    rest = [] if function is from_itself else [np.full((1, 2), 9.0)]
    rest += [] if function is turn else [np.array(1)]
    numbers = [*rest[:-1], 1] if function is not turn else rest
    want = function(*arrays, *numbers)
    want = want if isinstance(want, tuple) else (want,)
    names = ("a", "b") if function is turn else ("buffer",)
    given = [x.copy() for x in arrays]
    got = jit(function, target=target, donate=names)(*given, *rest)
    got = got if isinstance(got, tuple) else (got,)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert all(any(x is y for y in got) for x in given)
    plain = jit(function, target=target)(*arrays, *rest)
    for ours, theirs in zip(plain if isinstance(plain, tuple) else (plain,), want):
        np.testing.assert_array_equal(ours, theirs)
        assert not any(ours is x for x in arrays)


@targets
def test_memory_that_starts_anywhere(target):
    whole = np.zeros(101)
    buffer = whole[1:].reshape(20, 5)
    run = jit(update, target=target, donate=("buffer",))
    assert run(buffer, np.ones((1, 5)), np.array(3)) is buffer
    np.testing.assert_array_equal(np.flatnonzero(whole), range(16, 21))


def test_an_array_on_the_device_is_changed_where_it_is():
    run = jit(update, target="gpu", donate=("buffer",))
    buffer, rows = put(np.zeros((8, 3))), np.ones((1, 3))
    result = run(buffer, rows, np.array(2))
    assert result is buffer and buffer.numpy()[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    part = buffer[3:]  # starts at 72 bytes, where no kernel may begin
    assert run(part, rows * 2, np.array(4)) is part
    assert buffer.numpy()[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 2]


def test_what_must_not_be_given_away_is_refused():
    run = jit(update, target="gpu", donate=("buffer",))
    buffer, at = put(np.zeros((8, 3))), np.array(1)
    with pytest.raises(ArgumentError, match="share memory"):
        run(buffer, buffer[2:3], at)

    class Theirs:
        shape, dtype = buffer.shape, buffer.dtype
        __cuda_array_interface__ = buffer.__cuda_array_interface__

    with pytest.raises(ArgumentError, match="cannot be written to"):
        run(Theirs(), np.ones((1, 3)), at)
    assert not borrow(Theirs())[1:].writeable


# ---------------------------------------------------------------- models

@targets
@modes
def test_every_residual_is_that_of_numpy(folder, target, dtype):
    model, _ = load_model(folder, target=target, cache=True, dtype=dtype)
    plain = load_model(folder, dtype=dtype)[0] if dtype else Model(
        model.config, model.params, PLAIN)
    for n in (3, 4, 6, 2, 6):
        want, got = {}, {}
        plain(IDS[:n], trace=want)
        logits = model(IDS[:n], trace=got)
        assert list(got) == list(want)
        for name in want:
            assert type(got[name]) is np.ndarray and got[name].dtype == want[name].dtype
            np.testing.assert_allclose(got[name], want[name], rtol=2e-4, atol=2e-4)
        np.testing.assert_array_equal(logits, got["logits"])


@targets
@modes
def test_the_same_tokens_as_on_the_processor(folder, target, dtype):
    here, _ = load_model(folder, dtype=dtype)
    there, _ = load_model(folder, target=target, cache=True, dtype=dtype)
    for prompt in (IDS, IDS[:2], [7], [5, 9, 1]):
        n = 5 if prompt is not IDS else tiny.CONTEXT - len(IDS)
        assert generate_ids(there, prompt, n) == generate_ids(here, prompt, n)


@modes
def test_a_step_copies_three_numbers_and_the_logits(folder, dtype, stand_in):
    model, _ = load_model(folder, target="gpu", cache=True, dtype=dtype)
    for n in range(1, 5):
        model(IDS[:n])
    before = dict(stand_in.calls)
    model(IDS[:5])
    new = {name: n - before.get(name, 0) for name, n in stand_in.calls.items()}
    assert new["cuMemcpyHtoDAsync"] == 3  # the token, where it is, and which is the last
    assert new["cuMemcpyDtoHAsync"] == 2  # logits, and the one index that was computed
    assert new["cuMemAlloc"] == new["cuModuleLoadDataEx"] == 0
    assert (new["cuLaunchKernel"], new["cuGraphLaunch"]) == (0, 1)  # a CUDA graph


@modes
def test_no_launch_copies_a_buffer(folder, dtype):
    model, _ = load_model(folder, target="gpu", cache=True, dtype=dtype)
    model(IDS[:1])
    compiled = model.memory.steps[1, False].compiled
    plan = compiled.program.plan
    names = [launch.kernel.partition("_")[0] for launch in plan.launches]
    assert names.count("update") == 2 * tiny.BLOCKS and names.count("attend") == tiny.BLOCKS
    arguments = plan.of_kind("argument")
    buffers = {arguments[i] for i in compiled.graph.in_place.values()}
    assert len(buffers) == 2 * tiny.BLOCKS
    for launch, name in zip(plan.launches, names):
        touches = buffers & {p.buffer for p in launch.arguments}
        assert len(touches) == {"update": 1, "attend": 2}.get(name, 0)


def test_buffers_stay_on_the_device(folder):
    model, _ = load_model(folder, target="gpu", cache=True)
    keys = model.memory.keys
    model(IDS)
    assert model.memory.keys is keys and all(isinstance(x, DeviceArray) for x in keys)
    assert np.abs(keys[0].numpy()[:len(IDS)]).min(axis=1).any()


def test_blocks_that_are_called_update_the_callers_buffers(tmp_path):
    """Three blocks and more are one function; what it updates is the caller's own."""
    from tinymlir.cache import build
    model, _ = load_model(tiny.write_checkpoint(tmp_path / "m"), dtype="float32")
    config = dataclasses.replace(model.config, blocks=4)
    params = model.params._replace(blocks=(model.params.blocks * 2)[:4])
    here, there = (build(config, params, target, "float32") for target in ("cpu", "gpu"))
    for n in (4, 5, 6):
        np.testing.assert_allclose(there(IDS[:n]), here(IDS[:n]), rtol=1e-4, atol=1e-4)
    compiled = there.memory.steps[1, False].compiled
    assert any(x.op is Op.CALL for x in compiled.graph.nodes)
    names = [launch.kernel for launch in compiled.program.plan.launches]
    assert sum(name.startswith("update") for name in names) == 8
    assert len({name for name in names if name.startswith("attend")}) == 1


# ---------------------------------------------------------------- commands

def told(capsys, *words):
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def test_commands(folder, capsys):
    words = ["generate", "A tale", "--tokens", "5", "--model", folder]
    assert told(capsys, *words, "--gpu", "--cache") == told(capsys, *words)
    status, out, _ = told(capsys, "verify", "--gpu", "--cache", "--prompt", "A tale", "--tokens",
                          "2", "--model", folder)
    assert status == 0 and out.endswith("\nOK\n")


def test_without_a_driver_it_is_one_line(folder):
    code = ("import sys\nfrom cuda.bindings import driver\n"
            "def cuInit(flags): raise RuntimeError('libcuda.so.1')\n"
            "driver.cuInit = cuInit\n"
            "from tinymlir.cli import main\nsys.exit(main(sys.argv[1:]))")
    pytest.importorskip("cuda.bindings.driver")
    for more in ([], ["--kernels", "nowhere"]):
        done = subprocess.run([sys.executable, "-c", code, "generate", "A tale", "--gpu",
                               "--cache", "--model", str(folder), *more], text=True,
                              capture_output=True)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (f"model: {folder}\nerror: no GPU: there is no NVIDIA driver on "
                               f"this machine (libcuda was not found)\n")


def test_an_error_in_the_middle_begins_a_line(folder, capsys):
    from tinymlir.driver import DeviceError
    from tinymlir.fused import FusedModel
    real, calls = FusedModel.__call__, []

    def breaking(model, ids, trace=None):
        calls.append(ids)
        if len(calls) == 4:
            raise DeviceError("a kernel has failed")
        return real(model, ids, trace)

    with mock.patch.object(FusedModel, "__call__", breaking):
        status, out, err = told(capsys, "generate", "A tale", "--tokens", "9", "--model", folder,
                                "--fused", "--gpu")
    assert status == 1 and len(out) > 1 and out.endswith("\n") and out.count("\n") == 1
    assert err.endswith("\nerror: a kernel has failed\n")


def test_traced_graphs_are_not_spelled_out():
    graph, _ = trace(window_of, (*case(1, 4, "float32"), np.array(0)), {})
    compiled = jit(window_of, target="gpu").compile(*case(1, 4, "float32"), np.array(0))
    ops = [x.op for x in compiled.graph.nodes]
    assert ops.count(Op.UPDATE) == 2 and ops.count(Op.ATTEND) == 1
    assert len(graph.nodes) == len(ops)


# ---------------------------------------------------------------- what ptxas says

@test_gpu.needs_ptxas
@pytest.mark.parametrize("chip", test_gpu.CHIPS)
@modes
def test_a_step_of_124m_is_accepted_and_spills_nothing(chip, dtype):
    """And reads 16 bytes at a time, and has no array for the scores of a context."""
    blocks, shape = 12, (test_gpu.CONTEXT, test_gpu.WIDTH)
    types = [np.float32, *[np.dtype(dtype or np.float64).type] * (blocks - 1)]
    buffers = tuple(test_gpu.zeros(*shape, dtype=t) for t in types)
    args = np.zeros(1, np.int64), np.array(0), np.array(0), test_gpu.large(blocks)
    graph, _ = trace(cache.step, (*args, buffers, buffers),
                     {"heads": test_gpu.HEADS, "residuals": False})
    graph = improve(narrow(graph) if dtype else graph)
    mine = tuple(i for i, name in enumerate(graph.names) if name.startswith(("keys", "values")))
    graph = dataclasses.replace(graph, donated=mine)
    assert len(graph.in_place) == 2 * blocks
    plan = gpu.compile_graph(graph, chip)
    found = occupancy.needs(plan.ptx, chip)
    assert found and {needs.spilled for needs in found.values()} == {0}
    attend_ = re.search(r"entry attend_\d+\(.*?\n}", plan.ptx, re.DOTALL)[0]
    assert re.search(r"ld\.global(\.nc)?\.v[42]\.", attend_)
    assert sum(b.nbytes for b in plan.buffers if b.kind in ("scratch", "result")) < 2e6
    names = [launch.kernel.partition("_")[0] for launch in plan.launches]
    assert (names.count("update"), names.count("attend")) == (2 * blocks, blocks)
