# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § Targets (1)
"""Who wants to know what takes its time (chapter 4)."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

WATCHERS: list[Callable[[str], AbstractContextManager]] = []


def watched(name: str) -> ExitStack:
    """All watchers, for the time that something with this name takes."""
    stack = ExitStack()
    for watcher in WATCHERS:
        stack.enter_context(watcher(name))
    return stack
