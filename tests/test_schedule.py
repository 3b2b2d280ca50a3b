"""The matrix products themselves: every kind, type, vector width and edge."""
import ctypes
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tinymlir import compiler, native, pool, threads
from tinymlir.schedule import Kernel

DTYPE = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}
TYPES = [("f32", "f32", "f32"), ("f64", "f32", "f64"), ("f32", "f64", "f64"),
         ("f64", "f64", "f64"), ("i64", "i64", "i64"), ("i32", "i32", "i32"),
         ("i32", "i64", "i64")]
rng = np.random.default_rng(3)


def load_product(kernel):
    """kernel -> function(a, b as stored, c, fresh)."""
    code = native.Code(compiler.compiled_library(tuple(vars(kernel).values())),
                       threads.symbols() | pool.symbols())
    address, number = ctypes.c_void_p, ctypes.c_int64
    call = ctypes.CFUNCTYPE(None, *[address, address, *[number] * 5] * 3, ctypes.c_bool)(
        code.address(kernel.symbol))

    def run(a, b, c, fresh):
        parts = []
        for x in (a, b, c):
            parts += [x.ctypes.data, x.ctypes.data, 0, *x.shape,
                      *(s // x.itemsize for s in x.strides)]
        call(*parts, fresh)

    run.code = code
    return run


product = cache(load_product)


def numbers(shape, name):
    return (rng.standard_normal(shape) * 5).astype(DTYPE[name])


def check(kernel, m, k, n):
    """Fresh and accumulated, against NumPy in double precision."""
    a, b = numbers((m, k), kernel.types[0]), numbers((k, n), kernel.types[1])
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    stored = np.ascontiguousarray(b.T) if kernel.columns else b
    for fresh in (True, False):
        frame = np.full((m, n + 8), 7, DTYPE[kernel.types[2]])  # a view with neighbours
        c = frame[:, 4:4 + n]
        product(kernel)(a, stored, c, fresh)
        want = exact if fresh else exact + 7
        if kernel.types[2][0] == "i":
            np.testing.assert_array_equal(c, want.astype(c.dtype))
        else:
            room = (k + 2) * np.finfo(c.dtype).eps * (np.abs(a) @ np.abs(b) + 7)
            assert (np.abs(c - want) <= room).all()
        assert (frame[:, :4] == 7).all() and (frame[:, 4 + n:] == 7).all()


ROW = [(1, 1, 1), (1, 3, 5), (1, 8, 16), (1, 9, 31), (1, 63, 33), (1, 257, 40), (1, 768, 17),
       (1, 6, 301), (1, 64, 4100), (1, 65, 8200), (1, 531, 70), (1, 300, 4099)]
SIZES = {  # rows up to 32 and more, one panel and several of them, one block and several
    "matmul": [(1, 1, 1), (2, 3, 5), (7, 9, 31), (8, 16, 16), (13, 300, 33), (15, 257, 40),
               (16, 512, 17), (31, 5, 64), (32, 65, 70), (33, 129, 50), (47, 256, 100),
               (64, 130, 1100), (3, 40, 5000), (255, 140, 300)],
    "dots": ROW, "row": ROW,
}
KINDS = [("dots", True), ("row", False), ("matmul", True), ("matmul", False)]


@pytest.mark.parametrize("kind, columns", KINDS)
@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_products_of_all_sizes(kind, columns, bits, types):
    if bits > native.host().vector_bits:
        pytest.skip("this processor has no such vectors")
    for m, k, n in SIZES[kind]:
        check(Kernel(kind, types, columns, bits), m, k, n)


def test_more_rows_than_a_block_holds():
    for m, k, n in ((523, 40, 33), (257, 300, 40), (300, 129, 130)):
        check(Kernel("matmul", ("f32", "f32", "f32"), False, native.host().vector_bits),
              m, k, n)


def test_few_rows_and_many_have_the_same_bits():
    """A row of a product does not depend on the rows beside it."""
    bits, types = native.host().vector_bits, ("f64", "f32", "f64")
    a, b = numbers((70, 300), "f64"), numbers((300, 200), "f32")
    rows = [np.empty((m, 200)) for m in (2, 20, 70)]
    for c in rows:
        product(Kernel("matmul", types, False, bits))(a[:len(c)], b, c, True)
    assert (rows[0] == rows[1][:2]).all() and (rows[1] == rows[2][:20]).all()


def moved(x, step):
    """The same numbers, `step` elements after a border of 64 bytes."""
    room = np.empty(x.size + 64 + step, x.dtype)
    start = -room.ctypes.data // x.itemsize % (64 // x.itemsize) + step
    there = room[start:start + x.size].reshape(x.shape)
    there[...] = x
    return there


@pytest.mark.parametrize("kind, columns, m", [
    ("dots", True, 1), ("row", False, 1), ("matmul", False, 20)])
@pytest.mark.parametrize("types", TYPES[:4], ids="-".join)
@pytest.mark.parametrize("k, n", [(768, 50), (257, 33), (300, 17), (20, 9), (1000, 5)])
def test_bits_do_not_depend_on_where_the_arrays_lie(kind, columns, m, types, k, n):
    kernel = Kernel(kind, types, columns, native.host().vector_bits)
    a, b = numbers((m, k), types[0]), numbers((k, n), types[1])
    stored = np.ascontiguousarray(b.T) if columns else b
    found = set()
    for step in range(16):
        c = moved(np.zeros((m, n), DTYPE[types[2]]), step * 5 % 7)
        product(kernel)(moved(a, step * 3 % 8), moved(stored, step), c, True)
        found.add(c.tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("kind, columns, m", [
    ("dots", True, 1), ("row", False, 1),
    *[("matmul", columns, m) for columns in (True, False) for m in (1, 3, 40)]])
def test_nothing_is_read_beyond_the_ends(kind, columns, m):
    """Each factor ends, or begins, where its pages do; what lies beyond must not be
    touched."""
    program = f"""
import ctypes, mmap
import numpy as np
import test_schedule as t
libc = ctypes.CDLL(None)

def at_the_end(x, after=0):
    pages = -(-(x.nbytes + after) // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    for border in (0, mmap.PAGESIZE + pages):
        libc.mprotect(ctypes.c_void_p(start + border), mmap.PAGESIZE, 0)
    place = mmap.PAGESIZE + (after or pages - x.nbytes)
    y = np.frombuffer(whole, x.dtype, x.size, place).reshape(x.shape)
    y[...] = x
    return y

def at_the_start(x):
    return at_the_end(x, after=8)

kernel = t.Kernel({kind!r}, ("f64", "f32", "f64"), {columns}, t.native.host().vector_bits)
for k, n in ((1, 1), (5, 3), (63, 17), (130, 31), (257, 130), (1001, 7)):
    a, b = t.numbers(({m}, k), "f64"), t.numbers((k, n), "f32")
    for place in (at_the_end, at_the_start):
        c = place(np.zeros(({m}, n)))
        t.product(kernel)(place(a), place(b.T if {columns} else b), c, True)
        np.testing.assert_allclose(c, a @ b, rtol=1e-11, atol=1e-9)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent)


DIGESTS = """
import hashlib
import numpy as np
import test_schedule as t
from tinymlir import native, threads
dice, bits = np.random.default_rng(5), native.host().vector_bits
digest = hashlib.sha256()
for kind, columns, m in (("dots", True, 1), ("row", False, 1), ("matmul", False, 1),
                         ("matmul", False, 40), ("matmul", True, 40)):
    kernel = t.Kernel(kind, ("f64", "f32", "f64"), columns, bits,
                      parallel=threads.count() > 1)
    for k, n in ((700, 401), (1000, 1003), (300, 3001), (3000, 97), (90, 9001)):
        a, b = dice.standard_normal((m, k)), dice.standard_normal((k, n), np.float32)
        c = np.empty((m, n))
        t.product(kernel)(a, np.ascontiguousarray(b.T) if columns else b, c, True)
        np.testing.assert_allclose(c, a @ b, rtol=1e-11, atol=1e-9)
        digest.update(c.tobytes())
print(threads.count(), digest.hexdigest())
"""


def test_any_number_of_threads_gives_the_same_bits():
    """Also more threads than there are cores, and more than there are panels."""
    found = {}
    for count in (1, 2, 3, 7):
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], capture_output=True, text=True, check=True,
            cwd=Path(__file__).parent, env=os.environ | {"TINYMLIR_THREADS": str(count)})
        number, found[count] = done.stdout.split()
        assert int(number) == count
    assert len(set(found.values())) == 1


def test_factors_with_strides():
    kernel = Kernel("matmul", ("f64", "f64", "f64"), False, native.host().vector_bits)
    a, b = numbers((40, 30), "f64"), numbers((30, 50), "f64")
    for x, y in ((a.T[:, ::2][:, :20], b[:20]), (a[::3, 10:], b[10:, 3:40]),
                 (a[::-1], b[:, 8:])):
        c = np.empty((x.shape[0], y.shape[1]))
        product(kernel)(x, y, c, True)
        np.testing.assert_allclose(c, x @ y, rtol=1e-12, atol=1e-12)


SMALL = """
import threading
import numpy as np
from tinymlir import jit
function, a, b = jit(lambda x, y: x @ y), np.ones((300, 200)), np.ones((200, 300), np.float32)
function(a, b)
threading.stack_size(128 << 10)
thread = threading.Thread(target=lambda: print(function(a, b).sum()))
thread.start()
thread.join()
"""


@pytest.mark.parametrize("count", [1, 3])
def test_a_small_stack_is_enough(count):
    done = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True,
                          check=True, env=os.environ | {"TINYMLIR_THREADS": str(count),
                                                        "OMP_STACKSIZE": "128K"})
    assert float(done.stdout) == 300 * 200 * 300
