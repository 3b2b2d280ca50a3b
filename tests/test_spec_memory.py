"""Layouts, empty arrays, aliases and reuse: memory that nobody should notice."""
import itertools

import numpy as np
import pytest
from spec import battery, difference

from tinymlir import errors, jit

rng = np.random.default_rng(0)


def values(shape, dtype):
    return np.asarray(rng.integers(-5, 6, shape)).astype(dtype)


# ---------------------------------------------------------------- layouts

LAYOUTS = {
    "plain": lambda x: x, "Fortran": np.asfortranarray, "transposed": lambda x: x.T.copy().T,
    "reversed": lambda x: x[::-1].copy()[::-1], "both reversed":
    lambda x: x[::-1, ::-1].copy()[::-1, ::-1], "steps": lambda x: np.repeat(x, 3, 1)[:, ::3],
    "rows of more": lambda x: np.repeat(x, 2, 0)[1::2], "big-endian":
    lambda x: x.astype(x.dtype.newbyteorder(">")), "misaligned":
    lambda x: np.frombuffer(b"abc" + x.tobytes(), x.dtype, offset=3).reshape(x.shape),
    "aligned to 4":
    lambda x: np.frombuffer(b"abcd" + x.tobytes(), x.dtype, offset=4).reshape(x.shape), "read-only":
    lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape), "window":
    lambda x: np.pad(x, 3)[3:-3, 3:-3], "stacked": lambda x: np.stack([x, x], -1)[..., 0],
}
PROGRAMS = {
    "elementwise": lambda x, y: x * 2 - y, "matmul": lambda x, y: x @ y.T, "reduce":
    lambda x, y: (x.sum(0), np.max(y, 1), np.min(x)), "move": lambda x, y: (x.T, x[::-1, 1:], y[1]),
    "join": lambda x, y: np.concatenate([x, y[:1], x]), "gather": lambda x, y: x[[2, 0, 2]],
    "same": lambda x, y: (x, y, x), "compare": lambda x, y: (x < y) | (x == 3),
}


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "?"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_arrays_may_lie_in_memory_as_they_like(name, dtype):
    if dtype == "?" and name == "elementwise":
        return  # NumPy does not subtract bools
    x, y = values((3, 5), dtype), values((3, 5), dtype)
    compiled = jit(PROGRAMS[name])
    expected = PROGRAMS[name](x, y)
    for one, two in itertools.product(LAYOUTS, ["plain", "reversed", "misaligned"]):
        a, b = LAYOUTS[one](x), LAYOUTS[two](y)
        before = a.tobytes(), b.tobytes()
        ours = compiled(a, b)
        found = [difference(m, t) for m, t in zip(*map(as_tuple, (ours, expected)))]
        assert not any(found), (one, two, found)
        assert before == (a.tobytes(), b.tobytes())
    assert len(compiled.cache) == 1


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f4", "i8", "?"])
def test_captured_arrays_may_lie_as_they_like_too(layout, dtype):
    x, w = values((3, 5), dtype), LAYOUTS[layout](values((3, 5), dtype))
    battery({"elementwise": lambda x: x * w, "returned": lambda x: (w, w.T, w[::-1]), "matmul":
             lambda x: x @ w.T, "transposed": lambda x: w.T @ x, "rows": lambda x: x + w[1],
             "joined": lambda x: np.concatenate([x, w, w[::2]])}, x)


def test_memory_mapped_and_broadcast_arrays(tmp_path):
    x = values((3, 5), "f8")
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float64, mode="r", shape=(3, 5))
    wide = np.broadcast_to(x[0], (3, 5))
    for f in PROGRAMS.values():
        battery({"mapped": f}, mapped, mapped)
        battery({"broadcast": f}, wide, x)


def test_the_same_and_overlapping_arrays_passed_twice():
    f = jit(lambda a, b, c: (a * 10 + b, c - a, a))
    x = np.arange(12.0)
    views = [x[:6], x[3:9], x[6:], x[:12:2], x[5::-1]]
    for a, b, c in itertools.product(views, repeat=3):
        a0, b0, c0 = a.copy(), b.copy(), c.copy()
        one, two, three = f(a, b, c)
        assert (one == a0 * 10 + b0).all() and (two == c0 - a0).all() and (three == a0).all()
    assert (x == np.arange(12.0)).all()


# ---------------------------------------------------------------- no elements

