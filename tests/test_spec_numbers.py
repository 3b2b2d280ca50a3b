"""NaN, infinities, zeros with a sign, denormals, overflow and rounding."""
import numpy as np
import pytest
from spec import battery, difference

from tinymlir import errors, jit
from tinymlir.graph import trace

rng = np.random.default_rng(0)
WIDER = {"f4": np.float64, "f8": np.longdouble}
needs_longdouble = pytest.mark.skipif(np.finfo(np.longdouble).nmant <= 52,
                                      reason="no wider float to compare with")


def edges(dtype):
    """All the numbers that something is special about."""
    f = np.finfo(dtype)
    return np.array([
        0.0, -0.0, 1, -1, 2, -2, 3, -3, 0.5, -0.5, 1.5, -2.5, np.inf, -np.inf, np.nan, f.tiny,
        -f.tiny,
        f.smallest_subnormal, -f.smallest_subnormal, f.max, -f.max, f.eps, 1 + f.eps,
        1 - f.eps / 2, 1e10,
        -1e10, 88.7, -103, 709.7, -745, 2**24, 2**31, -2**31, 2**31 - 1, 2.0**53, 2.0**63,
        -2.0**63, 1e30,
    ]).astype(dtype)


def pairs(x):
    return [v.ravel() for v in np.meshgrid(x, x)]


BINARY = [np.add, np.subtract, np.multiply, np.true_divide, np.less, np.less_equal, np.greater,
          np.greater_equal, np.equal, np.not_equal, np.logical_and, np.logical_or]
BITS = [np.bitwise_and, np.bitwise_or, np.bitwise_xor]
UNARY = [np.exp, np.log, np.sqrt, np.absolute, np.negative, np.square, np.isnan, np.logical_not,
         np.positive]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_floats_at_the_edges(dtype):
    x, y = pairs(edges(dtype))
    battery({f.__name__: f for f in BINARY}, x, y)
    battery({"maximum": np.maximum, "minimum": np.minimum}, x, y, signs=False)
    battery({f.__name__: f for f in UNARY + [np.reciprocal]}, edges(dtype), ulps=4)
    battery({"tanh": np.tanh}, edges(dtype), ulps=4)
    battery({"x ** y": lambda x, y: x**y, "by one": lambda x, y: x ** y[3]}, x, y, ulps=4)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_an_exponent_that_is_known_only_at_run_time(dtype):
    x = edges(dtype)
    for y in (0.5, 2, -1, 0, 3, np.nan):
        for shape in ((), (1,), (1, 1)):
            battery({f"{y}": lambda x, y: x**y, "broadcast": lambda x, y: x[:, None] ** y},
                    x, np.full(shape, y, dtype), ulps=4)
        battery({"one": lambda x, y: x**y, "constant": lambda x, _, y=y: x ** np.array([y], dtype)},
                x[13:14], np.array([y], dtype), ulps=4)
        battery({"0-d": lambda x, y: x**y}, np.array(-np.inf, dtype), np.array(y, dtype), ulps=4)


@pytest.mark.parametrize("dtype", ["i4", "i8"])
def test_integers_wrap_as_numpys_do(dtype):
    info = np.iinfo(dtype)
    numbers = np.array([0, 1, -1, 2, -2, 3, 7, 46341, -46341, info.max, info.min, info.max - 1,
                        info.min + 1, 2**30, 10**9], dtype)
    x, y = pairs(numbers)
    battery({f.__name__: f for f in BINARY + BITS + [np.maximum, np.minimum]}, x, y)
    battery({f.__name__: f for f in UNARY + [np.tanh, np.invert]}, numbers, ulps=4)
    powers = [0, 1, 2, 3, 5, 31, 63, 64, 100, 2**31 - 1, 2**31, 2**62, 2**63, -1, True,
              np.int32(2), np.int64(3), np.array([2]), np.array([[3]]), [2], 2.0, -1.0]
    battery({f"** {p!r}": lambda x, p=p: x**p for p in powers}
            | {f"first ** {p!r}": lambda x, p=p: x[:1] ** p for p in powers}, numbers, ulps=4)
    battery({"sums": lambda x: (np.sum(x), np.sum(x, dtype="i4"), np.sum(x, dtype="?"), np.max(x)),
             "products": lambda x: (x[:, None] @ x[None], x @ x)}, numbers, ulps=4)


