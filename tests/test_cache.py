"""The key/value cache: the same tokens, whatever was asked before (chapter 10)."""
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from mlir.dialects import arith, math

from tinymlir import compiler, errors, generate, jit, load_model, verify
from tinymlir.__main__ import main
from tinymlir.blame import blame
from tinymlir.cache import CachedModel, build, window
from tinymlir.checkpoint import BUNDLED
from tinymlir.expr import Op
from tinymlir.graph import evaluate, trace
from tinymlir.model import PLAIN, Model, generate_ids
from tinymlir.reference import forward
from tinymlir.rewrites import narrow
from tinymlir.scalars import SCALAR
from tinymlir.updates import attend, spelled_out, update

TOLERANCE = {None: 1e-5, "float32": 2e-4}  # the first block is float32 in both
modes = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("cache") / "checkpoint")


@pytest.fixture(scope="session")
def loaded(folder):
    return {dtype: load_model(folder, cache=True, dtype=dtype)[0] for dtype in TOLERANCE}


def fresh(model):
    return build(model.config, model.params, "cpu", model.dtype)


def residuals(model, ids):
    """What NumPy makes of the ids, by name."""
    kept = []
    number = np.dtype(model.dtype or np.float64).type
    logits = forward(np.array(ids), model.params, model.config.heads, kept, number)[-1:]
    halves = [f"block {i} {half}" for i in range(model.config.blocks)
              for half in ("attention", "feed-forward")]
    return dict(zip(["embedding", *halves, "logits"], [*kept, logits], strict=True))


def check(model, ids, traced):
    want, got = residuals(model, ids), {}
    logits = model(ids, got) if traced else model(ids)
    names = want if traced else ["logits"]
    got = got or {"logits": logits}
    assert list(got) == list(names)
    for name in names:
        assert (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape)
        np.testing.assert_allclose(got[name], want[name], rtol=TOLERANCE[model.dtype],
                                   atol=TOLERANCE[model.dtype], err_msg=name)
    assert np.argmax(logits) == np.argmax(want["logits"])


# ---------------------------------------------------------------- the model

@modes
@pytest.mark.parametrize("traced", [False, True])
def test_every_step_up_to_a_full_context(loaded, dtype, traced):
    model, ids = fresh(loaded[dtype]), [7]
    while len(ids) <= tiny.CONTEXT:
        check(model, ids, traced)
        ids.append(int(np.argmax(model(ids))))
    assert {n for n, _ in model.memory.steps} == {1}  # one program for any position


@modes
def test_the_whole_context_of_the_bundled_model(dtype):
    """Greedy tokens up to the last position, against the model without a cache."""
    cached, tokenizer = load_model(BUNDLED, cache=True, dtype=dtype)
    plain, _ = load_model(BUNDLED, fused=True, dtype=dtype)
    ids = tokenizer.encode("Once upon a time there was a").ids
    whole = ids + generate_ids(cached, ids, cached.config.context - len(ids))
    for n in range(len(ids), len(whole), 5):
        assert int(np.argmax(plain(whole[:n]))) == whole[n], n
    want = residuals(plain, whole)["logits"]
    np.testing.assert_allclose(cached(whole), want, rtol=1e-3, atol=1e-3)


@modes
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_whatever_was_asked_before(loaded, dtype, data):
    """Prefixes, changed tokens, shorter and longer rows, with and without a trace."""
    model, ids = loaded[dtype], []
    for _ in range(data.draw(st.integers(1, 4))):
        keep = data.draw(st.integers(0, len(ids)))
        more = data.draw(st.lists(st.integers(0, tiny.VOCABULARY - 1), min_size=1,
                                  max_size=tiny.CONTEXT))
        ids = (ids[:keep] + more)[:tiny.CONTEXT]
        check(model, ids, data.draw(st.booleans()))


@modes
def test_one_program_for_each_power_of_two(loaded, dtype):
    model = fresh(loaded[dtype])
    for n in range(1, tiny.CONTEXT + 1):
        model([(n * k) % tiny.VOCABULARY for k in range(n)])
    assert sorted(n for n, _ in model.memory.steps) == [1, 2, 4, 8, 16, tiny.CONTEXT]


