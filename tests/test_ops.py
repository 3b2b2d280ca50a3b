"""Every operation, compiled and interpreted, against NumPy itself."""
import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from tinymlir import jit
from tinymlir.graph import evaluate, trace

NAN, INF = np.nan, np.inf
rng = np.random.default_rng(0)
F32 = rng.standard_normal((3, 4)).astype(np.float32)
F64 = rng.standard_normal((3, 4))
I32 = rng.integers(-9, 9, (3, 4)).astype(np.int32)
I64 = rng.integers(-9, 9, (3, 4))
BOOL = F64 > 0
EDGE = np.array([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-310, 1e300, -1e300, 0.5, 2.5])
ROW, COLUMN, ONE = F32[0], F64[:, :1], np.float32(3.0)
T3 = rng.standard_normal((2, 3, 4)).astype(np.float32)


def same(ours, numpys, ulps=0):
    """Equal shape and dtype; values equal, or within so many units in the last place."""
    ours, numpys = np.asarray(ours), np.asarray(numpys)
    assert (ours.dtype, ours.shape) == (numpys.dtype, numpys.shape)
    if ulps and ours.dtype.kind == "f":
        close = np.isclose(ours, numpys, rtol=ulps * np.finfo(ours.dtype).eps,
                           atol=np.finfo(ours.dtype).smallest_subnormal * ulps,
                           equal_nan=True)
        assert close.all(), (ours, numpys)
    else:
        np.testing.assert_array_equal(ours, numpys)


def check(function, *args, ulps=0):
    """NumPy, the interpreter and the compiled code agree."""
    with np.errstate(all="ignore"):
        expected = function(*args)
    graph, structure = trace(function, args, {})
    same(structure.fill(iter(evaluate(graph, *args))), expected)
    same(jit(function)(*args), expected, ulps)


BINARY = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y, "maximum": np.maximum, "minimum": np.minimum,
    "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y, "eq": lambda x, y: x == y, "ne": lambda x, y: x != y,
}
ARRAYS = {"f32": F32, "f64": F64, "i32": I32, "i64": I64, "bool": BOOL}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("left", ARRAYS)
@pytest.mark.parametrize("right", ARRAYS)
def test_binary_with_promotion(name, left, right):
    function, x, y = BINARY[name], ARRAYS[left], ARRAYS[right]
    try:
        with np.errstate(all="ignore"):
            function(x, y)
    except TypeError as theirs:  # bool - bool
        with pytest.raises(TypeError, match=str(theirs)[:30]):
            jit(function)(x, y)
        return
    check(function, x, y)


@pytest.mark.parametrize("number", [2, 2.5, True, np.float64(2.5), np.float32(2.5),
                                    np.int64(3), np.array(1.5), np.array(2, np.int32)])
@pytest.mark.parametrize("dtype", ARRAYS)
def test_scalars_are_weak_or_strong_as_in_numpy(number, dtype):
    x = ARRAYS[dtype]
    check(lambda x: x + number, x)
    check(lambda x: number * x, x)
    check(lambda x: np.where(x > 0, x, number), x)


UNARY = {
    "exp": (np.exp, 4), "log": (np.log, 4), "sqrt": (np.sqrt, 0), "tanh": (np.tanh, 4),
    "abs": (abs, 0), "neg": (lambda x: -x, 0), "square": (np.square, 0),
    "reciprocal": (np.reciprocal, 0), "isnan": (np.isnan, 0),
    "logical_not": (np.logical_not, 0), "positive": (lambda x: +x, 0),
    "x ** 2": (lambda x: x**2, 0), "x ** 3": (lambda x: x**3, 4),
    "x ** -1": (lambda x: x**-1, 0), "x ** 0.5": (lambda x: x**0.5, 0),
    "x ** 0": (lambda x: x**0, 0), "x ** 1": (lambda x: x**1, 0),
    "x ** 7": (lambda x: x**7, 4), "x ** -2": (lambda x: x**-2.0, 4),
    "x ** 1.7": (lambda x: x**1.7, 4), "2 ** x": (lambda x: 2**x, 4),
    "(-2) ** x": (lambda x: (-2.0) ** x, 4),
}


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unary_at_the_edges(name, dtype):
    function, ulps = UNARY[name]
    with np.errstate(all="ignore"):
        check(function, EDGE.astype(dtype), ulps=ulps)


