"""What jit promises about keys, memory, threads and errors."""
import gc
import os
import resource
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

from tinymlir import errors, jit

X = np.arange(12, dtype=np.float32).reshape(3, 4)


# ---------------------------------------------------------------- specialisation

def test_equal_statics_of_other_types_are_other_programs():
    @jit
    def add(x, n):
        return x + n

    ints = np.arange(3, dtype=np.int32)
    for n in (1, True, 1.0, np.float32(1), np.int64(1), 2):
        ours, theirs = add(ints, n=n), ints + n
        assert ours.dtype == theirs.dtype and (ours == theirs).all()
    assert len(add.cache) == 6
    add(ints, n=1)
    assert len(add.cache) == 6


@pytest.mark.parametrize("pair", [(0.0, -0.0), ((1, 2), (1, True)), ([1], [1.0]),
                                  ({"a": 1, "b": 2}, {"a": 1, "b": 2.0}), ("f4", "f8"),
                                  (np.dtype("f4"), np.dtype("f8")), (None, 0)])
def test_keys_tell_statics_apart(pair):
    f = jit(lambda x, n: (x, n))
    results = [f(X, n=n)[1] for n in pair]
    assert len(f.cache) == 2 and [type(r) for r in results] == [type(n) for n in pair]
    assert str(results) == str(list(pair))


def test_static_keywords_in_any_order_and_nan():
    f = jit(lambda x, a, b: x * a + b)
    f(X, a=1.0, b=2.0), f(X, b=2.0, a=1.0), f(X, a=1.0, b=np.nan), f(X, a=1.0, b=np.nan)
    assert len(f.cache) == 2


def test_positional_numbers_are_weak_and_part_of_the_key():
    f = jit(lambda x, n: x * n)
    assert f(X, 2).dtype == f(X, 2.5).dtype == np.float32
    assert f(X, np.float64(2)).dtype == np.float64
    assert (f(X, 2.5) == X * np.float32(2.5)).all()


def test_unhashable_and_array_statics_are_refused_by_name():
    f = jit(lambda x, n: x)
    with pytest.raises(errors.ArgumentError, match="`n` is an array.*by position"):
        f(X, n=X)
    with pytest.raises(errors.ArgumentError, match="hashable"):
        f(X, n={1, 2})
    with pytest.raises(errors.ArgumentError, match="x is a set"):
        f({1}, n=1)


def test_the_cache_is_bounded_and_can_be_cleared():
    f = jit(lambda x: x + 1, limit=4)
    for n in range(1, 8):
        assert (f(np.ones(n)) == 2).all()
    assert len(f.cache) == 4
    f.cache_clear()
    assert not f.cache and (f(np.ones(3)) == 2).all()


def test_a_trace_that_raised_leaves_nothing_behind():
    state = {"fail": True}

    @jit
    def f(x):
        if state["fail"]:
            raise RuntimeError("half-way")
        return x * 2

    with pytest.raises(RuntimeError, match="half-way"):
        f(X)
    state["fail"] = False
    assert (f(X) == X * 2).all()


def test_values_that_leak_out_of_a_trace_are_refused():
    leaked = []

    @jit
    def leak(x):
        leaked.append(x * 2)
        return x

    leak(X)
    with pytest.raises(errors.TracedValueError, match="traced in another call"):
        jit(lambda x: x + leaked[0])(X)


def test_compile_and_call_with_something_else():
    c = jit(lambda x, y: x + y["b"]).compile(X, {"b": X})
    assert (c(X, {"b": X}) == 2 * X).all()
    with pytest.raises(errors.ArgumentError, match=r"y\['b'\].*expected f32\[3,4\]"):
        c(X, {"b": X.astype(float)})
    with pytest.raises(errors.ArgumentError, match="another structure"):
        c(X, {"c": X})
    with pytest.raises(errors.ArgumentError, match="another structure"):
        c(X)


def test_jit_inside_jit_is_one_program():
    inner = jit(lambda x: np.tanh(x))
    outer = jit(lambda x: inner(x) + inner(x * 2))
    np.testing.assert_allclose(outer(X), np.tanh(X) + np.tanh(X * 2), rtol=1e-6)
    assert not inner.cache