def test_nothing_that_was_asked_is_changed(loaded):
    model = fresh(loaded[None])
    ids, trace = np.arange(5), {}
    first = model(ids, trace)
    copies = {name: x.copy() for name, x in trace.items()}
    kept = first.copy()
    ids[:] = 9
    model([1, 2, 3], {})
    model(np.arange(20))
    assert np.array_equal(first, kept)
    assert all(np.array_equal(trace[name], copies[name]) for name in trace)


def test_from_many_threads(loaded):
    model = fresh(loaded[None])
    rows = [[t, t + 1, *range(t)] for t in range(12)]
    want = {t: Model(model.config, model.params, PLAIN)(row) for t, row in enumerate(rows)}

    def ask(t):
        return np.allclose(model(rows[t % 12]), want[t % 12], atol=1e-5)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(60)))


def test_an_interrupted_call_leaves_nothing_behind(loaded, monkeypatch):
    model = fresh(loaded[None])
    model([1, 2, 3, 4])
    monkeypatch.setattr(CachedModel, "bound", lambda *_: lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model([1, 2, 9, 9, 9])
    assert model.memory.ids.tolist() == [1, 2]
    monkeypatch.undo()
    check(model, [1, 2, 9, 9, 9], True)
    check(model, [1, 2, 3, 4, 5], False)


MEMORY = """
import sys, resource
from tinymlir import load_model
model, _ = load_model(sys.argv[1], cache=True)
for n in range(1, 25):
    model([100 + n, *range(1, n)])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for i in range(1000):
    model([i % 257, *range(i % 23)])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_stays_flat(folder):
    """A thousand calls: less than 8 MB (in KB) after all programs are there."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(folder)], text=True,
                          capture_output=True)
    assert done.returncode == 0 and int(done.stdout) < 8000, done.stderr + done.stdout


def test_bad_ids_are_refused_as_ever(loaded):
    model = fresh(loaded[None])
    model([3, 4])
    for ids, kind in (([], errors.GenerationError), ([1, -1], errors.OutOfRangeError),
                      ([0.5], errors.DTypeError), ([0] * 25, errors.GenerationError)):
        with pytest.raises(kind):
            model(ids)
    check(model, [3, 4, 5], False)


@given(st.integers(1, 40), st.data())
def test_a_window_holds_what_is_new(context, data):
    n = data.draw(st.integers(1, context))
    first = data.draw(st.integers(0, n - 1))
    ids = np.arange(n) + 100
    at, rows = window(ids, first, context)
    assert 0 <= at <= first and at + len(rows) <= context
    assert len(rows) == context or len(rows) & (len(rows) - 1) == 0
    assert len(rows) < 2 * (n - first)
    assert np.array_equal(rows[:n - at], ids[at:]) and not rows[n - at:].any()


