"""Chapter 8: every kernel against NumPy by the emulator, and its PTX against ptxas."""
import functools
import itertools
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import test_ops
import tiny

from tinymlir import (
    cache, cuda, emulator, errors, factors, fused, gpu, groups, occupancy, ops, ownership, ptx,
    routines, saved, simt, store, tiles, turned, vram)
from tinymlir.checkpoint import BUNDLED, Block, Params, read_checkpoint
from tinymlir.cli import main
from tinymlir.graph import trace
from tinymlir.jit import jit
from tinymlir.model import PLAIN, Model, Sublayers, load_model
from tinymlir.plan import ALIGNMENT, Buffer, Copy, Launch, Plan, Pointer
from tinymlir.pytree import flatten
from tinymlir.rewrites import improve, narrow
from tinymlir.routines import Run
from tinymlir.updates import attend, update

dice = np.random.default_rng(0)


def graph_of(function, args, static=None):
    return improve(trace(function, args, static or {})[0])


def coarse(graph):
    return replace(graph, precision="tf32")


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"))


def emulated(function, args, static=None):
    """What the emulator makes of a function, forwards; backwards has to be the same bits."""
    graph = graph_of(function, args, static)
    arrays = [leaf for arg in args for _, leaf in flatten(arg, "x")[0]]
    program = emulator.load(graph)
    ours = program(arrays)
    program.backwards = True
    for one, other in zip(ours, program(arrays)):
        np.testing.assert_array_equal(one, other)
    return program, ours[:len(graph.outputs)]


@pytest.fixture(autouse=True)
def fresh_dice():
    """The same numbers for a test, whichever tests ran before it."""
    dice.bit_generator.state = np.random.default_rng(0).bit_generator.state


def near(function, *args, ulps):
    """The emulator agrees with NumPy within some units of the largest number's last place:
    for sums in which large numbers cancel."""
    program, ours = emulated(function, args)
    expected = function(*args)
    expected = expected if isinstance(expected, (list, tuple)) else [expected]
    for one, other in zip(ours, expected):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        most = ulps * np.finfo(other.dtype).eps * np.max(abs(other))
        np.testing.assert_allclose(one, other, rtol=0, atol=most)
    return program


def check(function, *args, ulps=4, **static):
    """The emulator agrees with NumPy: shape, dtype and value."""
    program, ours = emulated(function, args, static)
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        expected = function(*args, **static)
    expected = expected if isinstance(expected, (list, tuple)) else [expected]
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected):
        test_ops.same(one, other, ulps)
    return program


def together(functions):
    """Many functions of the same arguments as one, so that they compile together."""
    return lambda *args: [f(*args) for f in functions]


# ---------------------------------------------------------------- every operation