def test_decorator_with_options_and_unknown_target():
    @jit(target="cpu")
    def f(x):
        """Doc."""
        return x - 1

    assert (f(X) == X - 1).all() and f.__doc__ == "Doc." and f.__name__ == "f"
    with pytest.raises(errors.ArgumentError, match="target 'tpu'"):
        jit(lambda x: x, target="tpu")
    with pytest.raises(errors.ArgumentError, match="takes a function"):
        jit(3)


# ---------------------------------------------------------------- memory and threads

def test_captured_arrays_are_read_once():
    w = np.ones(4, np.float32)
    f = jit(lambda x: x * w)
    f(X)
    w[:] = 5
    assert (f(X) == X).all()


def test_no_growth_over_ten_thousand_calls():
    f = jit(lambda x, y: (np.exp(x) @ y, x[1:]))
    a, b = np.ones((16, 32)), np.ones((32, 8))
    for _ in range(500):
        f(a, b)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        f(a, b)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096  # kB


def test_threads_that_compile_and_run_at_once():
    f, wrong = jit(lambda x: np.exp(x) @ x.T + np.sum(x)), []

    def work(seed):
        for n in (2, 3, 5):
            x = np.random.default_rng(seed).standard_normal((n, n + 1))
            ours = f(x)
            if not np.allclose(ours, np.exp(x) @ x.T + np.sum(x)):
                wrong.append((seed, n))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not wrong and len(f.cache) == 3


def test_code_outlives_the_function_that_made_it():
    import gc
    run = jit(lambda x: x @ x.T).compile(X).run
    gc.collect()
    assert (run([X]) == X @ X.T).all()


# ---------------------------------------------------------------- graphs of some size

def test_two_thousand_chained_operations():
    def chain(x):
        for _ in range(2000):
            x = x * 0.5 + 1
        return x

    np.testing.assert_allclose(jit(chain)(X), chain(X), rtol=1e-6)


def test_shared_subexpressions_are_computed_once():
    def double(x):
        for _ in range(60):
            x = x + x
        return x

    x = np.array([1.0, 3.0])
    assert (jit(double)(x) == double(x)).all()


def test_five_hundred_arguments():
    arrays = [np.full(3, float(i)) for i in range(500)]
    assert (jit(lambda *xs: sum(xs))(*arrays) == sum(arrays)).all()


# ---------------------------------------------------------------- what is refused

REFUSED = [
    (lambda x: 1 if x[0, 0] > 0 else 2, errors.TracedValueError, "np.where"),
    (lambda x: x[x > 0], errors.TracedValueError, "np.where"),
    (lambda x: np.where(x > 0), errors.TracedValueError, "np.where"),
    (lambda x: float(x[0, 0]), errors.TracedValueError, "keyword"),
    (lambda x: x.__setitem__(0, 1), errors.TracedValueError, "np.where"),
    (lambda x: 3.0 in x, errors.TracedValueError, "compare"),
    (lambda x: np.asarray(x), errors.TracedValueError, "numbers"),
    (lambda x: [i for i in range(x[0, 0])], errors.TracedValueError, "__index__"),
    (lambda x: np.add(x, 1, out=x), errors.UnsupportedError, "out="),
    (lambda x: np.add(x, 1, where=True), errors.UnsupportedError, "where"),
    (lambda x: np.add(x, 1, dtype=float), errors.UnsupportedError, "dtype"),
    (lambda x: np.add.reduce(x), errors.UnsupportedError, "np.add.reduce"),
    (lambda x: np.sum(x, where=x > 0), errors.UnsupportedError, "where"),
    (lambda x: np.sum(x, initial=1), errors.UnsupportedError, "initial"),
    (lambda x: np.reshape(x, (4, 3), order="F"), errors.UnsupportedError, "order"),
    (lambda x: np.argsort(x), errors.UnsupportedError, "np.argsort"),
    (lambda x: np.sin(x), errors.UnsupportedError, "np.sin"),
    (lambda x: x.foo, errors.MissingAttributeError, "foo"),
    (lambda x: x @ x, errors.ShapeError, "inner lengths 4 and 3"),
    (lambda x: x + np.ones(5), errors.ShapeError, "shape"),
    (lambda x: x.reshape(5, -1), errors.ShapeError, "size 12"),
    (lambda x: x.reshape(-1, -1), errors.ShapeError, "size 12"),
    (lambda x: np.sum(x, axis=2), errors.AxisError, "axis 2"),
    (lambda x: np.sum(x, axis=(0, 0)), errors.ShapeError, "duplicate|repeated"),
    (lambda x: np.max(x[:0]), errors.ShapeError, "zero-size"),
    (lambda x: x[3], errors.OutOfRangeError, "index 3"),
    (lambda x: x[[0, 3]], errors.OutOfRangeError, "index 3"),
    (lambda x: x[0, 0, 0], errors.OutOfRangeError, "too many"),
    (lambda x: x.astype(np.float16), errors.DTypeError, "float16"),
    (lambda x: x + 1j, errors.DTypeError, "complex"),
    (lambda x: x.astype(int) ** -1, errors.ShapeError, "negative integer powers"),
    (lambda x: x.astype(int) + 2**70, errors.NumberError, "too large|out of bounds"),
    (lambda x: x - np.ma.masked_array([1.0] * 4), TypeError, "MaskedArray|subclass"),
    (lambda x: len(x[0, 0]), errors.DTypeError, "unsized"),
]