EMPTY = [(0,), (0, 3), (3, 0), (2, 0, 3), (0, 0), (1, 0), (0, 1, 2)]
ON_EMPTY = {
    "sum": lambda x: [np.sum(x, a, keepdims=k) for a in (None, 0, -1) for k in (False, True)],
    "max": lambda x: [np.max(x, a) for a in range(x.ndim) if x.shape[a]],
    "max of none": lambda x: np.max(x), "min of none": lambda x: np.min(x, 0), "mean": np.mean,
    "means": lambda x: np.mean(x, 0), "var": np.var, "std": lambda x: np.std(x, -1),
    "x @ x.T": lambda x: x @ x.T, "x.T @ x": lambda x: x.T @ x, "twice": lambda x: (x.T @ x) @ x.T,
    "chain": lambda x: np.tanh(x * 2 + 1), "self": lambda x: np.concatenate([x, x, x]),
    "with some": lambda x: np.concatenate([x, np.ones((2, *x.shape[1:])), x]),
    "last": lambda x: np.concatenate([x, x], axis=-1), "stack": lambda x: np.stack([x, x], -1),
    "reversed": lambda x: x[::-1], "none of it": lambda x: x[..., :0], "none": lambda x: x[5:2],
    "first": lambda x: x[0], "rows": lambda x: x[[]], "row": lambda x: x[[0]], "wrong row":
    lambda x: x[[7]], "flat": lambda x: x.reshape(-1), "flat to 2": lambda x: x.reshape(0, -1),
    "new": lambda x: x.reshape(4, 0), "T": lambda x: x.T, "expand": lambda x: x[:, None], "where":
    lambda x: np.where(x > 0, x, 1), "split": lambda x: np.split(x, [1]),
    "triu": lambda x: np.triu(x),
    "broadcast": lambda x: np.broadcast_to(x, (2, *x.shape)), "compare": lambda x: x == x, "cast":
    lambda x: x.astype("i4"), "int sum": lambda x: np.sum(x.astype("i4"), dtype="?"), "iterate":
    lambda x: [row + 1 for row in x], "unpack": lambda x: (lambda *rows: rows)(*x), "power":
    lambda x: x**2, "array power": lambda x: x ** np.array([2.0]), "length": len, "into some":
    lambda x: np.sum(x) + np.arange(3), "used later": lambda x: (np.sum(x @ x.T) + 1, x * 2),
}


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_arrays_without_elements(shape):
    battery(ON_EMPTY, np.zeros(shape))
    battery(ON_EMPTY, np.zeros(shape, "i4"), compiled=len(shape) == 2)


@pytest.mark.parametrize("sizes", [s for s in itertools.product((0, 2), repeat=4) if 0 in s],
                         ids=str)
def test_products_with_an_empty_dimension(sizes):
    n, i, j, k = sizes
    battery({
        "@": lambda a, b: a @ b, "row @": lambda a, b: a[0] @ b if i else a, "reused":
        lambda a, b: ((c := a @ b) + 1, c @ c.T, a + 1),
        "@ column": lambda a, b: a @ b[:, 0] if j else a,
    }, np.ones((i, k), "f4"), np.ones((k, j)))
    battery({"batch": lambda a, b: a @ b, "broadcast": lambda a, b: a @ b[0] if n else a},
            np.ones((n, i, k)), np.ones((n, k, j)))


def test_gathers_from_and_into_nothing():
    f = jit(lambda x, rows: x[rows])
    for shape, rows in [((0, 3), []), ((3, 0), [0, 2, -3]), ((3,), []), ((0,), []),
                        ((3, 2), [[], []])]:
        x, rows = np.ones(shape), np.array(rows, np.int64)
        assert difference(f(x, rows), x[rows]) is None
    for shape, rows in [((0, 3), [0]), ((3, 0), [3]), ((0,), [-1])]:
        with pytest.raises(errors.OutOfRangeError, match="out of bounds"):
            f(np.ones(shape), np.array(rows))


# ---------------------------------------------------------------- results are fresh