@pytest.mark.parametrize("left", test_ops.ARRAYS)
def test_binary_operations(left):
    x = test_ops.ARRAYS[left]
    pairs = [(f, y) for f in test_ops.BINARY.values() for y in test_ops.ARRAYS.values()
             if not (f is test_ops.BINARY["sub"] and x.dtype == y.dtype == bool)]
    check(lambda x: [f(x, y) for f, y in pairs], x, ulps=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_at_the_edges(dtype):
    with np.errstate(all="ignore"):
        edge = test_ops.EDGE.astype(dtype)
    check(together([f for f, _ in test_ops.UNARY.values()]), edge)


@pytest.mark.parametrize("dtype", ["F64", "I32", "BOOL", "T3"])
def test_reductions_over_any_axes(dtype):
    x = getattr(test_ops, dtype)
    axes = [a for n in range(x.ndim + 1) for a in itertools.combinations(range(x.ndim), n)]
    kinds = [(f, a, k) for f in (np.sum, np.max, np.min) for a in axes for k in (False, True)]
    ulps = 0 if x.dtype.kind != "f" else 4
    program = check(lambda x: [f(x, axis=a, keepdims=k) for f, a, k in kinds], x, ulps=ulps)
    kernels = {name.split("_")[0] for name in program.device.kernels}
    assert {"row", "column", "map"} <= kernels


@pytest.mark.parametrize("columns", [1, 3, 32, 100, 129, 1000, 4096, 40000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_every_length(columns, dtype):
    """In a warp, in a block, in registers, and longer than registers."""
    x = dice.standard_normal((3, columns)).astype(dtype)
    program, (ours, total, large) = emulated(
        lambda x: (ops.softmax(x), np.sum(x, axis=1), np.max(x, axis=1) + 1), (x,))
    exact = x.astype(np.float64)
    tolerance = 32 * np.finfo(dtype).eps
    np.testing.assert_allclose(ours, ops.softmax(exact), rtol=tolerance)
    np.testing.assert_allclose(total, exact.sum(1), atol=tolerance * columns)
    np.testing.assert_array_equal(large, x.max(1) + 1)


@pytest.mark.parametrize("depth", [1, 7, 300])
def test_columns_of_every_length(depth):
    x = dice.integers(-99, 99, (depth, 70)).astype(np.float64)  # whose sums are exact
    check(lambda x: (np.sum(x, axis=0), np.max(x, axis=0) * 2), x, ulps=0)


LONG = [((100003,), 0), ((1 << 17,), 0), ((32769,), None), ((2, 40001), 1), ((40001, 2), 0),
        ((300, 301), None), ((3001, 33), 0), ((2, 50001, 3), 1), ((63, 32770), 1),
        ((2, 2000, 3, 20), (1, 3)), ((20000, 1, 5), 0)]


def launched(program):
    """What kind of kernel ran, and in how many blocks."""
    return [(s.kernel.split("_")[0], s.grid[0]) for s in program.plan.launches]


@pytest.mark.parametrize("shape, axis", LONG, ids=str)
def test_few_long_reductions_use_many_blocks(shape, axis):
    x = dice.standard_normal(shape)
    program, (total, large, far) = emulated(
        lambda x: (np.sum(x, axis=axis) * 2 + 1, np.max(x, axis=axis), np.sum(x * x, axis=axis)),
        (x,))
    n = x.size // total.size
    tolerance = n * 2.0**-53
    np.testing.assert_allclose(total, x.sum(axis) * 2 + 1, rtol=0, atol=tolerance * n)
    np.testing.assert_array_equal(large, x.max(axis))
    np.testing.assert_allclose(far, (x * x).sum(axis), rtol=tolerance)
    assert (total.shape, total.dtype) == (x.sum(axis).shape, x.dtype)
    kinds = launched(program)
    assert [kind for kind, _ in kinds] == ["parts", "total"] * 3
    assert all(blocks >= 128 for kind, blocks in kinds if kind == "parts")


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "?"])
@pytest.mark.parametrize("shape, axis", [((65537,), None), ((3, 40000), 1), ((9001, 5), 0)],
                         ids=str)
def test_long_reductions_of_every_type(shape, axis, dtype):
    x = dice.integers(-4, 4, shape).astype(dtype)
    check(lambda x: [f(x, axis=axis, keepdims=k) for k in (False, True)
                     for f in (np.sum, np.max, np.min)], x, ulps=0)


def test_long_reductions_with_nan_and_infinity():
    x = dice.standard_normal((3, 40000))
    x[0, 39999], x[1, 7], x[2] = np.nan, -np.inf, -np.inf
    check(lambda x: (np.max(x, axis=1), np.min(x, axis=1), np.sum(x, axis=1)), x, ulps=40000)


def test_what_surrounds_a_long_reduction():
    """Numbers before it are kept too; what needs the total is a kernel of its own."""
    x = dice.random((2, 40000))
    program = near(lambda x: (ops.softmax(x), np.mean(x, axis=1), np.std(x, axis=1)), x, ulps=64)
    kinds = [kind for kind, _ in launched(program)]
    assert kinds.count("parts") == kinds.count("total") and "row" not in kinds

    def both(x):
        y = np.exp(x) + 1
        return y, np.sum(y, axis=1) * 2, np.sum(y), y - np.max(y)

    near(both, x, ulps=64)
    v = dice.integers(-9, 9, (1, 50001)).astype("f8")
    check(lambda v: (v @ v.T, v @ np.concatenate([v, v * 2]).T, np.sum(v[:, ::-1], axis=1)), v,
          ulps=0)


def test_how_long_is_long():
    for shape, several in (((1 << 15,), False), (((1 << 15) + 1,), True), ((64, 40000), False),
                           ((63, 40000), True), ((128, 40000), False)):
        plan = gpu.compile_graph(graph_of(lambda x: np.sum(x, axis=-1), (zeros(*shape),)))
        assert (len(plan.launches) == 2) == several, shape


def test_what_comes_in_a_row_is_one_kernel():
    for name, kernels in (("softmax", 1), ("layer_norm", 1), ("gelu", 1), ("linear", 1),
                          ("attention_sublayer", 6), ("feed_forward_sublayer", 3)):
        example = ops.EXAMPLES[name]
        plan = gpu.compile_graph(graph_of(example.function, example.arrays, example.static))
        assert len(plan.launches) == kernels, name


def test_a_chain_that_cannot_be_one_kernel_is_in_order():
    """y needs all of the row sums of the other axis; z all of y."""
    def function(x):
        y = x - np.sum(x, axis=0)[:, None]
        z = y @ y.T + np.max(y)
        return z, y, np.sum(z * x, axis=1), z[::-1] + y

    near(function, dice.standard_normal((9, 9)), ulps=64)


def test_moves():
    check(together(test_ops.MOVES.values()), test_ops.F32, ulps=0)


TURNED = {  # function of arrays (70, 45), (45, 70) and (3, 33, 40)
    "copy": lambda x, y, z: x.T,
    "before": lambda x, y, z: (x + 1).T,
    "after": lambda x, y, z: np.exp(x.T) + 1,
    "both ways": lambda x, y, z: (x.T * y, y.T + x),
    "two of them": lambda x, y, z: x.T + (x * 2).T * y,
    "a stack": lambda x, y, z: z.transpose(0, 2, 1) * 2,
    "first to the end": lambda x, y, z: z.transpose(1, 2, 0) + 1,
    "last to the front": lambda x, y, z: z.transpose(2, 0, 1) + z[0, 0, 0],
    "all three": lambda x, y, z: z.transpose(2, 1, 0),
    "two different": lambda x, y, z: (z.reshape(33, 3, 40)[:, 0, :33].T + x[:33, :33]
                                      + z.transpose(2, 1, 0)[:33, :, 0].T),
    "a part": lambda x, y, z: x.T[::2, 1:] * 2,
    "backwards": lambda x, y, z: x[::-1].T + x.T[::-1],
    "flat": lambda x, y, z: x.T.reshape(-1) - 1,
    "seven": lambda x, y, z: sum((x * np.float32(i)).T for i in range(7)) + x.T,
    "with numbers": lambda x, y, z: np.where(np.arange(70) > np.arange(45)[:, None], x.T, y),
    "a product of it": lambda x, y, z: (x.T * 2) @ x + 1,
    "a row of it": lambda x, y, z: ops.softmax(x.T),
    "a column of it": lambda x, y, z: np.max(x.T, axis=0) + 1,
}


@pytest.mark.parametrize("name", TURNED)
def test_transpositions(name):
    x, y, z = (dice.integers(-9, 9, s).astype("f4") for s in ((70, 45), (45, 70), (3, 33, 40)))
    check(TURNED[name], x, y, z, ulps={"after": 4, "a row of it": 64}.get(name, 0))


def test_transpositions_along_two_loops():
    """One read has its neighbours along the first loop, and one along the second."""
    x = np.arange(17 * 18 * 19.).reshape(18, 19, 17)
    y = x.reshape(19, 17, 18)
    program = check(lambda x, y: x.transpose(2, 0, 1) + y.transpose(1, 2, 0), x, y, ulps=0)
    assert [kind for kind, _ in launched(program)] == ["turned"]


@pytest.mark.parametrize("shape", [(16, 16), (17, 31), (32, 32), (33, 64), (1, 40), (40, 1),
                                   (15, 200), (16, 200), (100, 65), (0, 40)], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "?"])
def test_transpositions_of_every_size(shape, dtype):
    x = (dice.standard_normal(shape) * 9).astype(dtype)
    program = check(lambda x: (x.T, np.maximum(x.T, x.T[:, ::-1])), x, ulps=0)
    assert ("turned" in dict(launched(program))) == (min(shape) >= 16)


