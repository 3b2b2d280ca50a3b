"""Operators, functions, arguments and indices: the answer, or the error, of NumPy."""
import copy
import operator as op

import numpy as np
import pytest
from spec import battery

from tinymlir import errors, jit
from tinymlir.graph import trace

rng = np.random.default_rng(0)


def values(shape, dtype):
    return np.asarray(rng.standard_normal(shape) * 4).astype(dtype)


# ---------------------------------------------------------------- operators

OPERATORS = [op.add, op.sub, op.mul, op.truediv, op.lt, op.le, op.gt, op.ge, op.eq, op.ne,
             op.and_, op.or_, op.xor, np.add, np.less, np.logical_and, np.logical_or]
SIGNLESS = [np.maximum, np.minimum]  # which zero is larger? NumPy does not promise
ARRAYS = {"f4": values((2, 3), "f4"), "f8": values((2, 3), "f8"), "i4": values((2, 3), "i4"),
          "i8": values((2, 3), "i8"), "?": values((2, 3), "f8") > 0,
          "f4 0-d": np.array(1.5, "f4"), "i4 0-d": np.array(-3, "i4")}
OTHERS = {
    "Python": [2, -1, 0, 2.5, -0.0, True, False, np.nan, np.inf, 1e300, 1e-300],
    "large ints": [2**31, -2**31 - 1, 2**40, 2**53 + 1, 2**62, 2**63, 2**64, -2**63 - 1,
                   2**70, 2**130, -2**200, 2**1100],
    "NumPy": [np.float32(2), np.float64(2), np.int32(2), np.int64(2**40), np.True_],
    "0-d": [np.array(2), np.array(2.0), np.array(2, "i4"), np.array(True)],
    "arrays": [np.array([1, 2, 3]), np.array([[1.0], [2.0]], "f4"), np.array([1, 2])],
    "sequences": [[1, 2, 3], (1.0, 2.0, 3.0), [True, False, True], range(3), [[1]]],
    "strangers": ["a", None, {1}, b"x", object(), 1j, np.complex64(1), np.float16(2)],
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("kind", OTHERS)
def test_operators_on_either_side(kind, name):
    if kind == "strangers":
        return strangers(ARRAYS[name])
    if kind == "sequences" and "0-d" in name:
        return  # NumPy repeats a list for an integer scalar
    both = {f"{f.__name__} {i}": (f, other) for i, other in enumerate(OTHERS[kind])
            for f in OPERATORS + SIGNLESS}
    for functions, signs in ((OPERATORS, True), (SIGNLESS, False)):
        some = {k: v for k, v in both.items() if v[0] in functions}
        battery({k: lambda x, f=f, y=y: f(x, y) for k, (f, y) in some.items()}
                | {f"{k} reflected": lambda x, f=f, y=y: f(y, x)
                   for k, (f, y) in some.items()}, ARRAYS[name], signs=signs)


def strangers(x):
    """Operands that are no arrays, or of a dtype there is none of: TypeError."""
    for other in OTHERS["strangers"]:
        for f in (op.add, op.mul, op.lt, np.maximum):
            for function in (lambda x, y, f=f: f(x, y), lambda x, y, f=f: f(y, x)):
                with pytest.raises(TypeError):
                    trace(lambda x, function=function, y=other: function(x, y), (x,), {})


@pytest.mark.parametrize("name", ARRAYS)
def test_powers(name):
    exponents = [0, 1, 2, 3, 7, -1, 0.5, -0.5, 2.0, -0.0, 1e300, np.nan, np.inf, True, 2**31,
                 2**70, -2**70, np.float32(2), np.float64(0.5), np.int32(3), np.array(2),
                 np.array([2]), np.array([[3]]), [2]]
    if name == "?":
        exponents = [2.0, 0.5, -1.0, np.float32(2)]
    x = ARRAYS[name]
    floats = [y for y in exponents if np.asarray(y).dtype.kind == "f"] + [-2, 2, 10]
    floats = floats if name in ("f4", "f8", "f4 0-d") else [2.0, 0.5]
    battery({f"x ** {y!r}": lambda x, y=y: x**y for y in exponents}
            | {f"np.power(x, {y!r})": lambda x, y=y: np.power(x, y) for y in exponents}
            | {f"{y!r} ** x": lambda x, y=y: y**x for y in floats}, x, ulps=4)


@pytest.mark.parametrize("name", ["f4", "i8", "?"])
def test_operations_that_are_not_built_are_refused_by_name(name):
    for function, text in [
            (lambda x: x // 2, "np.floor_divide"), (lambda x: 7 // x, "np.floor_divide"),
            (lambda x: x % 2, "np.remainder"), (lambda x: divmod(x, 2), "np.divmod"),
            (lambda x: x << 1, "np.left_shift"), (lambda x: np.sin(x), "np.sin"),
            (lambda x: np.fmod(x, 2), "np.fmod"), (lambda x: np.add.at(x, 0, 1), "np.add.at"),
            (lambda x: np.add.outer(x, x), "np.add.outer"),
            (lambda x: np.tanh(x, out=np.empty(x.shape)), "out="),
            (lambda x: np.clip(x, 0, 1), "np.clip"), (lambda x: np.prod(x), "np.prod"),
            (lambda x: np.zeros_like(x), "np.zeros_like"), (lambda x: np.any(x), "np.any"),
            (lambda x: np.linalg.norm(x), "np.norm"),
            (lambda x: np.einsum("ij->i", x), "np.einsum"),
            (lambda x: np.sum(x, where=x > 0), "`where`"),
            (lambda x: np.sum(x, initial=3), "`initial`"),
            (lambda x: np.sum(x, out=np.empty(())), "`out`"),
            (lambda x: np.mean(x, dtype=int), "int64"),
            (lambda x: np.concatenate([x, x], dtype="f4"), "`dtype`"),
            (lambda x: x.reshape(-1, order="F"), "order='F'"),
            (lambda x: np.ravel(x, "F"), "`order`")]:
        with pytest.raises(errors.UnsupportedError, match=text):
            trace(function, (ARRAYS[name],), {})


def test_where_refuses_the_number_that_numpys_where_wraps():
    x = np.zeros(3, "i4")
    assert np.where(x == 1, x, 2**40 + 7).tolist() == [7, 7, 7]
    with pytest.raises(errors.NumberError, match="out of bounds for int32"):
        trace(lambda x: np.where(x == 1, x, 2**40 + 7), (x,), {})
    battery({"f4": lambda x: np.where(x == 1, x.astype("f4"), 1e300)}, x)


# ---------------------------------------------------------------- reductions

SHAPES = [(), (3,), (0,), (2, 3), (0, 3), (3, 0), (2, 0, 3), (2, 3, 4), (1, 3, 1)]
AXES = [None, 0, 1, -1, 2, -3, 5, (0,), (0, 1), (1, 0), (-1, 0), (0, 0), (0, -2), (), (0, 5),
        (0, 1, 2), [0], np.int64(0), np.array(0), np.array([0]), True, False, 0.0, "a",
        (None,), (True,), range(2), (np.int32(1),)]
REDUCTIONS = [np.sum, np.max, np.min, np.mean, np.var, np.std]
KEEP = [False, True, 0, 1, 2, None, "a", 0.5, [1], np.True_]


@pytest.mark.parametrize("function", REDUCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_axes_and_keepdims(function, shape):
    average, axis = function in (np.mean, np.var, np.std), -1 if shape else None
    bools = (True, False) if average and len(shape) < 2 else ()  # two mistakes at once
    axes = [a for a in AXES if not any(a is b for b in bools) and a != (True,)]
    cases = {f"axis={a!r}": lambda x, a=a: function(x, axis=a) for a in axes}
    cases |= {f"x.f({a!r})": lambda x, a=a: getattr(x, function.__name__)(a) for a in axes}
    cases |= {f"keepdims={k!r}": lambda x, k=k: function(x, axis=axis, keepdims=k) for k in KEEP}
    battery(cases, values(shape, "f8"), ulps=99, signs=False)
    battery(cases, values(shape, "i4"), ulps=99, signs=False, compiled=shape == (2, 3))


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "?"])
def test_the_dtype_that_is_asked_for(dtype):
    x = values((2, 3), dtype) * (1 if dtype == "?" else 3)
    cases = {f"{d!r}": lambda x, d=d: np.sum(x, axis=-1, dtype=d)
             for d in (None, "f4", "f8", "i4", "i8", "?", int, float, bool, np.float32)}
    cases |= {f"{f.__name__} {d!r}": lambda x, f=f, d=d: f(x, axis=0, dtype=d)
              for f in (np.mean, np.var, np.std) for d in (None, "f4", "f8", float)}
    battery(cases, x, ulps=64, signs=False)
    for d in ("f2", "c16", "u1", object, "M8[s]", "no such"):
        with pytest.raises(errors.DTypeError):
            trace(lambda x, d=d: np.sum(x, dtype=d), (x,), {})


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1,), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
def test_degrees_of_freedom(shape, dtype):
    battery({f"{f.__name__} {k}": lambda x, f=f, k=k: f(x, axis=0, **k)
             for f in (np.var, np.std) for k in (
                 {"ddof": 1}, {"ddof": 0}, {"ddof": 9}, {"ddof": -1}, {"ddof": 1.5}, {"ddof": True},
                 {"ddof": None}, {"ddof": "a"}, {"ddof": np.int64(2)}, {"ddof": np.array(1)},
                 {"correction": 1}, {"correction": 0}, {"ddof": 1, "correction": 1},
                 {"ddof": 0, "correction": 1}, {"ddof": 1, "correction": 0})},
            values(shape, dtype), ulps=16 if dtype != "f4" else 256)


