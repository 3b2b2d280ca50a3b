"""What the check on a GPU runs: functions of NumPy and arrays to run them on.

Nothing here imports a compiler. `CASES` has every operation there is, in every dtype it
takes, on shapes with edges; `SPEED` has the kernels that are timed, with the bytes they have
to move and the operations they have to do.
"""
from typing import NamedTuple

import numpy as np

from tinymlir import ops
from tinymlir.updates import attend, update

FLOATS, INTEGERS = ("float32", "float64"), ("int32", "int64")


class Case(NamedTuple):
    """A function, its arrays, and how many ulps it may be away from NumPy."""

    function: object
    arrays: tuple
    ulps: int = 0


def numbers(dtype, *shape, seed=0, low=-4, high=4):
    """Numbers without a pattern, none of them zero."""
    dice = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return (dice.uniform(low, high, shape) + 0.01).astype(dtype)
    made = dice.integers(low, high, shape)
    return np.where(made == 0, 1, made).astype(dtype)


ARITHMETIC = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "maximum": np.maximum, "minimum": np.minimum, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "neg": lambda a, b: -a,
    "abs": lambda a, b: abs(a), "where": lambda a, b: np.where(a < b, a, b),
    "cast": lambda a, b: a.astype(np.float64), "div": lambda a, b: a / b,
}
BITS = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
        "not": lambda a, b: ~a}
MATH = {"exp": np.exp, "log": lambda a: np.log(abs(a)), "sqrt": lambda a: np.sqrt(abs(a)),
        "tanh": np.tanh, "pow": lambda a: abs(a) ** 1.5, "cube": lambda a: a**3}
SHAPES = {
    "transpose": lambda a: a.transpose(2, 0, 1), "reshape": lambda a: a.reshape(-1, 5),
    "broadcast": lambda a: np.broadcast_to(a[0], (3, 9, 10)) + 0,
    "slice": lambda a: a[::-1, 1:, ::2],
    "concatenate": lambda a: np.concatenate([a, a[:, ::-1]], axis=1),
    "triu": lambda a: np.triu(a, 1), "tril": lambda a: np.tril(a),
}
ROWS = {"sum": np.sum, "max": np.max, "min": np.min, "mean": np.mean, "var": np.var}


def of_dtype(dtype):
    """What there is for every number."""
    a, b, cube = numbers(dtype, 37, 65), numbers(dtype, 65, seed=1), numbers(dtype, 7, 9, 10)
    found = {name: Case(function, (a, b)) for name, function in ARITHMETIC.items()}
    found |= {name: Case(function, (cube,)) for name, function in SHAPES.items()}
    for name, function in ROWS.items():
        for axis in (None, 0, 1, 2):
            found[f"{name} axis {axis}"] = Case(
                lambda a, f=function, axis=axis: f(a, axis=axis), (cube,), 200)
    found["matmul"] = Case(lambda a, b: a @ b, (
        numbers(dtype, 37, 65), numbers(dtype, 65, 70, seed=1)), 4000)
    return {f"{name} {dtype}": case for name, case in found.items()}


def cases():
    """Name -> Case."""
    found = {}
    for dtype in (*FLOATS, *INTEGERS):
        found |= of_dtype(dtype)
    for dtype in FLOATS:
        for name, function in MATH.items():
            found[f"{name} {dtype}"] = Case(function, (numbers(dtype, 37, 65),), 8)
    for dtype in (*INTEGERS, "bool"):
        a, b = (numbers("int32", 37, 65, seed=s).astype(dtype) for s in (0, 1))
        if dtype == "bool":
            a, b = a > 1, b > 1
        for name, function in BITS.items():
            found[f"{name} {dtype}"] = Case(function, (a, b))
    table, rows = numbers("float32", 50, 33), np.array([[0, -1, 7], [49, -50, 3]])
    found["gather"] = Case(lambda table, rows: table[rows], (table, rows))
    found |= products() | steps()
    for name, example in ops.EXAMPLES.items():
        function = lambda *arrays, e=example: e.function(*arrays, **e.static)  # noqa: E731
        found[name] = Case(function, example.arrays, 1 << 15)
    return found