@pytest.mark.parametrize("case", REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_line_and_the_way_out(case):
    function, kind, text = case
    with warnings.catch_warnings(), pytest.raises(kind, match=text) as caught:
        warnings.simplefilter("ignore")
        jit(function)(X)
    if kind is not TypeError:
        assert "test_jit.py, line" in str(caught.value)


def test_in_place_operators_say_what_to_write():
    def f(x):
        x += 1
        return x

    with pytest.raises(errors.UnsupportedError, match=r"x = x \+ y"):
        jit(f)(X)


@pytest.mark.parametrize("dtype", ["f2", "c16", "u1", "i1", "O", "U3", "M8[s]"])
def test_other_dtypes_are_refused_with_the_argument(dtype):
    with pytest.raises(errors.DTypeError, match=r"p\[1\]: dtype"):
        jit(lambda p: p[0])([X, np.zeros(3).astype(dtype)])


def test_gather_checks_every_call():
    f = jit(lambda table, rows: table[rows])
    for rows in ([0, 2], [-3, 1], [[0], [1]]):
        assert (f(X, np.array(rows)) == X[np.array(rows)]).all()
    for rows in ([3], [0, -4], [2**40], [-2**62]):
        with pytest.raises(IndexError, match=f"index {rows[-1]} is out of bounds"):
            f(X, np.array(rows))
    with pytest.raises(errors.OutOfRangeError, match="integer"):
        f(X, np.array([0.5]))
    g = jit(lambda table, n: table[n - 1])
    assert (g(X, np.array(3)) == X[2]).all()
    with pytest.raises(IndexError):
        g(X, np.array(4))
    with pytest.raises(IndexError):
        f(np.zeros((0, 4)), np.array([0]))


def test_unknown_operands_get_their_turn():
    class Other:
        __array_ufunc__ = None

        def __radd__(self, x):
            return "other"

    assert jit(lambda x: (x, x + Other()))(X)[1] == "other"


def test_stages_and_explain():
    f = jit(lambda x: np.exp(x) @ x.T)
    c = f.compile(X)
    assert list(c.stages) == ["graph", "linalg", "fused", "bufferized", "scheduled",
                              "lowered", "llvm", "asm"]
    assert "linalg.matmul" in c.stages["bufferized"]
    assert "matmul_f32_f32_f32" in c.stages["scheduled"]
    report = f.explain(X[:2])
    assert "x: f32[2,4] instead of f32[3,4]" in report and "specialisations: 2" in report
    assert "compiled already: yes" in f.explain(X)


def test_float32_throughout():
    def f(x, w):
        y = np.sqrt(2 / np.pi) * (x @ w)
        return y, np.mean(y, dtype=np.float64), y.astype(np.float64), np.arange(3.0) + y[:, :3]

    w, quick = np.ones((4, 5), np.float32), jit(f, dtype="float32")
    for ours, theirs in zip(quick(X, w), f(X, w)):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert quick(X.astype(float), w)[0].dtype == np.float32
    with pytest.raises(errors.ArgumentError, match="dtype 'float16'"):
        jit(f, dtype="float16")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_process_can_compile():
    import multiprocessing

    jit(lambda x: x @ x.T)(X)  # threads exist by now
    queue = (context := multiprocessing.get_context("fork")).Queue()

    def child():
        x = np.arange(6).reshape(2, 3)  # int64: a product that was not needed before
        queue.put((jit(lambda x: x @ x.T)(x) == x @ x.T).all())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = context.Process(target=child)
        process.start()
    assert queue.get(timeout=60)
    process.join()


def test_more_arrays_than_ctypes_takes_arguments():
    arrays = [np.full(2, float(i)) for i in range(700)]
    for i, y in enumerate(jit(lambda *xs: [x + 1 for x in xs])(*arrays)):
        assert (y == i + 1).all()


def test_limits_that_make_no_sense():
    for limit in (0, -1, 2.5, "a", True, None):
        with pytest.raises(errors.ArgumentError, match="limit"):
            jit(lambda x: x, limit=limit)
    f = jit(lambda x: x + 1, limit=1)
    assert (f(X) == X + 1).all() and (f(X[:2]) == X[:2] + 1).all() and len(f.cache) == 1


def test_failed_traces_leave_no_gates():
    f = jit(lambda x: x.nothing)
    for n in range(3):
        with pytest.raises(AttributeError):
            f(np.ones(n))
    assert not f.gates and not f.cache


def test_methods_and_callable_objects():
    class Layer(NamedTuple):
        w: np.ndarray

        @jit
        def apply(self, x):
            return x @ self.w

    class Scale:
        def __init__(self):
            self.cache = self.lookup = self.store = self.compile = 2.0

        def __call__(self, x):
            return x * self.cache

    assert (Layer(np.eye(4)).apply(X) == X).all()
    assert (jit(Scale())(X) == X * 2).all()


def test_a_dtype_inside_another_function_is_refused():
    inner = jit(lambda x: x * 2, dtype="float32")
    with pytest.raises(errors.ArgumentError, match="give the dtype there"):
        jit(lambda x: inner(x))(X)


@pytest.mark.parametrize("function", [
    lambda x: x / x, lambda x: np.exp(x), lambda x: x * np.float32(2), lambda x: x + 1.5,
    lambda x: x * np.sqrt(2), lambda x: x**0.5, lambda x: 2.0**x, lambda x: np.mean(x),
    lambda x: np.maximum(x, 1.5), lambda x: x @ X[0, :3], lambda x: np.where(x > 1, x, 0.5)],
    ids=range(11))
def test_integers_become_float32_too(function):
    ints = np.arange(1, 4)
    ours = jit(function, dtype="float32")(ints)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, function(ints), rtol=1e-6)