# ---------------------------------------------------------------- moves

AXIS_OF = {
    "squeeze": np.squeeze, "expand_dims": np.expand_dims, "size": np.size,
    "split": lambda x, a: np.split(x, [1], axis=a), "x.squeeze": lambda x, a: x.squeeze(a),
    "concatenate": lambda x, a: np.concatenate([x, x], axis=a), "transpose": np.transpose,
    "rows": lambda x, a: np.concatenate(x, axis=a), "swapaxes": lambda x, a: np.swapaxes(x, a, 0),
    "x.transpose": lambda x, a: x.transpose(a), "reshape": lambda x, a: x.reshape(a),
    "broadcast_to": np.broadcast_to, "moveaxis": lambda x, a: np.moveaxis(x, a, 0),
    "stack": lambda x, a: np.stack([x, x], axis=a),
    "triu": lambda x, a: np.triu(x, a) if x.ndim and a != 0.0 else x,
}
NEW_SHAPES = [-1, (), (-1,), (1, -1), (3, -1), (-1, 3), (2, -1), (0, -1), (-1, 0), (-1, -1), (-2,),
              (6,), (3, 2), (2, 3), (1, 1, 1), (np.int64(6),), [6], (2.0,), ("a",), None, (True, 6),
              (0,), (0, 5), (2**40, 0)]