def test_bools_are_not_integers():
    x, y = pairs(np.array([True, False]))
    battery({f.__name__: f for f in [*BINARY, *BITS, np.maximum, np.minimum]}, x, y)
    battery({f.__name__: f for f in [*(u for u in UNARY if u is not np.square), np.tanh, np.invert]
             if f not in (np.exp, np.log, np.sqrt, np.tanh)}, x)  # float16 in NumPy
    battery({"reduce": lambda x, y: (np.sum(x), np.max(x), np.mean(x), np.sum(x, dtype="?"), x @ y),
             "powers": lambda x, y: (x**2.0, 2.0**x, True ** (x * 1.5))}, x, y)
    for f in (np.exp, np.tanh, np.square, lambda x: x**2, lambda x: x**y):
        with pytest.raises(errors.DTypeError):
            trace(f, (x,), {})


# ---------------------------------------------------------------- casts

@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("to", ["i4", "i8", "?", "f4", "f8"])
def test_casts_of_what_does_not_fit(dtype, to):
    info = np.iinfo(to if to[0] == "i" else "i8")
    x = np.concatenate([edges(dtype), [info.min, info.max, -0.9, 0.9, 2.0**31 - 0.5]]).astype(dtype)
    with np.errstate(all="ignore"):
        around = np.nextafter(x, np.inf), np.nextafter(x, -np.inf)
    cases = {"alone": lambda x: x.astype(to),
             "in a loop": lambda x: (x[:, None] + x * 0).astype(to),
             "0-d": lambda x: x[14].astype(to), "row": lambda x: x.reshape(-1, 1).astype(to)}
    for values in (x, *around):
        battery(cases, values)


# ---------------------------------------------------------------- NaN and infinities

@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 17, 33])
def test_nan_in_max_and_min_wherever_it_sits(length, dtype):
    f = jit(lambda x: (np.max(x), np.min(x), np.max(x[:, None] + x, 0), np.min(x[:, None] + x, 1),
                       np.max(x, keepdims=True), np.maximum(x, x[::-1]), np.minimum(x[0], x)))
    for at in range(length):
        x = rng.standard_normal(length).astype(dtype)
        x[at] = np.nan
        theirs = (x.max(), x.min(), np.max(x[:, None] + x, 0), np.min(x[:, None] + x, 1),
                  np.max(x, keepdims=True), np.maximum(x, x[::-1]), np.minimum(x[0], x))
        assert not any(difference(a, b) for a, b in zip(f(x), theirs))


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_infinities_in_rows(dtype):
    inf = np.inf
    x = np.array([[-inf] * 4, [inf] * 4, [-inf, inf, 0, 1], [-inf, -inf, 0, 1],
                  [np.nan, 0, inf, -inf],
                  [1e30, -1e30, 0, 0], [-0.0, 0.0, -0.0, 0.0]], dtype)
    battery({"softmax": softmax, "masked": lambda x: softmax(np.where(np.tri(7, 4) > 0, x, -inf)),
             "sums": lambda x: (np.sum(x, 1), np.mean(x, 0), np.max(x, 1), np.min(x, 0)), "var":
             lambda x: np.var(x, 1), "log": lambda x: np.log(np.sum(np.exp(x), 1))}, x, ulps=8,
            signs=False)


def test_nothing_is_simplified_that_hides_nan_or_infinity():
    x = edges("f8")
    battery({"x * 0": lambda x: x * 0, "x - x": lambda x: x - x, "x / x": lambda x: x / x,
             "0 / x": lambda x: 0 / x, "x + 0": lambda x: x + 0.0, "x - 0": lambda x: x - 0.0,
             "0 - x": lambda x: 0 - x, "-0 + x": lambda x: -0.0 + x, "x * 1": lambda x: x * 1,
             "x == x": lambda x: x == x, "x != x": lambda x: x != x, "x <= x": lambda x: x <= x,
             "not <": lambda x: ~(x < 1), "0 * exp": lambda x: 0 * np.exp(x),
             "x ** 0": lambda x: x**0,
             "1 ** x": lambda x: 1.0**x, "where": lambda x: np.where(x < 0, np.nan, x) * 0,
             "min max": lambda x: np.minimum(np.maximum(x, 0.5), 1.0),
             "1 / 1 / x": lambda x: 1 / (1 / x),
             "sqrt sqr": lambda x: np.sqrt(x * x), "log exp": lambda x: np.log(np.exp(x)) - x,
             "a + b - a": lambda x: (x + 1e300) - 1e300, "x * 3 / 3": lambda x: x * 3 / 3,
             "folded": lambda x: x + np.exp(np.array(1e4)) * 0, "0 - (-x)": lambda x: 0 - (-x)}, x,
             ulps=2)