# ---------------------------------------------------------------- bound arguments


def layer(x, weight, bias=None):
    y = x @ weight["w"] + weight["b"]
    return (y, y.sum()) if bias is None else y + bias


ROOM = {"w": np.arange(6.0).reshape(3, 2), "b": np.array([1.0, -1.0])}


def test_a_bound_call_is_the_same_call():
    compiled = jit(layer).compile(np.ones((4, 3)), ROOM)
    bound = compiled.bind(weight=ROOM)
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(4, 3))
        for ours, theirs in zip(bound(x), layer(x, ROOM), strict=True):
            np.testing.assert_allclose(ours, theirs)


def test_a_bound_array_is_kept_alive_and_not_copied():
    held = {"w": np.ones((3, 2)), "b": np.zeros(2)}
    bound = jit(layer).compile(np.ones((1, 3)), held).bind(weight=held)
    w = held["w"]
    alive = weakref.ref(w)
    del held
    w[:] = 2
    assert bound(np.ones((1, 3)))[0].tolist() == [[6, 6]]
    del w
    gc.collect()
    assert alive() is not None and bound(np.ones((1, 3)))[1] == 12
    del bound
    gc.collect()
    assert alive() is None


def test_results_of_bound_calls_are_fresh():
    bound = jit(layer).compile(np.ones((1, 3)), ROOM).bind(weight=ROOM)
    first, second = bound(np.ones((1, 3))), bound(np.zeros((1, 3)))
    assert first[0].tolist() == [[7, 8]] and second[0].tolist() == [[1, -1]]