def test_commands(folder, capsys):
    words = ["generate", "Grüße", "--tokens", "5", "--model", str(folder)]
    assert main(words) == 0
    plain = capsys.readouterr()
    for more in (["--cache"], ["--cache", "--fused"]):
        assert main([*words, *more]) == 0
        assert capsys.readouterr() == plain
    for more in ([], ["--dtype", "float32"]):
        words = ["verify", "--prompt", "abc", "--tokens", "3", "--model", str(folder), "--cache"]
        assert main([*words, *more]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == "OK" and ("float64" in out) is not bool(more)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_wrong_operation_is_named(folder, monkeypatch, tokens):
    """In the prefill, and in a step after a prefill that was right."""
    model, tokenizer = load_model(folder, cache=True)
    right = verify.compare_step

    def later(model, ids, number, step):
        if number == tokens:
            monkeypatch.setenv("TINYMLIR_CACHE", "off")
            monkeypatch.setitem(SCALAR, (Op.TANH, "f"), lambda x: arith.negf(math.tanh(x)))
            model.run.cache_clear()
            model.memory.steps.clear()
        return right(model, ids, number, step)

    monkeypatch.setattr(verify, "compare_step", later)
    try:
        report = verify.verify(model, tokenizer, "abc", tokens)
        told = blame(model, report)
    finally:
        model.run.cache_clear()
    assert f"first wrong: block 0 feed-forward, step {tokens}" in told
    assert "first wrong operation: tanh: f" in told and "np.tanh" in told


# ---------------------------------------------------------------- one native call

def step_of(model, n=1):
    model([5] * n)
    return model.memory.steps[n, False].compiled


@modes
@pytest.mark.parametrize("n", [1, 8])
def test_no_copy_of_a_buffer_or_a_weight(loaded, dtype, n):
    """What is copied or allocated in a step is smaller than any of them."""
    compiled = step_of(fresh(loaded[dtype]), n)
    text = compiled.stages["bufferized"]
    moved = [line for line in text.splitlines() if "memref.copy" in line
             or "linalg.copy" in line or "memref.alloc(" in line]
    assert moved
    for shape in (f"{tiny.CONTEXT}x{tiny.WIDTH}x", f"{tiny.WIDTH}x{tiny.WIDTH}x",
                  f"{tiny.WIDTH}x{3 * tiny.WIDTH}x", f"{tiny.VOCABULARY}x{tiny.WIDTH}x"):
        assert not [line for line in moved if f"<{shape}" in line], shape


@modes
def test_a_step_returns_the_buffers_it_was_given(loaded, dtype):
    model = fresh(loaded[dtype])
    compiled = step_of(model)
    blocks = model.config.blocks
    assert len(compiled.graph.in_place) == 2 * blocks
    bound = model.memory.steps[1, False]
    logits, kept, keys, values = bound(np.array([5]), np.array(1), np.array(0))
    assert kept == [] and all(map(lambda a, b: a is b, keys, model.memory.keys))
    assert all(map(lambda a, b: a is b, values, model.memory.values))


def test_the_blocks_of_a_step_are_one_function(loaded):
    """All of them in float32; all but the first where types are NumPy's."""
    for dtype, calls in (("float32", tiny.BLOCKS), (None, 0)):
        graph = step_of(fresh(loaded[dtype])).graph
        assert sum(x.op is Op.CALL for x in graph.nodes) == calls
    cached, _ = load_model(BUNDLED, cache=True)
    graph = step_of(cached).graph
    assert sum(x.op is Op.CALL for x in graph.nodes) == cached.config.blocks - 1


# ---------------------------------------------------------------- the two operations

def window_of(q, k, v, keys, values, position):
    keys, values = update(keys, k, position), update(values, v, position)
    return attend(q, keys, values, position, np.sqrt(4)), keys, values


def case(n, room, dtype, seed=0):
    dice = np.random.default_rng(seed)
    q = dice.normal(size=(3, n, 4))
    rows, whole = (dice.normal(size=(2, m, 12)) for m in (n, room))
    return [x.astype(dtype) for x in (q, *rows, *whole)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "room"), [(1, 1), (1, 9), (3, 9), (8, 16), (9, 9), (17, 40)])
def test_ops_at_every_position(n, room, dtype):
    arrays, run = case(n, room, dtype), jit(window_of)
    donating = jit(window_of, donate=("keys", "values"))
    for position in range(room - n + 1):
        want = window_of(*arrays, position)
        copies = [x.copy() for x in arrays]
        for got in (run(*arrays, np.array(position)), donating(*copies, np.array(position))):
            for ours, theirs in zip(got, want, strict=True):
                assert ours.dtype == theirs.dtype
                np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
        assert all(map(np.array_equal, arrays, case(n, room, dtype)))  # not donated: a copy
        assert got[1] is copies[3] and got[2] is copies[4]
    assert len(run.cache) == len(donating.cache) == 1


def test_attend_is_attention():
    """Against a sum written out by hand, with garbage where nobody may look."""
    q, k, v, keys, values = case(2, 8, "float64")
    keys[5:], values[5:] = np.nan, np.inf
    got = jit(lambda *a: attend(*a, np.sqrt(4)))(q, keys, values, np.array(3))
    for h in range(3):
        for i in range(2):
            rows = range(3 + i + 1)
            powers = [np.exp(q[h, i] @ keys[t, 4 * h:4 * h + 4] / 2) for t in rows]
            mean = sum(p * values[t, 4 * h:4 * h + 4] for p, t in zip(powers, rows))
            np.testing.assert_allclose(got[h, i], mean / sum(powers))