# ---------------------------------------------------------------- denormals

@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_denormals_are_not_flushed(dtype):
    info = np.finfo(dtype)
    x = (info.smallest_subnormal * np.arange(1, 500, 7)).astype(dtype)
    y = np.concatenate([x, -x, info.tiny * np.linspace(0.1, 4, 50)]).astype(dtype)
    battery({"arithmetic": lambda x: (x + x, x * 0.5, x * 3, x / 7, x - x[0], -x, abs(x), x > 0,
                                      x * x),
             "sums": lambda x: (np.sum(x), np.max(x), np.min(x), np.mean(x)), "sqrt": np.sqrt,
             "product": lambda x: x[:, None] @ np.ones((1, 3), dtype),
             "row": lambda x: x @ x.astype("f8"),
             "casts": lambda x: (x.astype("f4"), x.astype("f8"), x.astype("i4"), x.astype("?")),
             "large": lambda x: x * (1 / np.finfo(dtype).tiny)}, y)
    battery({"log": lambda x: np.log(abs(x)), "tanh": np.tanh, "exp": np.exp,
             "power": lambda x: abs(x) ** 0.75}, y, ulps=4)


# ---------------------------------------------------------------- accuracy

def ulps(ours, exact, dtype):
    """The largest distance from the exact value, in spacings of the rounded one."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(dtype)
        error = abs(ours.astype(exact.dtype) - exact) / np.spacing(abs(rounded)).astype(exact.dtype)
    agree = (ours == rounded) | (np.isnan(ours) & np.isnan(rounded))
    return np.max(np.where(agree, 0, error))


@needs_longdouble
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_powers_within_four_ulps(dtype):
    n, limit = 200_000, np.log(float(np.finfo(dtype).max))
    base = np.exp(rng.uniform(-limit, limit, n) * rng.choice([1, 1e-3, 1e-6], n)).astype(dtype)
    exponent = (rng.standard_normal(n) * rng.choice([1, 30, 1e-3, 1e5], n)).astype(dtype)
    exponent[::5] = np.round(exponent[::5])
    base[::10] *= -1
    with np.errstate(all="ignore"):
        exact = np.power(base.astype(WIDER[dtype]), exponent.astype(WIDER[dtype]))
    assert ulps(jit(lambda x, y: x**y)(base, exponent), exact, dtype) <= 4
    for p in (2, 3, -1, 0.5, 7, -2, 1.7, -0.5, 1 / 3, 10):
        with np.errstate(all="ignore"):
            exact = np.power(base.astype(WIDER[dtype]), WIDER[dtype](np.dtype(dtype).type(p)))
        assert ulps(jit(lambda x, p=p: x**p)(base), exact, dtype) <= 4, p


@needs_longdouble
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("name", ["log", "exp", "tanh", "sqrt"])
def test_functions_near_the_numbers_where_they_are_hard(name, dtype):
    info, function = np.finfo(dtype), getattr(np, name)
    steps = np.arange(-3000, 3000) * info.eps
    x = np.concatenate([1 + steps, np.log(2.0) / 2 + steps, 0.625 + steps, steps, steps * 1e3,
                        info.tiny * np.linspace(0, 3, 4000), rng.uniform(0.5, 2, 50_000),
                        info.smallest_subnormal * np.arange(1.0, 4000)]).astype(dtype)
    x = np.concatenate([x, np.nextafter(x, np.dtype(dtype).type(9))])
    x = abs(x) if name in ("log", "sqrt") else np.concatenate([x, -x])
    with np.errstate(all="ignore"):
        exact = function(x.astype(WIDER[dtype]))
    assert ulps(jit(lambda x: function(x))(x), exact, dtype) <= (0.5 if name == "sqrt" else 4)


@pytest.mark.parametrize("other", ["f4", "f8", "i4", "i8", "?"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "?"])
def test_mixed_operands_are_rounded_once(dtype, other):
    x, y = (np.array([0, 1, 2**24 + 1, 2**30 + 1, -2**31 + 1, 3]).astype(t) for t in (dtype, other))
    cases = {f.__name__: f for f in BINARY if f is not np.subtract or "?" not in dtype + other}
    cases |= {"where": lambda x, y: np.where(x < y, x, y), "@": lambda x, y: x @ y, "concatenate":
              lambda x, y: np.concatenate([x, y]), "scalar": lambda x, y: x[0] + y, "list":
              lambda x, y: x + [1, 2, 3, 4, 5, 2**53 + 1]}
    battery(cases, x, y, signs=False)