@pytest.mark.parametrize("name", UNARY)
def test_unary_of_integers(name):
    function, ulps = UNARY[name]
    try:
        with np.errstate(all="ignore"):
            function(I32)
    except (TypeError, ValueError):
        with pytest.raises((TypeError, ValueError)):
            jit(function)(I32)
        return
    if name == "2 ** x" or name == "reciprocal":  # needs the numbers, or is not offered
        with pytest.raises(TypeError):
            jit(function)(I32)
        return
    check(function, I32, ulps=ulps)


AXES = [None, 0, 1, -1, (0,), (0, 1), (1, 0), (-1, -2), ()]
REDUCE = {"sum": (np.sum, 4), "max": (np.max, 0), "min": (np.min, 0),
          "mean": (np.mean, 4), "var": (np.var, 8), "std": (np.std, 8)}


@pytest.mark.parametrize("name", REDUCE)
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(name, axis, keepdims):
    function, ulps = REDUCE[name]
    for x in (F64, I32, BOOL):
        check(lambda x: function(x, axis=axis, keepdims=keepdims), x, ulps=ulps)
    numpys = function(F32, axis=axis, keepdims=keepdims)
    ours = jit(lambda x: function(x, axis=axis, keepdims=keepdims))(F32)
    assert (ours.dtype, ours.shape) == (numpys.dtype, np.shape(numpys))
    exact = function(F32.astype(np.float64), axis=axis, keepdims=keepdims)
    assert (abs(ours - exact) <= abs(numpys - exact) + 4e-7 * abs(exact)).all()


def test_reductions_of_three_axes_and_of_nan():
    check(lambda x: np.sum(x, axis=(0, 2)), T3, ulps=4)
    check(lambda x: np.max(x, axis=1, keepdims=True), T3)
    for row in ([1, NAN, 2], [NAN, 1, 2], [1, 2, NAN]):
        check(lambda x: (np.max(x) + np.min(x)), np.array(row))
    check(lambda x: np.var(x, axis=1, ddof=1), F64, ulps=8)
    check(lambda x: np.sum(x, dtype=np.float64), F32, ulps=4)
    check(lambda x: np.mean(x, axis=0, dtype=np.float32), I64, ulps=4)


SHAPES = [((3,), (3,)), ((3, 4), (4,)), ((3,), (3, 4)), ((3, 4), (4, 5)),
          ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((3, 4), (2, 4, 5)),
          ((2, 1, 3, 4), (5, 4, 2)), ((1, 7), (7, 9)), ((9, 7), (7, 1)),
          ((17, 33), (33, 19)), ((3, 0), (0, 4)), ((0, 3), (3, 4)), ((4,), (2, 4, 3)),
          ((8, 300), (300, 40)), ((13, 520), (520, 37))]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("types", ["f4 f4", "f8 f8", "f8 f4", "f4 f8", "i8 i8",
                                   "i4 f8", "? ?", "i4 i8"])