MOVES = {
    "ravel": np.ravel, "T": lambda x: x.T, "flatten": lambda x: x.flatten("C"), "copy":
    lambda x: x.copy(order="F"), "hstack": lambda x: np.hstack([x, x]), "vstack":
    lambda x: np.vstack([x, x]), "hstack rows": np.hstack, "len": len, "list": list,
    "unpack": lambda x: (lambda a, b: (b, a))(*x), "reversed": lambda x: list(reversed(x)),
    "sum()": sum, "dot": lambda x: np.dot(x, x.T) if x.ndim < 3 else x, "x @ x": lambda x: x @ x,
    "x.T @ x":
    lambda x: x.T @ x, "shape": lambda x: (np.shape(x), np.ndim(x), np.size(x)),
    "mixed": lambda x: np.concatenate([x, x.astype("f4"), x.astype("i4")]), "flat":
    lambda x: np.concatenate([x, x[..., None]], axis=None), "where": lambda x: np.where(x, x, -x),
    "weak": lambda x: np.where(x > 0, 1, 0), "weaker": lambda x: np.where(x > 0, 1, 0.5),
    "strong": lambda x: np.where(x > 0, 1.5, np.float32(2)), "list in where":
    lambda x: np.where([True], x, [2]), "0-d in where": lambda x: np.where(True, np.array(2, "i4"),
                                                                           x),
    "astype": lambda x: x.astype("f4", copy=False),
    "unsafe": lambda x: x.astype("i4", casting="unsafe"),
    "safe": lambda x: x.astype("i4", casting="safe"), "no dtype": lambda x: x.astype(),
    "+ list": lambda x: x + [x, x], "copies": lambda x: copy.deepcopy(x) + copy.copy(x),
    "logic": lambda x: np.logical_and(x, 2) | np.logical_or(0, x), "isnan": np.isnan,
    "inner sizes": lambda x: np.ones((2, 7)) @ x, "shapes": lambda x: x + np.ones((2, 7)),
    "no concatenate": lambda x: np.concatenate([x, np.ones((2, 7))]), "scalar @": lambda x: 2 @ x,
    "0-d @": lambda x: x @ np.array(2.0), "splits": lambda x: np.split(x, 2),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moves(shape):
    axes = [a for a in AXES if not isinstance(a, (range, list)) and a != (None,)]
    cases = {f"{n} {a!r}": lambda x, f=f, a=a: f(x, a) for n, f in AXIS_OF.items() for a in axes}
    cases |= {f"reshape {s}": lambda x, s=s: np.reshape(x, s) for s in NEW_SHAPES}
    cases |= {f"*{s}": lambda x, s=s: x.reshape(*s) for s in NEW_SHAPES if isinstance(s, tuple)}
    cases |= {f"broadcast_to {s}": lambda x, s=s: np.broadcast_to(x, s) for s in NEW_SHAPES[1:]}
    battery(cases | MOVES, values(shape, "f8"), ulps=8, signs=False)


TWELVE = [(12,), (12, 1), (1, 12), (3, 4), (4, 3, 1), (2, 6), (3, 1, 4), (2, 2, 3), (1, 3, 4, 1),
          (2, 1, 6, 1), (2, 3, 1, 2), (1, 1, 12)]


@pytest.mark.parametrize("old", TWELVE, ids=str)
def test_every_reshape_of_every_shape(old):
    battery({f"{new}": lambda x, s=new: (x.reshape(s), (x * 2).reshape(s) + 1, x.T.reshape(s) * 3,
                                         np.sum(x.reshape(s), -1), x.reshape(s).T.reshape(old))
             for new in TWELVE}, np.arange(12.0).reshape(old))


# ---------------------------------------------------------------- indices

KEYS = [0, 1, -1, 2, 5, -6, slice(None), slice(1, None), slice(None, None, -1),
        slice(None, None, 2),
        slice(-1, None, -2), slice(5, 1), slice(2, 0, -1), slice(-5, -4, -2), slice(1, 2, 3),
        slice(None, None, 0), slice(1.0, 2), slice(np.int64(1), 10**30), None, ..., np.int64(1),
        1.0,
        "a", 2**40, -2**70]
FIRST = [[], [0], [0, -1], [5], (0, 1), np.array([[0], [1]]), np.array([], int),
         np.array([], float),
         np.array(1), range(2), [[0, 1], [1, 0]], np.array([0, 1], "i4"), [0.5], [[]]]
REST = [slice(None), slice(1, None), ..., slice(None, None, -1)]


@pytest.mark.parametrize("shape", SHAPES + [(1, 4)], ids=str)
def test_indices(shape):
    keys = KEYS + [(a, b) for a in KEYS for b in KEYS]
    keys += [(a, b, c) for a in KEYS[:8] for b in KEYS[6:14] for c in (None, ..., -1)]
    keys += FIRST + [(f,) for f in FIRST] + [(f, r) for f in FIRST[:3] for r in REST]
    battery({f"[{k!r}]": lambda x, k=k: x[k] for k in keys}, values(shape, "f8"),
            compiled=len(shape) < 3)


@pytest.mark.parametrize("key", [True, False, np.True_, (True, 0), (0, True), (..., False),
                                 [True, False],
                                 np.array(True), np.array([True, False]), (0, [0, 1]),
                                 (slice(None), [0]), ([0], None), ([0], [1])], ids=repr)
def test_indices_that_are_refused(key):
    for x in (values((3,), "f8"), values((2, 3), "f8"), values((1, 1, 4), "f8")):
        with pytest.raises(TypeError, match="mask|first"):
            trace(lambda x: x[key], (x,), {})


# ---------------------------------------------------------------- what needs numbers

NEEDS = [bool, int, float, complex, lambda x: 1 if x else 2, lambda x: [1, 2][x],
         lambda x: 1.0 in x, lambda x: op.setitem(x, 0, 1), lambda x: op.delitem(x, 0),
         np.array, np.asarray, lambda x: np.array([x, x]),
         lambda x: range(x), lambda x: np.ones(3)[x:], lambda x: max(x, x + 1), lambda x: x[x > 0],
         lambda x: np.ones(x), lambda x: np.where(x > 0)]


@pytest.mark.parametrize("i", range(len(NEEDS)))
def test_what_needs_the_numbers_is_refused_with_a_way_out(i):
    with pytest.raises(TypeError, match="exist only when|while tracing|depends on|expected a seq"):
        jit(NEEDS[i])(np.array(1.5))


@pytest.mark.parametrize("change", [op.iadd, op.isub, op.imul, op.itruediv, op.ipow, op.imatmul,
                                    lambda x, y: op.iadd(np.ones((2, 2)), x)])
def test_in_place_operators_are_refused(change):
    with pytest.raises(errors.UnsupportedError, match=r"x = x \+ y"):
        trace(lambda x: change(x, 2), (np.ones((2, 2)),), {})


def test_errors_name_the_line_and_unknown_attributes_the_name():
    for function, text in [(lambda x: x + np.ones(7), "could not be broadcast"),
                           (lambda x: x.foo, "attribute `foo`"), (lambda x: x.stack(), "`stack`")]:
        with pytest.raises(errors.TinymlirError, match=text) as caught:
            trace(function, (np.ones(3),), {})
        assert "test_spec_protocol.py, line" in str(caught.value)