def test_bound_calls_from_many_threads():
    bound = jit(layer).compile(np.ones((4, 3)), ROOM).bind(weight=ROOM)

    def run(i):
        x = np.full((4, 3), float(i))
        return all(np.array_equal(bound(x)[0], layer(x, ROOM)[0]) for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(40)))


def test_binding_goes_on():
    x, y, z = np.ones(2), np.full(2, 3.0), np.full(2, 5.0)
    compiled = jit(lambda a, b, c: a * 100 + b * 10 + c).compile(x, y, z)
    assert compiled.bind(b=y)(x, z).tolist() == [135, 135]
    assert compiled.bind(b=y).bind(a=x)(z).tolist() == [135, 135]
    assert compiled.bind(a=x, b=y, c=z)().tolist() == [135, 135]
    assert compiled.bind(c=np.arange(4.0)[::2])(x, y).tolist() == [130, 132]  # a copy


def test_what_cannot_be_bound_is_refused_by_name():
    compiled = jit(layer).compile(np.ones((4, 3)), ROOM)
    bound = compiled.bind(weight=ROOM)
    for attempt, message in (
            (lambda: compiled.bind(bias=ROOM), "`bias` is no parameter"),
            (lambda: bound.bind(weight=ROOM), "`weight` is bound already.*left to bind: x\n"),
            (lambda: compiled.bind(weight=ROOM["w"]), "`weight` of another structure"),
            (lambda: compiled.bind(weight=ROOM | {"b": np.ones(3)}),
             r"weight\['b'\]: expected f64\[2\], got f64\[3\]"),
            (lambda: compiled.bind(x=np.ones((4, 3), np.float32)),
             r"x: expected f64\[4,3\], got f32"),
            (lambda: bound(np.ones((4, 2))), r"x: expected f64\[4,3\], got f64\[4,2\]"),
            (lambda: bound(np.ones((4, 3)), ROOM), "another structure; it takes x"),
            (lambda: bound(), "another structure")):
        with pytest.raises(errors.ArgumentError, match=message):
            attempt()


def test_a_bound_index_is_checked_in_each_call():
    table = np.arange(6.0).reshape(3, 2)
    bound = jit(lambda ids, t: t[ids]).compile(np.array([0]), table).bind(t=table)
    assert bound(np.array([-1])).tolist() == [[4, 5]]
    with pytest.raises(errors.OutOfRangeError, match="index 3 is out of bounds"):
        bound(np.array([3]))


# ---------------------------------------------------------------- guards


def test_the_quick_way_sees_every_difference():
    """One call makes the next one quick; each of these has to take the slow way."""
    f = jit(lambda x, tree, n=1: x + tree["k"] * n)
    x, tree = np.ones(3), {"k": np.ones(3)}
    f(x, tree)
    assert f(x.astype(np.float32), {"k": np.ones(3, np.float32)}).dtype == np.float32
    f(x, tree)
    assert f(np.arange(6.0)[::2], tree).tolist() == [1, 3, 5]  # not row after row
    assert f(x, {"k": np.ones(1)}).shape == (3,)
    assert f(x.astype(">f8"), tree).tolist() == [2, 2, 2]
    f(x, tree, n=1)
    assert f(x, tree, n=1.5).tolist() == [2.5] * 3
    assert f(x, tree, n=True).dtype == np.float64
    with pytest.raises(errors.TinymlirError):
        f(np.ma.masked_array(x, [True, False, False]), tree)
    with pytest.raises(KeyError):
        f(x, {"j": np.ones(3)})
    pair = jit(lambda p: p[0] - p[-1])
    one, two = np.full(2, 1.0), np.full(2, 2.0)
    assert pair((two, one)).tolist() == [1, 1]
    assert pair((two, one, two)).tolist() == [0, 0]
    assert pair([two, one]).tolist() == [1, 1]


def test_a_cleared_cache_is_empty():
    f = jit(lambda x: x + 1)
    f(np.ones(2))
    f.cache_clear()
    f(np.ones(2))
    assert len(f.cache) == 1


def test_options_of_another_kind_are_refused():
    for options in ({"donate": 3}, {"donate": [1]}, {"target": []}, {"dtype": 1}):
        with pytest.raises(errors.ArgumentError, match=next(iter(options))):
            jit(np.exp, **options)
    assert jit(lambda params: params + 1, donate="params").donate == ("params",)