def lines_of_memory(function, x):
    """For each access of a warp to device memory: lines of 128 bytes that it touches, and
    the fewest that could hold so many bytes."""
    plan = gpu.compile_graph(graph_of(function, (x,)))
    memory, touched = vram.Memory(1 << 24), []
    places = [memory.alloc(b.nbytes) for b in plan.buffers]
    memory.view(places[0], x.nbytes)[:] = np.frombuffer(x.tobytes(), np.uint8)
    find = memory.places

    def noted(addresses, nbytes):
        touched.extend((len(set(warp // 128)), nbytes * 32 // 128)
                       for warp in np.reshape(addresses, (-1, 32)))
        return find(addresses, nbytes)

    memory.places = noted
    known = ptx.kernels(plan.ptx)
    for step in plan.launches:
        kernel = known[step.kernel]
        given = [np.uint64(places[p.buffer] + p.offset) for p in step.arguments]
        simt.run(kernel, memory, step.grid, step.block, 0, dict(zip(kernel.params, given)))
    memory.places = find
    result = memory.view(places[1], plan.buffers[1].nbytes).view(x.dtype)
    expected = function(x)
    np.testing.assert_array_equal(result.reshape(expected.shape), expected)
    return touched


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_transpositions_touch_no_line_of_memory_for_one_number(dtype, monkeypatch):
    x = np.arange(96 * 64, dtype=dtype).reshape(96, 64)
    for function in (lambda x: x.T, lambda x: x.T * 2):
        touched = lines_of_memory(function, x)
        assert touched and all(lines == fewest for lines, fewest in touched)
    monkeypatch.setattr(routines, "turned_reads", lambda *_: (0, {}))
    touched = lines_of_memory(lambda x: x.T, x)
    assert max(lines / fewest for lines, fewest in touched) >= 4


def normal(*shape, dtype="f4"):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def with_nan():
    x = normal(3, 70)
    x[1], x[0, 3], x[2] = np.nan, np.inf, -np.inf
    return x


MASK = np.triu(np.full((33, 33), -np.inf, "f4"), 1)
AWKWARD = {  # function and its arrays
    "a stack times a stack": (lambda a, b: a @ b, normal(2, 1, 17, 20), normal(3, 20, 18)),
    "stacks, one turned": (lambda a, b: (a @ b.swapaxes(-1, -2), a + 1),
                           normal(4, 1, 5, 16), normal(1, 3, 40, 16)),
    "vectors": (lambda a, b: (a @ b, b.T @ a, a @ b @ b.T), normal(33), normal(33, 40)),
    "a stack times a matrix": (lambda a, b: (a @ b) * 2 + a[..., :40],
                               normal(3, 20, 64), normal(64, 40)),
    "nothing": (lambda a, b: (a @ b, a.T + 1, np.sum(a, axis=1), np.sum(b)),
                normal(0, 16), normal(16, 0)),
    "a sum of nothing": (lambda a, b: a @ b + 1, normal(20, 0), normal(0, 18)),
    "a number": (lambda a, b: (a * b, a + np.sum(b), np.max(a), a.T), normal(), normal(40, 20)),
    "NaN and infinity": (lambda a: (ops.softmax(a), np.max(a, axis=0), np.max(a, axis=1),
                                    np.min(a), np.sum(a, axis=1), a.T * 1), with_nan()),
    "a mask": (lambda a, m: (ops.softmax(a @ a.T + m), np.max(m, axis=1), ops.softmax(m.T)),
               normal(33, 20), MASK),
    "booleans": (lambda a: (a.T, np.sum(a), np.max(a, axis=0), a @ a.T, np.where(a.T, 1, 2)),
                 normal(40, 33) > 0),
    "integers": (lambda a: (a.T @ a, np.sum(a, axis=(0, 1)), a.T * 3, np.min(a, axis=0)),
                 (normal(40, 33) * 9).astype("i4")),
    "four axes": (lambda a: (a.transpose(3, 1, 2, 0), np.sum(a, axis=(1, 3)), np.sum(a),
                             np.max(a.transpose(0, 3, 2, 1), axis=(0, 2))), normal(16, 3, 2, 17)),
    "moments": (lambda a: (np.var(a), np.mean(a, axis=0), np.std(a, axis=1), a - np.mean(a)),
                normal(33, 40, dtype="f8")),
    "a chain": (lambda a: (np.sum(np.exp(a - np.max(a))) + np.sum(a, axis=0),
                           (a.T - np.max(a, axis=1)).T), normal(33, 40, dtype="f8")),
    "ones": (lambda a: (np.sum(a, axis=(0, 2)), a.transpose(2, 1, 0), np.max(a)),
             normal(1, 40, 1)),
    "twice": (lambda a: (np.sum(a, axis=0), np.sum(a, axis=0) * 2, np.sum(a, axis=1) / np.sum(a)),
              normal(40, 33, dtype="f8")),
}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_arguments(name, eager, monkeypatch):
    """Once as it is, and once with squares and many blocks wherever they are possible."""
    if eager:
        monkeypatch.setattr(turned, "ENOUGH", 2)
        monkeypatch.setattr(groups, "MUCH", 1)
        monkeypatch.setattr(groups, "FEW", 1 << 30)
    function, *args = AWKWARD[name]
    _, ours = emulated(function, args)
    with np.errstate(all="ignore"):
        expected = function(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for one, other in zip(ours, map(np.asarray, expected)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        exact = other.dtype.kind != "f"
        close = 0 if exact else 512 * np.finfo(other.dtype).eps
        np.testing.assert_allclose(one, other, rtol=close, atol=close * 16)


def test_gather_and_its_limits():
    words = dice.standard_normal((7, 5)).astype(np.float32)
    ids = np.array([[0, 6], [-7, -1]])
    check(lambda ids, words: words[ids] * 2, ids, words, ulps=0)
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        jit(lambda ids, words: words[ids], target="emulator")(ids + 1, words)


def test_nothing_and_single_numbers():
    none, one = np.zeros((0, 3)), np.array(2.5)
    check(lambda x, y: (x + 1, np.sum(x, axis=0), x.T @ x, y * 2, x.reshape(3, 0)), none, one)
    check(lambda x: x, np.arange(3))
    check(lambda x: (x, x, x[1:], x.T), dice.standard_normal((3, 2)), ulps=0)


def test_results_that_share_parts():
    def function(x):
        both = np.concatenate([x, x * 2])
        return both, np.concatenate([both, x]), both[::2], np.stack([x, x + 1], axis=-1)

    check(function, dice.standard_normal((4, 3)), ulps=0)


# ---------------------------------------------------------------- products

def product(a, b):
    """Ours, and the exact product with the error it may have."""
    _, (ours,) = emulated(lambda a, b: a @ b, (a, b))
    expected = a @ b
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(ours, expected)
        return
    wide = [x.astype(np.float64) for x in (a, b)]
    bound = np.matmul(*map(abs, wide)) * np.finfo(ours.dtype).eps * (a.shape[-1] + 2)
    assert (abs(ours - np.matmul(*wide)) <= bound + 1e-300).all()


@pytest.mark.parametrize("shapes", test_ops.SHAPES, ids=str)
@pytest.mark.parametrize("types", ["f4 f4", "f8 f4", "i8 i8", "? ?"])
def test_products(shapes, types):
    product(*((dice.standard_normal(s) * 4).astype(t) for s, t in zip(shapes, types.split())))


@pytest.mark.parametrize("tile", [(n, i) for n, tiles in factors.TILES.items()
                                  for i in range(len(tiles))], ids=str)
@pytest.mark.parametrize("shape", [(130, 20, 129), (33, 65, 40)], ids=str)
def test_every_tile_at_its_edges(tile, shape, monkeypatch):
    """Sizes that no tile divides, with each tile in turn, in both orders of B."""
    nbytes, number = tile
    monkeypatch.setattr(tiles, "choose", lambda *_: factors.TILES[nbytes][number])
    (n, k, m), dtype = shape, f"f{nbytes}"
    a, b = dice.standard_normal((n, k)).astype(dtype), dice.standard_normal((k, m)).astype(dtype)
    _, ours = emulated(lambda a, b: [a @ b + 1, a @ b.T.copy().T], (a, b))
    exact = a.astype("f8") @ b.astype("f8")
    for result, expected in zip(ours, (exact + 1, exact)):
        np.testing.assert_allclose(result, expected, atol=k * 4 * np.finfo(dtype).eps * 4)
    _, (ours,) = emulated(lambda a, b: a @ b.T, (a, b.T.copy()))
    np.testing.assert_allclose(ours, exact, atol=k * 16 * np.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(40, 70, 40), (64, 64, 64), (3, 5, 7), (130, 33, 70)], ids=str)
def test_tensor_cores_multiply_small_integers_exactly(shape):
    n, k, m = shape
    a, b = (dice.integers(-9, 9, s).astype(np.float32) for s in ((n, k), (k, m)))
    graph = graph_of(lambda a, b: (a @ b + 1, b.T @ a.T), (a, b))
    for backwards in (False, True):
        ours = emulator.Program(coarse(graph), backwards)([a, b])
        for result, expected in zip(ours, (a @ b + 1, b.T @ a.T)):
            np.testing.assert_array_equal(result, expected)


def test_tensor_cores_are_used_only_where_asked_for():
    x = dice.standard_normal((64, 64)).astype(np.float32)
    graph = graph_of(lambda x: x @ x, (x,))
    assert "mma" not in gpu.compile_graph(graph, "sm_90").ptx
    assert "mma.sync" in gpu.compile_graph(coarse(graph), "sm_90").ptx
    (ours,) = emulator.Program(coarse(graph))([x])
    np.testing.assert_allclose(ours, x @ x, atol=64 * 2**-9)
    assert abs(ours - x @ x).max() > 2**-15  # less than float32 is what it is
    double = graph_of(lambda x: x @ x, (x.astype(np.float64),))
    assert "mma" not in gpu.compile_graph(coarse(double), "sm_90").ptx
    for chip, precision in (("sm_75", "tf32"), ("sm_80", "half")):
        with pytest.raises(errors.ArgumentError, match=f"precision '{precision}'"):
            gpu.compile_graph(replace(graph, precision=precision), chip)


@pytest.mark.parametrize("shape", [(1, 65, 7), (70, 33, 66), (16, 8, 8), (64, 200, 3)], ids=str)
def test_tf32_is_off_by_what_the_bits_that_are_cut_are_worth(shape):
    """Ten bits of each factor are kept: each product is off by less than 2 * 2**-10."""
    n, k, m = shape
    a, b = (dice.standard_normal(s).astype("f4") for s in ((3, n, k), (3, k, m)))
    wide, scale = a.astype("f8") @ b.astype("f8"), abs(a).astype("f8") @ abs(b).astype("f8")
    run = jit(lambda a, b: a @ b, target="emulator", precision="tf32")
    assert (abs(run(a, b) - wide) <= scale * (2**-9 + k * 2**-24)).all()
    if n > 1 and m > 1:  # a product with a vector is a reduction, and exact
        assert (abs(run(a, b) - wide) > scale * 2**-16).any()
    fine = jit(lambda a, b: a @ b, target="emulator")
    assert (abs(fine(a, b) - wide) <= scale * (k + 2) * 2**-24).all()


def test_tf32_does_not_change_what_is_no_product_of_float32():
    x, y = dice.standard_normal((9, 9)).astype("f4"), dice.standard_normal((9, 9))

    def function(x, y):
        return x + y, ops.softmax(x), x @ y, y @ y, np.sum(x, axis=0)

    ours = jit(function, target="emulator", precision="tf32")(x, y)
    for one, other in zip(ours, jit(function, target="emulator")(x, y)):
        np.testing.assert_array_equal(one, other)


def test_a_precision_is_part_of_every_key(monkeypatch, tmp_path):
    x = dice.standard_normal((8, 8)).astype("f4")
    graphs = [jit(lambda x: x @ x, target="emulator", precision=p).compile(x).graph
              for p in ("float32", "tf32")]
    assert [g.precision for g in graphs] == ["float32", "tf32"]
    for key in (store.fingerprint, saved.identity):
        assert len(set(map(key, graphs))) == 2
    monkeypatch.setenv("TINYMLIR_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda.settings, "chip", "sm_80")
    for _ in range(2):  # compiled, then read
        assert ["mma" in cuda.plan_for(g).ptx for g in graphs] == [False, True]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("options", [
    {"precision": "tf32"}, {"precision": "tf32", "target": "cpu"},
    {"precision": "half", "target": "gpu"}, {"precision": "TF32", "target": "gpu"},
    {"precision": None, "target": "gpu"}, {"precision": ["tf32"], "target": "emulator"}])
def test_a_precision_that_there_is_not(options):
    with pytest.raises(errors.ArgumentError, match="precision .* is not supported"):
        jit(lambda x: x, **options)


def test_a_precision_inside_of_another_function_is_refused():
    inner = jit(lambda x: x @ x, target="emulator", precision="tf32")
    with pytest.raises(errors.ArgumentError, match="a precision of its own"):
        jit(lambda x: inner(x) + 1)(np.ones((4, 4), "f4"))
    plain = jit(lambda x: x @ x, target="emulator")
    stages = jit(lambda x: plain(x) + 1, target="emulator", precision="tf32").compile(
        np.ones((4, 4), "f4")).stages
    assert "mma.sync" in stages["ptx"]


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"cache": True}], ids=str)
def test_a_model_in_tf32(small_folder, options):
    """All three kinds of model take it; the logits are near, and are others."""
    ids, logits = [5, 7, 9, 200, 3], []
    for precision in ("float32", "tf32"):
        model, _ = load_model(small_folder, "emulator", dtype="float32", precision=precision,
                              **options)
        logits.append(model(ids))
    difference = abs(logits[0] - logits[1]).max()
    assert 0 < difference < 2**-6 * abs(logits[0]).max()
    for target, precision, error in (("cpu", "tf32", errors.ArgumentError),
                                     ("emulator", "half", errors.UnsupportedError)):
        with pytest.raises(error, match="precision"):
            load_model(small_folder, target, precision=precision, **options)


def test_kernels_in_tf32_are_another_purpose(small_folder, tmp_path, capsys):
    words = ["compile", "--gpu", "--fused", "--dtype", "float32", "--lengths", "5", "--out",
             str(tmp_path / "k"), "--model", str(small_folder), "--precision", "tf32", "--chip"]
    assert main([*words, "sm_75"]) == 1
    assert "precision 'tf32' needs a chip of sm_80 or later" in capsys.readouterr().err
    assert main([*words, "sm_80"]) == 0
    kernels = saved.read_kernels(tmp_path / "k")
    assert all("mma.sync" in (tmp_path / "k" / f"{name}.json").read_text()
               for name in kernels.manifest["plans"])
    kernels.check(precision="tf32")
    with pytest.raises(saved.KernelsError, match="for precision tf32, expected float32"):
        kernels.check(precision="float32")


def test_products_with_what_follows_and_views():
    x = dice.standard_normal((6, 24)).astype(np.float32)

    def heads(x):
        q, k, v = (p.reshape(6, 2, 4).transpose(1, 0, 2) for p in np.split(x, 3, axis=1))
        scores = ops.softmax(q @ k.transpose(0, 2, 1) / 2)
        return (scores @ v).transpose(1, 0, 2).reshape(6, 8) + x[:, :8]

    near(heads, x, ulps=64)


# ---------------------------------------------------------------- models

@pytest.fixture(scope="module")
def small(small_folder):
    return read_checkpoint(small_folder)


def test_a_model_by_sublayers(small):
    run = Sublayers(*(jit(f, target="emulator") for f in PLAIN))
    ids, ours, theirs = np.array([5, 7, 9, 200, 3]), {}, {}
    Model(small.config, small.params, run)(ids, ours)
    Model(small.config, small.params, PLAIN)(ids, theirs)
    assert list(ours) == list(theirs) and len(ours) == 2 * tiny.BLOCKS + 2
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-4)


def test_a_model_as_one_function(small):
    ids = np.array([5, 7, 9, 200, 3])
    run = jit(fused.last_logits.function, target="emulator")
    ours, _ = run(fused.padded(ids, tiny.CONTEXT), np.array(len(ids) - 1), small.params,
                  heads=tiny.HEADS, residuals=False)
    expected = Model(small.config, small.params, PLAIN)(ids)
    np.testing.assert_allclose(ours, expected[0], rtol=1e-4, atol=1e-4)


def test_rows_of_a_buffer_are_written_and_attended_to():
    """The operations of chapter 10, by kernels of their own."""
    buffer, rows = dice.standard_normal((8, 6)), dice.standard_normal((2, 6))
    queries = dice.standard_normal((2, 2, 3))

    def step(buffer, rows, queries, at):
        new = update(buffer, rows, at)
        return new, attend(queries, new, new, at, 2.0)

    ours = jit(step, target="emulator")(buffer, rows, queries, np.array(5))
    for one, other in zip(ours, step(buffer, rows, queries, 5)):
        np.testing.assert_allclose(one, other, rtol=1e-14, atol=1e-15)
    with pytest.raises(IndexError, match="7 is out of bounds"):
        jit(step, target="emulator")(buffer, rows, queries, np.array(7))


def test_a_step_of_the_cached_model(small):
    """Blocks that repeat are calls; what they update is not the caller's: nobody gave it away."""
    zeros_, size = np.zeros((tiny.CONTEXT, tiny.WIDTH)), tiny.BLOCKS
    keys = values = (zeros_.astype(np.float32), *[zeros_] * (size - 1))
    ids, run = np.array([5, 7]), jit(cache.step, target="emulator")
    for at in (0, 2):
        given = (ids, np.array(at), np.array(1), small.params, keys, values)
        ours, _, *buffers = run(*given, heads=tiny.HEADS, residuals=False)
        logits, _, keys, values = cache.step(*given, heads=tiny.HEADS, residuals=False)
        np.testing.assert_allclose(ours, logits, rtol=1e-4, atol=1e-4)
        for one, other in zip(buffers, (keys, values)):
            np.testing.assert_allclose(one[1], other[1], rtol=1e-4, atol=1e-4)


def test_arguments_can_be_bound():
    x, y = dice.standard_normal((2, 3, 3))
    bound = jit(lambda x, y: x @ y, target="emulator").compile(x, y).bind(y=y)
    np.testing.assert_allclose(bound(x), x @ y)


# ---------------------------------------------------------------- what goes wrong

KERNEL = """module { gpu.module @kernels {
gpu.func @k(%a: memref<64xf32>, %b: memref<64xf32>)
    workgroup(%s: memref<64xf32, #gpu.address_space<workgroup>>) kernel
    attributes {known_block_size = array<i32: 64, 1, 1>} {
  %t = gpu.thread_id x
  %one = arith.constant 1 : index
  %n = arith.constant 64 : index
  %next = arith.addi %t, %one : index
  %wrap = arith.remui %next, %n : index
  %v = memref.load %a[LOADED] : memref<64xf32>
  memref.store %v, %s[%t] : memref<64xf32, #gpu.address_space<workgroup>>
  BARRIER
  %w = memref.load %s[%wrap] : memref<64xf32, #gpu.address_space<workgroup>>
  memref.store %w, %b[%t] : memref<64xf32>
  gpu.return
} } }"""


def run_text(barrier="gpu.barrier", loaded="%t", backwards=False):
    """The kernel above: every thread passes its number on to the one before it."""
    with gpu.mlir_lock, gpu.context():
        from mlir import ir
        text = KERNEL.replace("BARRIER", barrier).replace("LOADED", loaded)
        device = emulator.Device(ir.Module.parse(text))
    plan = Plan("sm_80", "", (Buffer(256, "argument", 0), Buffer(256, "result", 0)), (), ())
    a, b = np.arange(64, dtype=np.float32), emulator.device_array((64,), np.float32)
    memory = emulator.Memory(plan, [a], [b])
    device.run(Launch("k", (1, 1, 1), (64, 1, 1), 0, (Pointer(0), Pointer(1))), memory,
               backwards)
    return b


def test_the_emulator_waits_at_a_barrier():
    expected = np.roll(np.arange(64), -1)
    np.testing.assert_array_equal(run_text(), expected)
    np.testing.assert_array_equal(run_text(backwards=True), expected)


def test_a_missing_barrier_is_seen():
    """In one order or the other, somebody reads what nobody has written: NaN."""
    expected = np.roll(np.arange(64), -1)
    assert any(not np.array_equal(run_text("", backwards=b), expected) for b in (False, True))


def test_an_address_outside_is_refused():
    with pytest.raises(errors.CompileError, match="outside of the array.*load of array 0"):
        run_text(loaded="%next")


def test_a_barrier_that_some_threads_miss_is_refused():
    barrier = """%half = arith.constant 32 : index
    %few = arith.cmpi ult, %t, %half : index
    scf.if %few { gpu.barrier }"""
    with pytest.raises(errors.CompileError, match="32 of 64 threads ended"):
        run_text(barrier)


@pytest.mark.parametrize("chip", ["sm_70", "sm_999", "80", "", None])
def test_unknown_chips_are_refused(chip):
    with pytest.raises(errors.ArgumentError, match="expected one of sm_75"):
        gpu.compile_graph(graph_of(lambda x: x + 1, (np.ones(3),)), chip)


def test_more_arrays_than_a_kernel_takes():
    arrays = [np.full(3, float(i)) for i in range(1100)]
    check(lambda *xs: functools.reduce(np.add, xs), *arrays)


# ---------------------------------------------------------------- the plan

def test_a_plan_survives_a_file():
    example = ops.EXAMPLES["attention"]
    plan = gpu.compile_graph(graph_of(example.function, example.arrays, example.static))
    assert Plan.from_json(plan.to_json()) == plan
    other = Plan("sm_80", "", (Buffer(4, "constant", 0),), (b"\0\xff",),
                 (Copy(Pointer(0), Pointer(0, 2), 2),))
    assert Plan.from_json(other.to_json()) == other


def test_a_plan_is_read_without_the_compiler():
    code = ("import sys; from tinymlir.plan import Plan\n"
            "assert not [m for m in sys.modules if m.split('.')[0] in ('mlir', 'llvm')]")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("seed", range(20))
def test_arrays_that_live_at_the_same_time_are_apart(seed):
    random = np.random.default_rng(seed)
    arrays = [gpu.Array(int(random.integers(1, 999)), "f32", "scratch") for _ in range(30)]
    steps = [Run("k", (1, 1, 1), (1, 1, 1), tuple(random.choice(arrays, 3))) for _ in range(40)]
    lives = gpu.lifetimes(steps)
    offsets, total = gpu.arrange(lives)
    for a, b in itertools.combinations(offsets, 2):
        meet = lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]
        apart = (offsets[a] + a.nbytes <= offsets[b] or offsets[b] + b.nbytes <= offsets[a])
        assert apart or not meet
    assert all(o % ALIGNMENT == 0 and o + a.nbytes <= total for a, o in offsets.items())
    assert total <= sum(-(-a.nbytes // ALIGNMENT) * ALIGNMENT for a in offsets)


def test_blocks_share_their_kernels(small):
    ids = np.zeros(8, np.int64)
    plan = gpu.compile_graph(graph_of(
        fused.last_logits.function, (ids, np.array(7), small.params),
        {"heads": tiny.HEADS, "residuals": False}))
    names = [launch.kernel for launch in plan.launches]
    assert plan.ptx.count(".entry") == len(set(names)) < len(names)


# ---------------------------------------------------------------- PTX

PTXAS = occupancy.find_ptxas()
needs_ptxas = pytest.mark.skipif(not PTXAS, reason="no ptxas: pip install nvidia-cuda-nvcc")
CHIPS = ["sm_75", "sm_80", "sm_90"]
WIDTH, HEADS, WORDS, CONTEXT = 768, 12, 50257, 1024


def zeros(*shape, dtype=np.float32):
    """An array that takes no memory."""
    return np.broadcast_to(dtype(0), shape)


def large(blocks):
    """Parameters with the shapes of GPT-2 124M."""
    e = WIDTH
    norm = ops.LayerNorm(zeros(e), zeros(e))
    block = Block(norm, ops.Linear(zeros(e, 3 * e), zeros(3 * e)),
                  ops.Linear(zeros(e, e), zeros(e)), norm,
                  ops.Linear(zeros(e, 4 * e), zeros(4 * e)),
                  ops.Linear(zeros(4 * e, e), zeros(e)))
    return Params(zeros(WORDS, e), zeros(CONTEXT, e), (block,) * blocks, norm)


def gpt2(tokens, dtype):
    """The graphs of GPT-2 124M in both modes."""
    p = large(12)
    b, ids = p.blocks[0], np.zeros(tokens, np.int64)
    first, later = (zeros(tokens, WIDTH, dtype=t) for t in (np.float32, np.float64))
    heads = {"heads": HEADS}
    calls = [(ops.attention_sublayer, (x, b.norm_1, b.qkv, b.out), heads) for x in (first, later)]
    calls += [(ops.feed_forward_sublayer, (later, b.norm_2, b.up, b.down), {}),
              (ops.embed, (ids, p.words, p.positions), {}),
              (ops.logits, (later[-1:], *p.norm, p.words), {}),
              (fused.last_logits.function, (ids, np.array(3), p), {**heads, "residuals": False})]
    graphs = [trace(*call)[0] for call in calls]
    return [improve(narrow(g) if dtype == "float32" else g) for g in graphs]


def assembled(graph, chip):
    """ptxas accepts the kernels, and nothing is spilled."""
    found = occupancy.needs(gpu.compile_graph(graph, chip).ptx, chip)
    assert found and {needs.spilled for needs in found.values()} == {0}
    assert all(0 < needs.registers <= 255 for needs in found.values())
    return found


@needs_ptxas
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("tokens, dtype", [(16, None), (64, None), (64, "float32")])
def test_gpt2_is_accepted_by_ptxas_and_spills_nothing(tokens, dtype, chip):
    for graph in gpt2(tokens, dtype):
        assembled(graph, chip)
        if dtype and chip != "sm_75":
            assembled(coarse(graph), chip)


@needs_ptxas
@pytest.mark.parametrize("chip", CHIPS)
def test_the_bundled_model_is_accepted_by_ptxas(chip):
    p = read_checkpoint(BUNDLED)
    assembled(graph_of(fused.last_logits.function, (np.zeros(16, int), np.array(3), p.params),
                       {"heads": p.config.heads, "residuals": False}), chip)


@needs_ptxas
@pytest.mark.parametrize("chip", CHIPS[1:])
def test_tensor_cores_are_accepted_by_ptxas(chip):
    assembled(coarse(graph_of(lambda x: ops.gelu(x @ x.T + 1), (zeros(512, 512),))), chip)


@needs_ptxas
@pytest.mark.parametrize("chip", CHIPS)
def test_every_example_and_every_operation_is_accepted_by_ptxas(chip):
    graphs = [graph_of(e.function, e.arrays, e.static) for e in ops.EXAMPLES.values()]
    unary = together([f for f, _ in test_ops.UNARY.values()])
    long = together([np.sum, np.max, lambda x: np.min(x, axis=0), lambda x: x.T * x[0, 0]])
    graphs += [graph_of(unary, (test_ops.EDGE,)),
               graph_of(together(test_ops.MOVES.values()), (test_ops.F32,)),
               *(graph_of(long, (zeros(5001, 40, dtype=t),)) for t in (np.float32, np.int64))]
    for graph in graphs:
        assembled(graph, chip)


def test_what_ptxas_refuses_is_a_clear_error(monkeypatch):
    if PTXAS:
        with pytest.raises(errors.CompileError, match="ptxas refused"):
            occupancy.needs(".version 8.0\n.target sm_80\nnonsense", "sm_80")
    monkeypatch.setattr(occupancy, "find_ptxas", lambda: None)
    with pytest.raises(errors.CompileError, match="pip install nvidia-cuda-nvcc"):
        occupancy.needs("", "sm_80")


@pytest.mark.parametrize("chip", gpu.CHIPS)
def test_every_chip_that_is_offered_gets_code(chip):
    ptx = gpu.compile_graph(graph_of(ops.softmax, (test_ops.F32,)), chip).ptx
    assert f".target {chip}" in ptx and "__nv_" not in ptx


# ---------------------------------------------------------------- occupancy

def test_the_example_of_the_best_practices_guide():
    for threads, blocks, share in ((128, 12, 0.75), (320, 4, 0.625)):
        found = occupancy.occupancy(37, 0, threads, "sm_80")
        assert (found.blocks, found.warps / found.of, found.limit) == (blocks, share, "registers")


@pytest.mark.parametrize("arguments, blocks, limit", [
    ((16, 0, 1024, "sm_75"), 1, "warps"), ((16, 0, 32, "sm_75"), 16, "blocks"),
    ((255, 0, 256, "sm_80"), 1, "registers"), ((255, 0, 512, "sm_80"), 0, "registers"),
    ((32, 100 << 10, 128, "sm_80"), 1, "shared memory"),
    ((32, 48 << 10, 64, "sm_86"), 2, "shared memory"),
    ((32, 32 << 10, 32, "sm_75"), 2, "shared memory"), ((0, 0, 32, "sm_90"), 32, "blocks")])
def test_what_limits_the_warps(arguments, blocks, limit):
    found = occupancy.occupancy(*arguments)
    assert (found.blocks, found.limit) == (blocks, limit)
    assert found.warps == blocks * -(-arguments[2] // 32) <= found.of


def test_every_chip_has_its_limits():
    assert list(occupancy.SM) == list(gpu.CHIPS)
    with pytest.raises(errors.ArgumentError, match="expected one of"):
        occupancy.occupancy(32, 0, 128, "sm_70")


OCCUPANCY = r"""
#include <stdio.h>
#include <stdlib.h>
#include "cuda_occupancy.h"
int main(void) {
  int major, minor, warps, kib, reserved, registers, shared, threads;
  while (scanf("%d %d %d %d %d %d %d %d", &major, &minor, &warps, &kib, &reserved,
               &registers, &shared, &threads) == 8) {
    struct cudaOccDeviceProp p = {major, minor, 1024, warps * 32, 65536, 65536, 32, 49152,
                                  kib * 1024, 100, kib * 1024 - reserved, reserved};
    struct cudaOccFuncAttributes f = {1024, registers, shared, PARTITIONED_GC_OFF,
                                      FUNC_SHMEM_LIMIT_OPTIN, 0, 1, 0};
    struct cudaOccDeviceState s = {CACHE_PREFER_NONE, SHAREDMEM_CARVEOUT_MAX_SHARED};
    struct cudaOccResult r;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &f, &s, threads, 0)) return 1;
    printf("%d\n", r.activeBlocksPerMultiprocessor);
  }
  return 0;
}"""
HEADER = PTXAS and next(Path(PTXAS).parents[1].glob("**/cuda_occupancy.h"), None)


@pytest.mark.skipif(not (HEADER and shutil.which("cc")),
                    reason="no C compiler, or no header of CUDA")
def test_occupancy_is_what_nvidias_header_computes(tmp_path):
    (tmp_path / "o.c").write_text(OCCUPANCY)
    subprocess.run(["cc", "-w", f"-I{HEADER.parent}", "o.c", "-o", "o"], cwd=tmp_path, check=True)
    random, lines, ours = np.random.default_rng(0), [], []
    for chip, sm in occupancy.SM.items():
        major, minor = divmod(int(chip[3:]), 10)
        for _ in range(200):
            registers, shared = int(random.integers(1, 256)), int(random.integers(0, 48 << 10))
            threads = int(random.integers(1, 1025))
            shared = int(random.choice([0, shared // 16, shared]))
            lines.append(f"{major} {minor} {sm.warps} {sm.shared} {sm.reserved} {registers} "
                         f"{shared} {threads}")
            ours.append(occupancy.occupancy(registers, shared, threads, chip).blocks)
    done = subprocess.run([tmp_path / "o"], input="\n".join(lines), capture_output=True, text=True,
                          check=True)
    theirs = list(map(int, done.stdout.split()))
    wrong = [(line, a, b) for line, a, b in zip(lines, ours, theirs) if a != b]
    assert len(theirs) == len(ours) and not wrong, wrong[:5]


@needs_ptxas
def test_the_warps_of_a_kernel_that_was_compiled():
    plan = gpu.compile_graph(graph_of(lambda x: x * 2, (zeros(4096),)))
    (needs,), (launch,) = occupancy.needs(plan.ptx, "sm_80").values(), plan.launches
    assert (needs.shared, needs.spilled) == (0, 0) and 4 <= needs.registers <= 32
    threads = int(np.prod(launch.block))
    assert occupancy.occupancy(needs.registers, needs.shared, threads, "sm_80").warps == 64
    plan = gpu.compile_graph(graph_of(lambda x: x.T, (zeros(64, 64),)))
    (needs,) = occupancy.needs(plan.ptx, "sm_80").values()
    assert needs.shared == 32 * 33 * 4


# ---------------------------------------------------------------- who writes what

@pytest.mark.parametrize("function, args", [
    (lambda x: x * 2, [zeros(16, 130)]), (lambda x: x.T, [zeros(70, 45)]),
    (lambda x: ops.softmax(x), [dice.standard_normal((5, 70))]),
    (lambda x: x @ x.T + 1, [dice.standard_normal((40, 9)).astype("f4")]),
    (lambda x: np.sum(x, axis=0), [np.arange(120.).reshape(10, 12)])],
    ids=["map", "turned", "row", "product", "column"])
def test_owners_are_threads_of_the_launch(function, args):
    """Every number has one, none has two: what a thread writes, no other writes again."""
    args = [np.array(a) + 1 for a in args]
    program = emulator.Program(graph_of(function, args))
    found = ownership.owners(program, args)
    launch = program.plan.launches[-1]
    assert found.shape == (*function(*args).shape, 2) and (found >= 0).all()
    assert (found[..., 0] < np.prod(launch.grid)).all()
    assert (found[..., 1] < np.prod(launch.block)).all()


def test_neighbours_belong_to_neighbouring_threads():
    """The rule that makes memory fast, seen by running: four numbers a thread, in order."""
    x = np.arange(2048, dtype="f4").reshape(2, 1024)
    found = ownership.owners(emulator.Program(graph_of(lambda x: x + 1, (x,))), [x])
    number = np.arange(2048).reshape(2, 1024)
    np.testing.assert_array_equal(found[..., 0], number // 1024)
    np.testing.assert_array_equal(found[..., 1], number % 1024 // 4)
    x = np.arange(96 * 64, dtype="f4").reshape(96, 64) + 1
    found = ownership.owners(emulator.Program(graph_of(lambda x: x.T, (x,))), [x])
    row, column = np.indices((64, 96))
    np.testing.assert_array_equal(found[..., 0], row // 32 * 3 + column // 32)
    np.testing.assert_array_equal(found[..., 1], row % 8 * 32 + column % 32)


def test_the_picture_covers_the_matrix_once():
    x = dice.standard_normal((40, 9)).astype("f4")
    picture = ownership.Written.by(emulator.Program(graph_of(lambda x: x @ x.T, (x,))), [x])
    covered = np.zeros((40, 40), int)
    for row, column, height, width, block, warp in picture.rectangles():
        covered[row:row + height, column:column + width] += 1
        piece = picture.owners[row:row + height, column:column + width]
        assert (piece // (1, 32) == (block, warp)).all()
    assert (covered == 1).all()
    svg = picture._repr_html_()
    assert svg.count("<rect") == len(picture.rectangles()) and "currentColor" in svg
    assert f'aria-label="{picture!r}"' in svg and repr(picture).startswith("40 x 40 numbers")


def test_memory_moves_16_bytes_at_a_time():
    for dtype, wide in ((np.float32, "v4.b32"), (np.float64, "v2.b64")):
        x = zeros(4, 1024, dtype=dtype)
        for function in (lambda x: x * 2, ops.softmax, lambda x: x @ x.T):
            ptx = gpu.compile_graph(graph_of(function, (x,))).ptx
            loads = re.findall(r"ld\.global\.(?:nc\.)?(\S+)", ptx)
            assert loads and set(loads) == {wide}, (dtype, loads)
            assert f"st.global.{wide}" in ptx or "@" in ptx


def test_a_row_is_read_once():
    """Three passes over a row in NumPy; here each of its vectors is loaded once."""
    x = zeros(64, WIDTH)
    for function in (ops.softmax, lambda x: ops.layer_norm(x, np.float32(1), np.float32(0))):
        plan = gpu.compile_graph(graph_of(function, (x,)))
        (launch,) = plan.launches
        loads = plan.ptx.count("ld.global")
        assert loads * 4 * launch.block[0] == WIDTH
