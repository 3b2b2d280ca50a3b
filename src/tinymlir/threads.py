# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § Threads (1)
"""The threads of compiled code (chapter 4)."""
from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import cache
from pathlib import Path

from tinymlir.errors import ArgumentError

SYMBOLS = (  # what the code calls
    "__kmpc_fork_call", "__kmpc_global_thread_num", "__kmpc_for_static_init_8u",
    "__kmpc_for_static_fini", "__kmpc_barrier", "omp_get_max_threads")
NAMES = {"darwin": "libomp.dylib", "win32": "libomp.dll"}


def asked() -> int:
    """TINYMLIR_THREADS, or the cores that this process may use."""
    text = os.environ.get("TINYMLIR_THREADS", "")
    if not text:
        mine = getattr(os, "sched_getaffinity", None)
        return len(mine(0)) if mine else os.cpu_count() or 1
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ArgumentError(
            f"TINYMLIR_THREADS: expected a number from 1 to 1024, got {text!r}")
    return int(text)


def find_library() -> Path | None:
    """Where pip has put OpenMP, if it is installed."""
    name = NAMES.get(sys.platform, "libomp.so")
    places = (Path(p, "cmeel.prefix", "lib", name) for p in sys.path)
    return next((place for place in places if place.is_file()), None)


# %% 04_jit.md § Threads (2)
SPIN = "10"  # milliseconds


lock = threading.Lock()


def library() -> ctypes.CDLL | None:
    """OpenMP, awake; None if there is one thread only, or no such library."""
    with lock:  # one thread wakes it, the others wait
        return load_library()


@cache
def load_library() -> ctypes.CDLL | None:
    count, place = asked(), find_library()
    if count == 1 or place is None:
        return None
    lent = {"OMP_NUM_THREADS": str(count), "KMP_BLOCKTIME": SPIN,
            "KMP_DUPLICATE_LIB_OK": "TRUE"}  # another package may bring its own
    before = {name: os.environ.get(name) for name in lent}
    os.environ.update(lent)
    try:
        found = ctypes.CDLL(str(place))
        found.omp_get_max_threads()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return found


@cache
def count() -> int:
    """How many threads compiled code uses.

    Raises ArgumentError for a TINYMLIR_THREADS that is no number."""
    return asked() if library() else 1


@cache
def symbols() -> dict[str, int]:
    """The addresses of what compiled code calls."""
    found = library()
    functions = [(name, getattr(found, name)) for name in SYMBOLS] if found else []
    return {name: ctypes.cast(function, ctypes.c_void_p).value
            for name, function in functions}
