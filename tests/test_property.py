"""Random programs: the compiled code does what NumPy does."""
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinymlir import jit

DTYPES = [np.dtype(t) for t in ("f4", "f8", "i4", "i8", "?")]
SIDES = st.sampled_from([1, 2, 3, 3, 5, 0])
SHAPES = st.one_of(st.tuples(SIDES, SIDES), st.tuples(SIDES, SIDES, SIDES), st.tuples(SIDES))
NUMBERS = st.sampled_from([0, 1, -2, 3, 0.5, -1.25, True, np.float64(1.5),
                           np.float32(2), np.int64(-3)])

ONE = {  # from one array
    "neg": lambda x: -x, "abs": abs, "T": lambda x: x.T, "sum": lambda x: x.sum(0),
    "max": lambda x: np.max(x, axis=-1, keepdims=True), "tanh": np.tanh,
    "mean": lambda x: np.mean(x, axis=0, keepdims=True), "row": lambda x: x[-1:],
    "flip": lambda x: x[::-1], "wide": lambda x: x.astype("f8"),
    "flat": lambda x: x.reshape(-1), "column": lambda x: x[..., None],
    "square": lambda x: x**2, "triu": lambda x: np.triu(x), "int": lambda x: x.astype("i4"),
    "positive": lambda x: np.where(x > 0, x, 0), "pick": lambda x: x[[0, -1]],
    "twice": lambda x: np.concatenate([x, x]), "unit": lambda x: x / 2,
    "steps": lambda x: x[..., ::2], "back": lambda x: x[::-1, ..., 1:], "cut": lambda x: x[1:],
    "inside": lambda x: x[..., 1:-1], "halves": lambda x: np.split(x, [1])[1], "split":
    lambda x: x.reshape(*x.shape[:-1], -1, 1), "stack": lambda x: np.stack([x, x], 1), "min":
    lambda x: x.min(), "not": lambda x: ~x, "tril": lambda x: np.tril(x, 1), "gram": lambda x: x @ x.T,
    "swap": lambda x: np.swapaxes(x, 0, -1), "wider": lambda x: np.broadcast_to(x, (2, *x.shape)),
    "mask": lambda x: np.where(x == x, x, 0), "last": lambda x: [*x][-1], "sum of all": lambda x: np.sum(x),
    "in place?": lambda x: np.concatenate([x[:1] * 2, x[1:]]), "narrow": lambda x: x.astype("f4"),
}
TWO = {  # from two
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "max": np.maximum, "less": lambda x, y: x < y, "matmul": lambda x, y: x @ y,
    "outer": lambda x, y: x[..., None] * y, "where": lambda x, y: np.where(x, y, x),
    "concatenate": lambda x, y: np.concatenate([x, y]), "beside": lambda x, y:
    np.concatenate([x, y], axis=-1), "matmul T": lambda x, y: x @ y.T, "min": np.minimum,
    "again": lambda x, y: x @ y + x, "equal": lambda x, y: x == y, "or": lambda x, y: x | y,
}
STEPS = st.lists(st.tuples(st.sampled_from(sorted(ONE) + sorted(TWO) + ["number"]),
                           st.integers(0, 9), st.integers(0, 9), NUMBERS),
                 min_size=1, max_size=14)


def program(steps, kept):
    """A function that applies the steps, skipping those NumPy refuses.

    It returns every value, or those that are kept: what is not returned may be fused."""
    def run(*arrays):
        values = list(arrays)
        for name, i, j, number in steps:
            x, y = values[i % len(values)], values[j % len(values)]
            try:
                if name == "number":
                    new = x * number
                else:
                    new = ONE[name](x) if name in ONE else TWO[name](x, y)
            except (TypeError, ValueError, IndexError):
                continue
            if new.ndim <= 4 and new.size <= 500 and new.dtype in DTYPES:
                values.append(new)
        return [values[i % len(values)] for i in kept] if kept else values
    return run


@settings(max_examples=150, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow])
@given(STEPS, st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1,
                       max_size=3), st.integers(0, 99),
       st.lists(st.integers(0, 16), max_size=4))
def test_random_programs(steps, inputs, seed, kept):
    rng = np.random.default_rng(seed)
    arrays = [(rng.standard_normal(shape) * 3).astype(dtype) for shape, dtype in inputs]
    function = program(steps, kept)
    with np.errstate(all="ignore"):
        expected = function(*arrays)
    ours = jit(function)(*arrays)
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if mine.dtype.kind == "f":
            with np.errstate(all="ignore"):
                size = np.nanmax(np.abs(theirs), initial=1, where=np.isfinite(theirs))
            eps = np.finfo(mine.dtype).eps
            np.testing.assert_allclose(mine, theirs, rtol=1e4 * eps, atol=1e3 * eps * size)
        else:
            np.testing.assert_array_equal(mine, theirs)
