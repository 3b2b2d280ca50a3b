"""The memory that compiled code keeps between calls."""
import ctypes
import os
import subprocess
import sys
import threading

import pytest

from tinymlir import pool

TAKE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(pool.code().address("take"))
GIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(pool.code().address("give"))

AT_ONCE = """
import threading
from tinymlir import pool
start, found = threading.Barrier(8), []

def work():
    start.wait()
    found.append(tuple(pool.symbols().values()))

threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(set(found)) == 1, found
"""


@pytest.mark.parametrize("run", range(3))
def test_threads_that_come_at_once_get_the_same_pool(run):
    """A second pool would be freed while code still calls it."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True,
                          env=os.environ, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_piece_is_handed_out_to_one_at_a_time():
    size = 300_001
    first, second = TAKE(size), TAKE(size)
    assert first != second
    GIVE(first)
    assert TAKE(size) == first
    for piece in (first, second):
        ctypes.memset(piece, 1, size)
        GIVE(piece)


def test_more_than_the_table_holds_is_given_back():
    pieces = [TAKE(200_000 + i) for i in range(3 * pool.PLACES)]
    assert len(set(pieces)) == len(pieces)
    for piece in pieces:
        GIVE(piece)
    again = [TAKE(200_000 + i) for i in range(len(pieces))]
    assert len(set(again)) == len(again)
    for piece in again:
        ctypes.memset(piece, 1, 200_000)
        GIVE(piece)


def test_a_piece_stays_while_there_is_room():
    """Small pieces that come and go do not push a large one out."""
    large = TAKE(5_000_001)
    GIVE(large)
    for i in range(5 * pool.PLACES):
        GIVE(TAKE(150_000 + i % 3))
    assert TAKE(5_000_001) == large
    GIVE(large)


def test_a_piece_above_the_limit_is_not_kept():
    GIVE(TAKE(pool.LIMIT + 1))  # only that it does not crash, nor keep hold of the lock
    GIVE(None)
    piece = TAKE(pool.LARGE)
    GIVE(piece)
    assert TAKE(pool.LARGE) == piece


def test_many_threads_take_and_give():
    """Each writes its own number over its piece, and finds it there afterwards."""
    wrong = []

    def work(number):
        for i in range(200):
            size = 70_000 + i % 5
            piece = TAKE(size)
            ctypes.memset(piece, number, size)
            if ctypes.string_at(piece, size) != bytes([number]) * size:
                wrong.append(number)
            GIVE(piece)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
