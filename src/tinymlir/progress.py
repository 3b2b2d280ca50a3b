# Tangled from notebooks/05_gpt2.md: edit the chapter, not this file.

# %% 05_gpt2.md § Patience (1)
"""What takes longer than two seconds is told on a terminal (chapter 5)."""
from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tinymlir.watch import WATCHERS

SAVE, BACK = "\x1b7", "\x1b8\x1b[J"  # remember the place; return and clear the rest


class Progress:
    """A watcher that writes to a terminal what takes so long."""

    def __init__(self, out: TextIO, after: float = 2.0, every: float = 1.0) -> None:
        self.out, self.after, self.every = out, after, every
        self.lock = threading.Lock()
        self.tasks: list[tuple[str, float, threading.Event]] = []
        self.shown = False

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        task = what, time.monotonic(), threading.Event()
        with self.lock:
            self.tasks.append(task)
        threading.Thread(target=self.tell, args=(task,), daemon=True).start()
        try:
            yield
        finally:
            task[2].set()
            with self.lock:  # what comes after this finds the line as it was
                self.tasks.remove(task)
                self.write("")

    def tell(self, task: tuple[str, float, threading.Event]) -> None:
        """A line about a task, again and again until it has ended."""
        what, start, ended = task
        wait = self.after
        while not ended.wait(wait):
            wait = self.every
            with self.lock:
                if not ended.is_set() and task is self.tasks[-1]:
                    passed = time.monotonic() - start
                    self.write(f"[{what}, {passed:.0f} s]")

    def write(self, note: str) -> None:
        """Show a note in place of the last one; "" takes it back."""
        if self.shown or note:
            back = BACK if self.shown else ""
            self.out.write(back + (SAVE + note if note else ""))
            self.out.flush()
        self.shown = bool(note)


@contextmanager
def progress(after: float = 2.0) -> Iterator[None]:
    """Watch what is compiled, if somebody looks at standard error."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    watcher = Progress(sys.stderr, after)
    WATCHERS.append(watcher)
    try:
        yield
    finally:
        WATCHERS.remove(watcher)