def test_matmul(shapes, types):
    arrays = []
    for shape, dtype in zip(shapes, types.split()):
        arrays.append((rng.standard_normal(shape) * 4).astype(dtype))
    expected = arrays[0] @ arrays[1]
    ours = jit(lambda a, b: a @ b)(*arrays)
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    exact = np.matmul(*(a.astype("f8") for a in arrays))
    if expected.dtype.kind == "f":
        bound = np.matmul(*(abs(a).astype("f8") for a in arrays))
        eps = np.finfo(expected.dtype).eps * (arrays[0].shape[-1] + 2)
        assert (abs(ours - exact) <= eps * bound + 1e-300).all()
    else:
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("types", ["f4 f4", "f8 f8", "f8 f4"])
def test_matmul_of_transposes(types):
    one, two = types.split()
    a, b = rng.standard_normal((5, 9)).astype(one), rng.standard_normal((9, 6)).astype(two)
    for function, args in (
            (lambda a, b: a @ b.T, (a, b.T.copy())),
            (lambda a, b: a.T @ b, (a.T.copy(), b)),
            (lambda a, b: a.T @ b.T, (a.T.copy(), b.T.copy())),
            (lambda a, b: a[:1] @ b.T, (a, b.T.copy())),
            (lambda a, b: a[0] @ b, (a, b))):
        np.testing.assert_allclose(jit(function)(*args), function(*args), rtol=2e-5)


MOVES = {
    "reshape": lambda x: x.reshape(4, 3), "reshape -1": lambda x: x.reshape(2, -1, 3),
    "reshape tuple": lambda x: np.reshape(x, (12,)), "ravel": lambda x: x.ravel(),
    "transpose": lambda x: x.T, "transpose arguments": lambda x: x.transpose(1, 0),
    "swapaxes": lambda x: np.swapaxes(x, 0, -1), "expand": lambda x: x[:, None, :, None],
    "squeeze": lambda x: np.squeeze(x[:1, None]), "row": lambda x: x[1],
    "element": lambda x: x[1, -2], "slice": lambda x: x[1:, ::2],
    "reversed": lambda x: x[::-1, 2:0:-1], "ellipsis": lambda x: x[..., 0],
    "empty slice": lambda x: x[3:], "steps": lambda x: x[::2, 1::3],
    "list": lambda x: x[[2, 0, -1]], "range": lambda x: x[range(2)],
    "list of one": lambda x: x[[1]], "matrix of rows": lambda x: x[np.array([[0], [2]])],
    "rows and slice": lambda x: x[[2, 0], 1:3], "no rows": lambda x: x[[]],
    "concatenate": lambda x: np.concatenate([x, x * 2, x[:1]]),
    "concatenate columns": lambda x: np.concatenate((x, x[:, :1]), axis=-1),
    "concatenate none": lambda x: np.concatenate([x, x[0]], axis=None),
    "stack": lambda x: np.stack([x, -x], axis=1), "hstack": lambda x: np.hstack([x, x]),
    "vstack": lambda x: np.vstack([x[0], x]), "triu": lambda x: np.triu(x, 1),
    "tril": lambda x: np.tril(x, k=-1), "triu of a row": lambda x: np.triu(x[0]),
    "where": lambda x: np.where(x > 0, x, 0), "broadcast_to":
    lambda x: np.broadcast_to(x[:, :1], (2, 3, 5)), "iteration":
    lambda x: sum(row * i for i, row in enumerate(x)), "T of T": lambda x: x.T.T[1:],
    "transposed slice": lambda x: x.T[1:3], "reshape of T": lambda x: x.T.reshape(2, 6),
    "constant": lambda x: np.ones(3) * 2, "mixed concatenate":
    lambda x: np.concatenate([x, np.arange(4)[None]]), "take":
    lambda x: np.take(x, [0, 2], axis=0),
    "head split": lambda x: x.reshape(3, 2, 2).transpose(1, 0, 2),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "?"])
def test_moves(name, dtype):
    if dtype == "?" and name in ("stack",):  # NumPy has no -bool
        return
    check(MOVES[name], (F64 * 4).astype(dtype))


@pytest.mark.parametrize("old", ARRAYS)
@pytest.mark.parametrize("new", ["f4", "f8", "i4", "i8", "?", float, int, bool])
def test_astype(old, new):
    check(lambda x: x.astype(new), ARRAYS[old] * 3)


