"""Stacks of matrices computed band by band (chapter 3): when, and that nothing changes."""
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from mlir import ir

from tinymlir import bands, jit, store
from tinymlir.builder import build
from tinymlir.calls import find
from tinymlir.graph import trace
from tinymlir.passes import CPU, Work, run_stages

rng = np.random.default_rng(11)


def numbers(*shape, dtype=np.float64):
    return rng.standard_normal(shape).astype(dtype)


def softmax(x):
    powers = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return powers / np.sum(powers, axis=-1, keepdims=True)


def attention(q, k, v):
    n = q.shape[1]
    mask = np.triu(np.ones((n, n), q.dtype) * -np.inf, k=1)
    return softmax(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]) + mask) @ v


@contextmanager
def limits(large, holds):
    """Other thresholds, and no compiled code from the disk that was made with others."""
    with (mock.patch.object(bands, "LARGE", large), mock.patch.object(bands, "HOLDS", holds),
          mock.patch.object(store, "folder", lambda: None)):
        yield


def run(function, *args, cut):
    """Compiled with bands of at least 8 rows wherever they are possible, or nowhere."""
    with limits(1 if cut else 1 << 62, 1 << 10):
        return jit(function)(*args)


def allocated(function, *args, large=1, holds=1 << 10):
    """The shapes of the buffers after cutting."""
    with limits(large, holds), ir.Context():
        graph, _ = trace(function, args, {})
        work = run_stages(Work(build(graph)), CPU[:3])
        bands.cut_bands(work.module)
        assert work.module.operation.verify()
        return [tuple(ir.MemRefType(x.results[0].type).shape)
                for x in find(work.module, "memref.alloc")]


def close(got, want, size, computed):
    """Within the rounding of sums of `size` numbers of the type `computed`."""
    assert got.dtype == want.dtype
    scale = np.finfo(computed).eps * 8 * size
    np.testing.assert_allclose(got, want, rtol=scale, atol=scale)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("heads, n, size", [(1, 9, 4), (3, 64, 8), (2, 61, 16), (5, 130, 3),
                                            (2, 1, 4), (1, 257, 64)])
def test_attention_by_bands(heads, n, size, dtype):
    q, k, v = (numbers(heads, n, size, dtype=dtype) for _ in range(3))
    got = run(attention, q, k, v, cut=True)
    close(got, attention(q, k, v), n, dtype)  # the scores are of dtype, the rest float64
    whole = run(attention, q, k, v, cut=False)
    np.testing.assert_array_equal(got, whole)  # to the last bit


def test_the_shipped_sizes_cut_what_is_large_and_leave_the_rest():
    big, small = (tuple(numbers(2, n, 8) for _ in range(3)) for n in (700, 60))
    shapes = allocated(attention, *big, large=bands.LARGE, holds=bands.HOLDS)
    assert (1, 128, 700) in shapes and (2, 700, 700) not in shapes
    assert (2, 60, 60) in allocated(attention, *small, large=bands.LARGE,
                                    holds=bands.HOLDS)
    np.testing.assert_allclose(jit(attention)(*big), attention(*big), rtol=1e-11, atol=1e-13)


def test_rows_that_see_nothing_and_special_values():
    q, k, v = (numbers(2, 40, 4) for _ in range(3))
    q[0, 3], k[1, 5], v[0, 7] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(run(attention, q, k, v, cut=True), attention(q, k, v),
                                   rtol=1e-12, atol=1e-12)


def transposed_use(q, k, v):
    return v.transpose(0, 2, 1) @ (np.tanh(q @ k.transpose(0, 2, 1)) + 1)


def scores_are_a_result(q, k, v):
    scores = np.exp(q @ k.transpose(0, 2, 1))
    return scores, scores @ v


def keys_are_made_in_between(q, k, v):
    first = q @ k.transpose(0, 2, 1)
    return np.tanh(first) @ (first @ v)


def summed_over_rows(q, k, v):
    scores = q @ k.transpose(0, 2, 1)
    return (scores / np.sum(scores * scores, axis=-2, keepdims=True)) @ v


def three_products(q, k, v):
    return np.tanh(np.tanh(q @ k.transpose(0, 2, 1)) @ v) @ v.transpose(0, 2, 1)


def one_head_for_all(q, k, v):
    return np.tanh(q @ k[0].T) @ v[0]


def two_by_two(q, k, v):
    return np.tanh(q @ k.transpose(0, 2, 1)) @ v + np.tanh(k @ q.transpose(0, 2, 1)) @ v


def numbered_rows(q, k, v):
    """np.tril looks at the number of a row, which a band would count anew."""
    return np.tril(np.tanh(q @ k.transpose(0, 2, 1))) @ v


def flattened_first(q, k, v):
    flat = (q @ k.transpose(0, 2, 1)).reshape(q.shape[0], -1)
    return np.tanh(flat).reshape(q.shape[0], q.shape[1], -1) @ v


OTHERS = [transposed_use, scores_are_a_result, keys_are_made_in_between, summed_over_rows,
          three_products, one_head_for_all, two_by_two, numbered_rows, flattened_first]


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("n, size", [(24, 5), (37, 5), (24, 24), (19, 19)])
def test_what_looks_like_attention(function, n, size):
    q, k, v = (numbers(3, n, size) / size for _ in range(3))
    want, got = function(q, k, v), run(function, q, k, v, cut=True)
    pairs = zip(got, want) if isinstance(want, tuple) else [(got, want)]
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
    whole = run(function, q, k, v, cut=False)
    for a, b in zip(got if isinstance(got, tuple) else [got],
                    whole if isinstance(whole, tuple) else [whole]):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("function, kept", [
    (attention, False), (three_products, False), (two_by_two, False), (transposed_use, True),
    (summed_over_rows, True)], ids=lambda x: getattr(x, "__name__", x))
def test_which_scores_stay_whole(function, kept):
    q, k, v = (numbers(3, 24, 5) for _ in range(3))
    assert ((3, 24, 24) in allocated(function, q, k, v)) == kept


def test_bands_on_threads_and_in_a_loop_over_many_sizes():
    function = jit(attention)
    with limits(1, 1 << 10):
        for n in range(1, 30):
            q, k, v = (numbers(4, n, 3) for _ in range(3))
            np.testing.assert_allclose(function(q, k, v), attention(q, k, v), rtol=1e-11,
                                       atol=1e-13)


@pytest.mark.parametrize("heads, n", [(1, 64), (1, 9), (3, 40), (3, 41), (17, 16), (40, 21)])
def test_every_stage_is_a_valid_module(heads, n):
    """Printed stages are verified, compiled ones are not."""
    q, k, v = (numbers(heads, n, 4) for _ in range(3))
    with limits(1, 1 << 10):
        stages = jit(attention).compile(q, k, v).stages
    assert "llvm.call @matmul" in stages["lowered"] and "define" in stages["llvm"]


@pytest.mark.parametrize("parallel", [False, True])
def test_every_stage_of_attention_can_be_shown(parallel):
    args = [numbers(4, 300, 16) for _ in range(3)]
    with limits(1, 1 << 10), ir.Context():
        work = run_stages(Work(build(trace(attention, args, {})[0]), parallel=parallel), CPU,
                          keep=True)
        assert list(work.texts) == [stage.name for stage in CPU]
        assert ("omp.parallel" in work.texts["lowered"]) is parallel
