"""exp, tanh, log and sums, in units in the last place of the exact result."""
import numpy as np
import pytest

from tinymlir import jit

rng = np.random.default_rng(1)
ULPS = {"exp": 1, "tanh": 2, "log": 1, "sqrt": 0.5}  # the chapter says so of the first two
WIDER = {np.float32: np.float64, np.float64: np.longdouble}


def samples(dtype):
    """Dense near zero and one, over all magnitudes, and at the edges of exp."""
    info = np.finfo(dtype)
    limit = np.log(float(info.max))
    parts = [
        rng.uniform(-limit - 40, limit + 2, 60_000), rng.uniform(-1, 1, 60_000),
        rng.standard_normal(40_000) * 1e-3,
        np.exp2(rng.uniform(info.minexp, 9, 60_000)) * rng.choice([-1, 1], 60_000),
        [0.0, -0.0, np.inf, -np.inf, np.nan, limit, -limit, 0.625, -0.625,
         float(info.smallest_subnormal), float(info.tiny), -float(info.tiny)]]
    with np.errstate(all="ignore"):
        return np.concatenate(parts).astype(dtype)


def ulps(ours, exact, dtype):
    """The distance from the exact value, in spacings of the rounded exact value."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(dtype)
        spacing = np.spacing(np.abs(rounded)).astype(exact.dtype)
        error = np.abs(ours.astype(exact.dtype) - exact) / spacing
    agree = (ours == rounded) | (np.isnan(ours) & np.isnan(rounded))
    return np.where(agree, 0, error)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["exp", "tanh", "log", "sqrt"])
def test_functions_are_as_accurate_as_the_book_says(name, dtype):
    function = getattr(np, name)
    x = samples(dtype)
    x = np.abs(x) if name in ("log", "sqrt") else x
    with np.errstate(all="ignore"):
        exact = function(x.astype(WIDER[dtype]))
    error = ulps(jit(lambda x: function(x))(x), exact, dtype)
    worst = np.nanmax(error)
    assert not np.isnan(error).any() and worst <= ULPS[name], worst


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_sums_of_a_million_float32_are_at_least_as_accurate_as_numpys(offset):
    x = (rng.standard_normal(1_000_000) + offset).astype(np.float32)
    for function in (np.sum, np.mean, np.var):
        exact = function(x.astype(np.longdouble))
        ours = jit(function)(x)
        assert abs(ours - exact) <= abs(function(x) - exact) + np.spacing(abs(ours))


def test_nothing_hides_infinities_and_nan():
    x = np.array([np.inf, -np.inf, np.nan, 1.0])
    for function in (lambda x: x * 0, lambda x: x - x, lambda x: x / x, lambda x: 0 / x,
                     lambda x: x + 0.0, lambda x: np.exp(x) * 0, lambda x: x == x):
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(jit(function)(x), function(x))


def test_softmax_with_rows_of_minus_infinity():
    def softmax(x):
        e = np.exp(x - np.max(x, axis=-1, keepdims=True))
        return e / np.sum(e, axis=-1, keepdims=True)

    x = rng.standard_normal((4, 5))
    x[1, 2:] = -np.inf
    x[2] = -np.inf
    x[3, 0] = np.nan
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(jit(softmax)(x), softmax(x), rtol=1e-14)