CONSTANT = np.arange(6.0).reshape(2, 3)
RESULTS = {
    "inputs": lambda x: (x, x), "views": lambda x: (x.T, x[:1], x[::-1], x.reshape(-1), x[None]),
    "constants": lambda x: (CONSTANT, CONSTANT, CONSTANT.T, np.float32(7)), "one value":
    lambda x: ((y := x * 2), y, y.T, [y, y + 0]),
    "broadcast": lambda x: np.broadcast_to(x, (2, 2, 3)),
    "products": lambda x: ((y := x @ x.T), y, y @ x, x),
    "sums": lambda x: ((s := np.sum(x)), s, s + x),
    "cut": lambda x: (np.split(x, 3, axis=1), x),
    "nothing done": lambda x: (x + 0, x * 1, x[:], +x),
    "same constant": lambda x: (x + CONSTANT, CONSTANT),
    "copies": lambda x: (x.copy(), x.astype("f8")),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_fresh_memory(name):
    x = values((2, 3), "f8")
    compiled, before = jit(RESULTS[name]), (x.copy(), CONSTANT.copy())
    battery({name: RESULTS[name]}, x)
    arrays = [*flat(compiled(x)), *flat(compiled(x)), x, CONSTANT]
    for i, one in enumerate(arrays[:-2]):
        assert one.flags.writeable and one.flags.c_contiguous
        assert not any(np.shares_memory(one, other) for other in arrays[i + 1:])
        one[...] = 77
    assert (x == before[0]).all() and (before[1] == CONSTANT).all()


def flat(tree):
    return [a for part in tree for a in flat(part)] if isinstance(tree, (tuple, list)) else [tree]


# ---------------------------------------------------------------- nothing is clobbered

REUSE = {  # a value is used again after something could have been computed in its place
    "after a product": lambda a, b: (c := a @ b, d := c + 1, c @ d, c),
    "sum and product": lambda a, b: ((c := a @ b) + (d := c @ b), c * d, c - d),
    "in a chain": lambda a, b: [(x := a), *[(x := x @ b + a) for _ in range(4)], x],
    "both factors": lambda a, b: ((c := a * 2) @ c, c + 1, c.T @ c, c),
    "update": lambda a, b: (np.concatenate([(c := a + b)[:2], c[2:] * 2, c[1:2]]), c),
    "insert": lambda a, b: (np.concatenate([(c := a @ b), c]), np.concatenate([c.T, a]), c),
    "max and rest": lambda a, b: ((c := a @ b) - np.max(c, 1, keepdims=True), c, np.max(c, 0) + c),
    "transposes": lambda a, b: ((c := a @ b).T @ c, c.T + c, c.T, c),
    "triangles": lambda a, b: (np.triu(c := a @ b), np.tril(c) + c, c),
    "slices": lambda a, b: ((c := a @ b)[1:] + c[:-1], c[::-1] + c, c[1] @ c, c),
    "where": lambda a, b: (np.where((c := a @ b) > 0, c, a), np.where(c > 0, a, c), c),
    "gather": lambda a, b: ((c := a @ b)[[2, 0, 0]] + c, c),
    "swap": lambda a, b: ([(p := a, q := b)] + [(p := q + 0, q := p + 0)] + [p @ q, q @ p])[2:],
    "accumulate": lambda a, b: (s := a + b, t := s + a @ b, s + t @ s, t),
    "rows": lambda a, b: [row @ b + row for row in a @ b] + [a @ b],
    "reductions": lambda a, b: ((s := np.sum(c := a @ b)), s + c, s * s, np.sum(s), np.max(s) + a),
    "three products": lambda a, b: ((c := a @ b) + (d := b @ a) + c @ d, d @ c, c, d),
    "one of two": lambda a, b: (np.split(c := a @ b, [1])[0] @ c, np.split(c, [1])[1] @ c.T),
    "sums of one": lambda a, b: [(f(s, dtype="f8") if f is np.sum else f(s)) + b[0]
                                 for s in (np.sum(a), a[0, 0]) for f in (np.sum, np.mean, np.max)],
    "integers": lambda a, b: ((c := (a @ b).astype("i8")) @ c, c + 1, c),
    "repeats": lambda a, b: ((c := a @ a), (d := c @ a), d @ c, d @ d, c @ d),
}


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
def test_a_value_used_again_is_still_there(dtype):
    for size in (3, 9):  # small enough for exact arithmetic
        a, b = (values((size, size), dtype) // 3 for _ in "ab")
        battery(REUSE, a, b, signs=False)


# ---------------------------------------------------------------- captured arrays

def test_captured_arrays_are_copied_when_traced_and_stay_out_of_the_program():
    w, table = np.ones(300_000), np.arange(12.0).reshape(4, 3)
    f = jit(lambda x: (x * w[:3] + np.sum(x), table[[3, 1]], w))
    before = f(np.ones(3))
    compiled = f.compile(np.ones(3))
    w[:], table[:] = 5, -1
    after = f(np.ones(3))
    for one, two in zip(before, after):
        assert difference(one, two) is None
    assert max(map(len, compiled.stages.values())) < 20_000


def test_a_captured_array_of_100_megabytes_is_one_more_argument():
    big = np.zeros(12_500_000)
    big[7] = 3
    f = jit(lambda x: (x + big)[5:9])
    compiled = f.compile(big)
    assert max(map(len, compiled.stages.values())) < 20_000
    assert (compiled(big) == [0, 0, 6, 0]).all()


# ---------------------------------------------------------------- more than there is

def test_arrays_larger_than_memory_are_refused_before_anything_runs():
    one, row = np.array(1.0), np.ones(2**20)
    for function, x in ((lambda x: np.broadcast_to(x, (2**45,)), one),
                        (lambda x: (x[:, None] * x)[0], row),
                        (lambda x: np.sum(np.broadcast_to(x, (2**43,))[:3]), one)):
        with pytest.raises(errors.TooLargeError, match="GiB of memory"):
            jit(function)(x)
    wide = jit(lambda x: np.sum(np.broadcast_to(x, (1000, 1000)), 0))
    assert (wide(np.ones(1000)) == 1000).all()


def test_arrays_of_many_dimensions():
    for n in (8, 32):
        x = values((1,) * (n - 2) + (2, 3), "f8")
        battery({"all": lambda x: ((x + 1).T, np.sum(x, -1), x.reshape(6) * 2,
                                   x @ x.swapaxes(-1, -2))}, x)
    with pytest.raises(errors.ShapeError, match="at most 32"):
        jit(lambda x: x + 1)(np.ones((1,) * 33))