def products():
    """Matrix products of odd shapes: edges, one row, one column, batches, mixed types."""
    shapes = [(1, 64, 100), (1, 5, 1), (64, 64, 64), (65, 127, 129), (3, 200, 1), (128, 16, 8)]
    found = {f"matmul {m} x {k} x {n}": Case(lambda a, b: a @ b, (
        numbers("float32", m, k), numbers("float32", k, n, seed=1)), 4000) for m, k, n in shapes}
    found["matmul float64 x float32"] = Case(lambda a, b: a @ b, (
        numbers("float64", 33, 65), numbers("float32", 65, 50)), 4000)
    found["matmul transposed"] = Case(lambda a, b: a @ b.T, (
        numbers("float32", 33, 65), numbers("float32", 50, 65)), 4000)
    found["matmul of batches"] = Case(lambda a, b: a @ b, (
        numbers("float32", 6, 33, 20), numbers("float32", 6, 20, 17)), 4000)
    return found


class Speed(NamedTuple):
    """A kernel to be timed. The arrays are made when they are wanted: they are large."""

    function: object
    make: object  # -> the arrays
    nbytes: int  # read and written
    flops: int
    dtype: str
    torch: object = None  # the same in PyTorch: a function of the module and the tensors
    ulps: int = 1 << 15
    cut: int = 0  # so many of the arrays can be cut into parts with some rows each


def many(*shape, seed=0):
    """Large arrays of float32 between -4 and 4, made quickly."""
    return np.random.default_rng(seed).random(shape, np.float32) * 8 - 4


def speed(small):
    """Name -> Speed; `small` is for a device that is not there."""
    rows, width = (4, 256) if small else (16384, 4096)
    size = rows * width
    one, both = 4 * size, 8 * size
    vectors = many(width, seed=1), many(width, seed=2)
    found = {
        "add": Speed(lambda a, b: a + b, lambda: (many(rows, width), many(rows, width, seed=1)),
                     both + one, size, "float32", lambda torch, a, b: a + b, 0, 2),
        "gelu": Speed(gelu32, lambda: (many(rows, width),), both, 9 * size, "float32",
                      lambda torch, a: torch.nn.functional.gelu(a, approximate="tanh"), cut=1),
        "softmax": Speed(ops.softmax, lambda: (many(rows, width),), both, 5 * size, "float32",
                         lambda torch, a: torch.softmax(a, -1), cut=1),
        "layer norm": Speed(ops.layer_norm, lambda: (many(rows, width), *vectors), both,
                            8 * size, "float32",
                            lambda torch, a, g, b: torch.nn.functional.layer_norm(
                                a, a.shape[-1:], g, b), cut=1),
    }
    for dtype, sizes in (("float32", (4096, 1024)), ("float64", (2048,))):
        for n in (32,) if small else sizes:
            found[f"matmul {n} {dtype}"] = product((n, n, n), dtype)
    found["matmul of one row"] = product((1, 32, 64) if small else (1, 4096, 16384), "float32")
    return found


def product(sizes, dtype):
    """A matrix product of these sizes."""
    m, k, n = sizes
    size = np.dtype(dtype).itemsize
    return Speed(lambda a, b: a @ b, lambda: (
        numbers(dtype, m, k, low=-1, high=1), numbers(dtype, k, n, seed=1)),
        size * (m * k + k * n + m * n), 2 * m * k * n, dtype, lambda torch, a, b: a @ b, 1 << 18)


def gelu32(x):
    """GELU that stays in float32, as PyTorch's does."""
    return 0.5 * x * (1 + np.tanh(float(np.sqrt(2 / np.pi)) * (x + 0.044715 * (x * x * x))))


# ---------------------------------------------------------------- chapter 10

def step(q, k, v, keys, values, position):
    """A step of attention with a cache."""
    keys, values = update(keys, k, position), update(values, v, position)
    return attend(q, keys, values, position, float(np.sqrt(q.shape[-1])))


def steps():
    """Rows of a buffer, written and attended to."""
    found = {}
    for dtype in FLOATS:
        for n, at in ((1, 0), (1, 299), (5, 120), (32, 0)):
            arrays = [numbers(dtype, *shape, seed=i) for i, shape in enumerate(
                [(4, n, 16), (n, 64), (n, 64), (300, 64), (300, 64)])]
            found[f"{n} rows at {at} {dtype}"] = Case(step, (*arrays, np.array(at)), 4000)
    return found