def test_split_and_logic():
    for sections in (2, [1], [1, 3], [0, 2, 9]):
        function = jit(lambda x, cut=sections: np.split(x, cut, axis=1))
        for ours, theirs in zip(function(F32), np.split(F32, sections, axis=1)):
            same(ours, theirs)
    check(lambda x: (x > 0) & ~(x > 1) | (x < -1), F64)
    check(lambda x: (x & 3) ^ (x | 1), I64)
    check(lambda x: np.logical_and(x, x > 0), I32)
    check(lambda a, b: np.dot(a, b), F64, F64[0], ulps=4)


class Pair(NamedTuple):
    left: np.ndarray
    right: np.ndarray


@dataclasses.dataclass(frozen=True)
class Params:
    pairs: list
    name: str = "params"
    scale: float = 2.0


def test_pytrees_in_and_out():
    params = Params([Pair(F32, F64), {"w": I32, "n": None}])

    def function(params, rest):
        (pair, extra), (a, b) = params.pairs, rest
        return {"sum": pair.left * params.scale, "pair": Pair(pair.right + a, [b]),
                "again": params, "number": 3, "w": extra["w"]}

    ours, theirs = (f(params, (F64, ROW)) for f in (jit(function), function))
    same(ours["sum"], theirs["sum"])
    same(ours["pair"].left, theirs["pair"].left)
    same(ours["again"].pairs[0].right, F64)
    assert list(ours) == list(theirs)
    assert ours["number"] == 3 and ours["again"].name == "params"
    assert type(ours["pair"]) is Pair and type(ours["pair"].right) is list


def test_results_that_are_inputs_constants_or_twice_the_same():
    captured = np.arange(3.0)
    ours = jit(lambda x: (x, x, captured, x.T, x + 1, np.float32(7)))(F32)
    theirs = (F32, F32, captured, F32.T, F32 + 1, np.float32(7))
    for mine, numpys in zip(ours, theirs):
        same(mine, numpys)
    for one in ours:
        one[...] = 0  # fresh memory: nothing else changes
    assert F32.any() and captured.any() and ours[0] is not ours[1]
    y = jit(lambda x: ((y := x * 2), y))(F64)
    y[0][...] = 0
    assert y[1].any()


LAYOUTS = {
    "transposed": F64.T, "fortran": np.asfortranarray(F64), "reversed": F64[::-1, ::-1],
    "strided": np.repeat(F64, 2, 0)[::2], "big-endian": F64.astype(">f8"),
    "broadcast": np.broadcast_to(F64[0], (3, 4)), "empty": np.zeros((0, 4)),
    "misaligned": np.frombuffer(b"x" + F64.tobytes(), np.float64, offset=1),
    "scalar": np.float64(2), "0-d": np.array(2.0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_memory(layout):
    x = LAYOUTS[layout]
    same(jit(lambda x, y: (x * 2 + y))(x, x), np.asarray(x * 2 + x, np.float64))


def test_read_only_and_memory_mapped(tmp_path):
    x = F64.copy()
    x.flags.writeable = False
    same(jit(lambda x: x + 1)(x), x + 1)
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float64, mode="r", shape=x.shape)
    same(jit(lambda x: x + 1)(mapped), x + 1)


STACKS = [((4, 6, 8), (8, 5)), ((2, 3, 4, 8), (8, 5)), ((1, 6, 8), (8, 5))]


@pytest.mark.parametrize("shapes", STACKS, ids=str)
def test_a_stack_of_rows_times_a_matrix_is_a_product(shapes):
    a, b = (np.random.default_rng(5).standard_normal(shape) for shape in shapes)
    compiled = jit(lambda a, b: a @ b).compile(a, b)
    np.testing.assert_allclose(compiled(a, b), a @ b, rtol=1e-13)
    assert "call @matmul" in compiled.stages["scheduled"]