@pytest.mark.parametrize("position", [-1, 7, 2**40, -2**40])
def test_a_position_outside_is_refused(position):
    arrays = case(2, 8, "float64")
    guard = arrays[3].copy()
    for donate in ((), ("keys", "values")):
        with pytest.raises(errors.OutOfRangeError, match=f"position {position} is out of bounds"):
            jit(window_of, donate=donate)(*arrays, np.array(position))
    with pytest.raises(IndexError, match=f"position {position}"):
        window_of(*arrays, position)
    with pytest.raises(IndexError, match=f"position {position}"):
        jit(lambda a, b: update(a, b, position))(arrays[3], arrays[1])
    assert arrays[3].shape == guard.shape


def test_what_does_not_fit_is_refused_alike():
    q, k, v, keys, values = case(2, 8, "float64")
    at = np.array(0)
    for call in (lambda f: f(lambda *a: update(*a), keys, k[:, :5], at),
                 lambda f: f(lambda *a: update(*a), k, keys, at),
                 lambda f: f(lambda *a: update(*a), keys, k, np.array(0.0)),
                 lambda f: f(lambda *a: update(*a), keys, k, np.array([0])),
                 lambda f: f(lambda *a: attend(*a, 2.0), q, keys[:, :5], values, at),
                 lambda f: f(lambda *a: attend(*a, 2.0), q[0], keys, values, at),
                 lambda f: f(lambda *a: attend(*a, 2.0), q, keys[:1], values[:1], at),
                 lambda f: f(lambda *a: attend(*a, 2.0), q.astype(int), keys, values, at)):
        kinds = []
        for run in (lambda g, *a: g(*a), lambda g, *a: jit(g)(*a)):
            with pytest.raises(errors.TinymlirError) as error:
                call(run)
            kinds.append(type(error.value))
        assert kinds[0] is kinds[1], kinds


