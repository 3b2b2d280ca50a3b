"""Random programs: the compiled code does what NumPy does."""
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec import difference, interpreted, outcome

from tinymlir import jit

DTYPES = [np.dtype(t) for t in ("f4", "f8", "i4", "i8", "?")]
SIDES = st.sampled_from([1, 2, 3, 3, 5, 0])
SHAPES = st.one_of(st.tuples(SIDES, SIDES), st.tuples(SIDES, SIDES, SIDES), st.tuples(SIDES))
NUMBERS = st.sampled_from([0, 1, -2, 3, 0.5, -1.25, True, np.float64(1.5), np.float32(2),
                           np.int64(-3)])
LARGEST = 2**20  # the arithmetic stays exact, in float32 too

ONE = {  # from one array
    "neg": lambda x: -x, "abs": abs, "T": lambda x: x.T, "sum": lambda x: x.sum(0),
    "max": lambda x: np.max(x, axis=-1, keepdims=True), "row": lambda x: x[-1:],
    "flip": lambda x: x[::-1], "wide": lambda x: x.astype("f8"), "flat": lambda x: x.reshape(-1),
    "column": lambda x: x[..., None], "square": lambda x: x**2, "triu": lambda x: np.triu(x),
    "int": lambda x: x.astype("i4"), "positive": lambda x: np.where(x > 0, x, 0),
    "pick": lambda x: x[[0, -1]], "twice": lambda x: np.concatenate([x, x]),
    "steps": lambda x: x[..., ::2], "back": lambda x: x[::-1, ..., 1:], "cut": lambda x: x[1:],
    "inside": lambda x: x[..., 1:-1], "halves": lambda x: np.split(x, [1])[1],
    "split": lambda x: x.reshape(*x.shape[:-1], -1, 1), "stack": lambda x: np.stack([x, x], 1),
    "min": lambda x: x.min(), "not": lambda x: ~x, "tril": lambda x: np.tril(x, 1),
    "gram": lambda x: x @ x.T, "swap": lambda x: np.swapaxes(x, 0, -1),
    "wider": lambda x: np.broadcast_to(x, (2, *x.shape)), "last": lambda x: [*x][-1],
    "mask": lambda x: np.where(x == x, x, 0), "sum of all": lambda x: np.sum(x),
    "update": lambda x: np.concatenate([x[:1] * 2, x[1:]]), "narrow": lambda x: x.astype("f4"),
    "sum of none": lambda x: np.sum(x, axis=()), "unit": lambda x: x / 2,
}
TWO = {  # from two
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y,
    "max": np.maximum, "less": lambda x, y: x < y, "matmul": lambda x, y: x @ y,
    "outer": lambda x, y: x[..., None] * y, "where": lambda x, y: np.where(x, y, x),
    "concatenate": lambda x, y: np.concatenate([x, y]), "min": np.minimum,
    "beside": lambda x, y: np.concatenate([x, y], axis=-1), "matmul T": lambda x, y: x @ y.T,
    "again": lambda x, y: x @ y + x, "equal": lambda x, y: x == y, "or": lambda x, y: x | y,
}
SMOOTH = {  # rounded, so nothing is computed from them
    "tanh": np.tanh, "mean": lambda x: np.mean(x, axis=0), "exp": lambda x: np.exp(-abs(x)),
    "var": lambda x: np.var(x, axis=-1), "log": lambda x: np.log(x * x + 1), "power":
    lambda x: np.sqrt(abs(x)) ** 1.5,
}
STEPS = st.lists(st.tuples(st.sampled_from([*ONE, *TWO, *TWO, *SMOOTH, "number"]),
                           st.integers(0, 9), st.integers(0, 9), NUMBERS),
                 min_size=1, max_size=14)


def step(values, name, i, j, number):
    """One more value from values i and j."""
    x, y = values[i % len(values)], values[j % len(values)]
    if name == "number":
        return x * number
    one = ONE.get(name) or SMOOTH.get(name)
    return one(x) if one else TWO[name](x, y)


def accepted(steps, arrays):
    """The steps that NumPy can do, with small and exact results."""
    values, good = list(arrays), []
    for name, i, j, number in steps:
        i, j = i % len(values), j % len(values)
        ok, new = outcome(step, (values, name, i, j, number), warns=True)
        if not ok:
            continue
        new = np.asarray(new)
        exact = name in SMOOTH or not new.size or np.abs(new.astype(float)).max() < LARGEST
        if exact and new.ndim <= 4 and new.size <= 500 and new.dtype in DTYPES:
            good.append((name, i, j, number))
            values += [] if name in SMOOTH else [new]
    return good


def program(steps, kept):
    """A function of the steps. It returns all values, or those that are kept: what is not
    returned may be fused."""
    def run(*arrays):
        values, smooth = list(arrays), []
        for name, i, j, number in steps:
            new = step(values, name, i, j, number)
            (smooth if name in SMOOTH else values).append(new)
        return [values[i % len(values)] for i in kept] if kept else values, smooth
    return run


@settings(max_examples=300, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.too_slow])
@given(STEPS, st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1,
                       max_size=3), st.integers(0, 99),
       st.lists(st.integers(0, 16), max_size=4))
def test_random_programs(steps, inputs, seed, kept):
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(-4, 5, shape).astype(dtype) for shape, dtype in inputs]
    function = program(accepted(steps, arrays), kept)
    _, (exact, smooth) = outcome(function, arrays, warns=True)
    for engine in (interpreted, jit):
        ours, rounded = engine(function)(*arrays)
        assert len(ours) == len(exact) and len(rounded) == len(smooth)
        for mine, theirs in zip(ours, exact):
            assert difference(mine, theirs, signs=False) is None, engine.__name__
        for mine, theirs in zip(rounded, smooth):
            mine, theirs = np.nan_to_num(mine, nan=99), np.nan_to_num(theirs, nan=99)
            size = np.abs(theirs).max(initial=1)
            assert difference(mine / size, theirs / size, ulps=2**28, signs=False) is None
