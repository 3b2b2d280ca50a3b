"""Tiles of zeros are skipped, and nothing else is: zero times NaN is NaN."""
import numpy as np
import pytest
from test_schedule import load_product, numbers, product

from tinymlir import blank, jit, native, schedule
from tinymlir.schedule import TILE_ROWS, Kernel

BITS = native.host().vector_bits
TALL = TILE_ROWS[BITS][0]
FLOATS = [("f32", "f32", "f32"), ("f64", "f32", "f64"), ("f32", "f64", "f64"),
          ("f64", "f64", "f64")]
SPECIAL = [np.nan, np.inf, -np.inf]


def compare(found, a, b):
    """With NumPy in float64: NaN where it has NaN, else as near as rounding allows."""
    with np.errstate(invalid="ignore", over="ignore"):
        want = np.matmul(a.astype(np.float64), b.astype(np.float64))
        sizes = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want))
    wild = ~np.isfinite(want)
    np.testing.assert_array_equal(found[wild], want[wild])
    room = (a.shape[1] + 2) * np.finfo(found.dtype).eps * sizes[~wild]
    assert (np.abs(found[~wild] - want[~wild]) <= room).all()


@pytest.mark.parametrize("types", FLOATS, ids="-".join)
@pytest.mark.parametrize("bad", [None, *SPECIAL])
def test_causal_weights(types, bad):
    """Lower triangles, one value of the second factor set to something special."""
    multiply = jit(lambda a, b: a @ b)
    for n, columns in ((TALL, 16), (100, 64), (256, 33), (384, 130)):
        a, b = np.tril(numbers((n, n), types[0])), numbers((n, columns), types[1])
        for row in (0, n // 2, n - 1):
            if bad is not None:
                b[row, columns - 1 - row % 7] = bad
            compare(multiply(a, b), a, b)


@pytest.mark.parametrize("seed", range(40))
def test_random_blocks_of_zeros(seed):
    dice = np.random.default_rng(seed)
    types = FLOATS[seed % len(FLOATS)]
    m, k, n = dice.integers(1, (300, 400, 120))
    a, b = numbers((m, k), types[0]), numbers((k, n), types[1])
    for _ in range(dice.integers(1, 8)):
        top, left = dice.integers(0, (m, k))
        a[top:top + dice.integers(1, 200), left:left + dice.integers(1, 300)] *= 0
    for _ in range(dice.integers(0, 4)):
        b[dice.integers(0, k), dice.integers(0, n)] = dice.choice(SPECIAL)
    compare(jit(lambda a, b: a @ b)(a, b), a, b)
    compare(jit(lambda a, b: a.T @ b)(np.ascontiguousarray(a.T), b), a, b)


@pytest.fixture
def passed_over(monkeypatch):
    """a, b -> the rows of C that no product was added to. With b of NaN, and a kernel
    that takes any panel for finite, those are the rows that are no NaN."""
    kernel = Kernel("matmul", ("f32", "f32", "f32"), False, BITS)
    with monkeypatch.context() as patch:
        patch.setattr(schedule, "known_finite", lambda *_: blank.truth(True))
        careless = load_product(kernel)

    def rows(a, b):
        c = np.empty((len(a), b.shape[1]), np.float32)
        product(kernel)(a, b, c, True)
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(c, a @ b)
        careless(a, np.full_like(b, np.nan), c, True)
        return ~np.isnan(c).any(axis=1)

    return rows


def test_which_tiles_are_skipped(passed_over):
    a, b = np.zeros((4 * TALL, 128), np.float32), np.ones((128, 2 * BITS // 32), np.float32)
    below = np.arange(len(a)) >= TALL  # the first tile makes the panel
    np.testing.assert_array_equal(passed_over(a, b), below)
    for row, k in ((0, 0), (TALL - 1, 127), (3 * TALL // 2, 5), (2 * TALL - 1, 0)):
        one = a.copy()
        one[2 * TALL + row % TALL, k] = 3
        tile = np.arange(len(a)) // TALL == 2
        np.testing.assert_array_equal(passed_over(one, b), below & ~tile)
    np.testing.assert_array_equal(passed_over(-a, b), below)  # zeros of either sign


@pytest.mark.parametrize("bad", SPECIAL)
@pytest.mark.parametrize("place", [(0, 0), (127, -1), (64, 3)])
def test_nothing_is_skipped_beside_nan_and_infinity(bad, place):
    a, b = np.zeros((4 * TALL, 128), np.float32), np.ones((128, 2 * BITS // 32), np.float32)
    b[place] = bad
    compare(jit(lambda a, b: a @ b)(a, b), a, b)


def test_zeros_have_the_sign_that_numpy_gives_them():
    """A product that is too small leaves -0.0; the zeros that follow make it 0.0."""
    a, b = np.zeros((2 * TALL, 256), np.float32), np.full((256, 32), 1e-30, np.float32)
    a[:, 31] = -1e-30
    found = jit(lambda a, b: a @ b)(a, b)
    assert not np.signbit(found).any() and not np.signbit(a @ b).any()


def test_other_layouts_are_computed(passed_over):
    """Columns that do not lie side by side, a depth that is not whole vectors."""
    b = np.ones((128, 40), np.float32)
    wide = np.full((4 * TALL, 256), np.nan, np.float32)
    wide[:, ::2] = 0
    assert not passed_over(wide[:, ::2], b).any()
    assert not passed_over(np.zeros((128, 4 * TALL), np.float32).T, b).any()
    assert not passed_over(np.zeros((4 * TALL, 100), np.float32)[:, :99], b[:99]).any()