@pytest.mark.parametrize("rows", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("buffer", [np.float32, np.float64, np.int32, bool])
def test_rows_take_the_dtype_of_the_buffer(rows, buffer):
    whole, new = np.zeros((5, 3), buffer), (np.arange(6).reshape(2, 3) - 1).astype(rows)
    want = whole.copy()
    want[2:4] = new
    for got in (update(whole, new, 2), jit(update)(whole, new, np.array(2))):
        assert got.dtype == want.dtype and np.array_equal(got, want)


@pytest.mark.parametrize("n", [1, 3])
def test_spelled_out_in_other_operations(n):
    """For targets that have none of the two: the interpreter finds no difference."""
    arrays = case(n, 9, "float64")
    arrays[3][8:], arrays[4][8:] = np.nan, np.inf
    graph, _ = trace(window_of, (*arrays, np.array(0)), {})
    for g in (graph, narrow(graph)):
        plain = spelled_out(g)
        assert not {x.op for x in plain.nodes} & {Op.UPDATE, Op.ATTEND}
        for position in range(9 - n):
            given = [x.astype(g.nodes[-1].dtype) for x in arrays] if g is not graph else arrays
            for ours, theirs in zip(evaluate(plain, *given, np.array(position)),
                                    evaluate(g, *given, np.array(position)), strict=True):
                assert ours.dtype == theirs.dtype
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    for position in (-1, 10 - n):
        with pytest.raises(IndexError):
            evaluate(spelled_out(graph), *arrays, np.array(position))


@modes
def test_a_target_that_cannot_write_in_place(loaded, dtype, monkeypatch):
    """It gets the operations spelled out, and the model copies the buffers."""
    monkeypatch.delattr(compiler, "IN_PLACE")
    model = loaded[dtype]
    model.run.cache_clear()
    try:
        model = fresh(model)
        for n in (5, 6, 7, 4, tiny.CONTEXT):
            check(model, list(range(3, 3 + n)), n % 2 == 0)
        graphs = [c.graph for c in model.run.cache.values()]
        assert graphs and not any(g.donated or g.in_place for g in graphs)
        for g in graphs:
            inner = [x.attrs["body"] for x in g.nodes if x.op is Op.CALL]
            ops = {x.op for part in (g, *inner) for x in part.nodes}
            assert Op.MATMUL in ops and not ops & {Op.UPDATE, Op.ATTEND}
    finally:
        model.run.cache_clear()


# ---------------------------------------------------------------- donated arguments

def test_what_must_not_be_donated_is_refused():
    put = jit(lambda buffer, rows, at: update(buffer, rows, at), donate=("buffer",))
    whole, at = np.zeros((4, 2)), np.array(1)
    with pytest.raises(errors.ArgumentError, match="share memory, and one"):
        put(whole, whole[2:3], at)
    whole.flags.writeable = False
    with pytest.raises(errors.ArgumentError, match="buffer is donated, but cannot be written"):
        put(whole, np.ones((1, 2)), at)
    with pytest.raises(errors.ArgumentError, match="no parameter `bufer`; it takes buffer"):
        jit(lambda buffer: buffer, donate=("bufer",))(np.ones(2))
    free = np.zeros((4, 2))
    bound = put.compile(free, np.ones((1, 2)), at).bind(buffer=free)
    with pytest.raises(errors.ArgumentError, match="lies in the memory of a donated one"):
        bound(free[1:2], at)
    assert bound(np.ones((1, 2)), at) is free and free[1].tolist() == [1, 1]
    late = put.compile(free, np.ones((1, 2)), at).bind(at=at)
    with pytest.raises(errors.ArgumentError, match="share memory"):
        late(free, free[1:2])
    assert late(free, np.full((1, 2), 3.0)) is free and free[1].tolist() == [3, 3]


def test_a_donated_buffer_that_is_read_again_is_still_right():
    def both(buffer, rows, at):
        new = update(buffer, rows, at)
        return buffer.sum(), new, new * 2, buffer + new, new

    whole, rows = np.arange(8.0).reshape(4, 2), np.full((1, 2), 9.0)
    want = both(whole, rows, 1)
    got = jit(both, donate=("buffer",))(whole, rows, np.array(1))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert got[1] is whole and not np.shares_memory(got[4], whole)


def test_updates_of_updates_and_swapped_results():
    def turn(a, b, rows):
        a, b = update(update(a, rows, 0), rows * 2, 1), update(b, rows * 3, 2)
        return b, a

    a, b, rows = np.zeros((3, 2)), np.ones((3, 2)), np.full((1, 2), 5.0)
    want = turn(a, b, rows)
    got = jit(turn, donate=("a", "b"))(a, b, rows)
    assert got[0] is b and got[1] is a
    assert np.array_equal(a, want[1]) and np.array_equal(b, want[0])


def test_donated_but_not_updated():
    x = np.ones(3)
    y = jit(lambda x: (x, x + 1), donate=("x",))(x)
    assert y[0] is not x and y[1].tolist() == [2, 2, 2]


def test_empty_rows():
    whole = np.arange(6.0).reshape(3, 2)
    put = jit(update, donate=("buffer",))
    assert np.array_equal(put(whole, np.zeros((0, 2)), np.array(1)), whole)
    assert put(np.zeros((3, 0)), np.zeros((1, 0)), np.array(1)).shape == (3, 0)


def test_donated_from_many_threads():
    """Each thread has its own buffer; the compiled function has none."""
    put = jit(update, donate=("buffer",))
    put(np.zeros((64, 8)), np.ones((1, 8)), np.array(0))
    done = []

    def fill(seed):
        mine = np.zeros((64, 8))
        for i in range(64):
            assert put(mine, np.full((1, 8), seed + i), np.array(i)) is mine
        done.append(np.array_equal(mine[:, 0], seed + np.arange(64)))

    threads = [threading.Thread(target=fill, args=(100 * i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 6


def test_text_is_the_same(folder):
    for dtype in TOLERANCE:
        cached = load_model(folder, cache=True, dtype=dtype)
        plain = load_model(folder, dtype=dtype)
        assert generate(*cached, "abc", 20) == generate(*plain, "abc", 20)
