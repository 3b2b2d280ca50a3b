# Tangled from notebooks/91_everyday.md: edit the chapter, not this file.

# %% 91_everyday.md § A conversation (1)
"""`tinymlir chat`: a text that you and the model write in turns (appendix)."""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinymlir.cli import (
    add_sampling, at_least, choice, chosen_model, command, tell)
from tinymlir.errors import GenerationError, TinymlirError


@dataclass
class Chat:
    """A text, and who goes on with it."""

    model: Any
    tokenizer: Any
    tokens: int = 60  # of an answer
    pick: Callable[..., int] | None = None  # the best one, if None
    ids: list[int] = field(default_factory=list)  # the text so far


# %% 91_everyday.md § A conversation (2)
def add_line(chat: Chat, line: str) -> None:
    """Put a line behind the text. Raises GenerationError if it is not UTF-8."""
    from tinymlir.model import encode
    if not line and not chat.ids:
        raise GenerationError("nothing to go on from yet; write a few words")
    joined = line if line.startswith(" ") or not chat.ids else f"\n{line}"
    if line:
        chat.ids += encode(chat.tokenizer, joined)


# %% 91_everyday.md § A conversation (3)
def make_room(chat: Chat) -> int:
    """Forget the oldest tokens until an answer fits; how many that were."""
    room = chat.model.config.context - chat.tokens
    gone = max(len(chat.ids) - room, 0)
    del chat.ids[:gone]
    return gone


# %% 91_everyday.md § An answer (1)
def answer(chat: Chat, write: Callable[[str], Any]) -> int:
    """Go on with the text, piece by piece; how many tokens that were."""
    from tinymlir.model import greedy, iterate_ids, stream
    before, stop = len(chat.ids), chat.model.config.end is not None
    new = iterate_ids(chat.model, list(chat.ids), chat.tokens, stop,
                      chat.pick or greedy)
    with suppress(KeyboardInterrupt):
        for piece in stream(chat.tokenizer, noted(new, chat.ids)):
            write(piece)
    return len(chat.ids) - before


def noted(new: Iterator[int], ids: list[int]) -> Iterator[int]:
    """The same ids; each is added to the list as it passes."""
    for token in new:
        ids.append(token)
        yield token


# %% 91_everyday.md § Lines from somewhere (1)
def read_lines() -> Iterator[str]:
    """What is typed, or what a pipe brings, until it ends."""
    with suppress(AttributeError):  # somebody else's stdin
        sys.stdin.reconfigure(errors="surrogateescape")
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  input() can be edited from now on
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:  # a line that was not meant
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


# %% 91_everyday.md § Lines from somewhere (2)
def turn(chat: Chat, line: str, write: Callable[[str], Any]) -> None:
    """One line and what the model makes of it; notes go to standard error."""
    add_line(chat, line)
    if gone := make_room(chat):
        tell("note", f"the oldest {gone} tokens are forgotten; the context holds "
             f"{chat.model.config.context}")
    start = time.perf_counter()
    count = answer(chat, write)
    seconds = time.perf_counter() - start
    write("\n")
    tell("note", f"{count} tokens, {count / max(seconds, 1e-9):.1f} a second")


def run_chat(args: argparse.Namespace) -> None:
    """Write a text in turns with the model; an empty line asks for more."""
    from tinymlir.model import load_model
    pick = choice(args)
    model, tokenizer = load_model(
        chosen_model(args), cache=True, dtype=args.dtype, cast=args.cast)
    if args.tokens >= model.config.context:
        args.parser.error(f"--tokens {args.tokens}: expected less than the context "
                          f"of {model.config.context}")
    chat = Chat(model, tokenizer, args.tokens, pick)
    for line in read_lines():
        try:
            turn(chat, line, lambda piece: print(piece, end="", flush=True))
        except TinymlirError as error:
            tell("error", error)


# %% 91_everyday.md § Lines from somewhere (3)
def add_chat(sub: Any) -> None:
    """The words of `tinymlir chat`."""
    add = command(sub, "chat", run_chat)
    add("--tokens", type=at_least(int, 1), default=60, metavar="N",
        help="how many tokens an answer has at most (60)")
    add("--model", type=Path, metavar="DIR",
        help="a checkpoint (./model if there is one, else the bundled one)")
    add("--dtype", choices=["float32"], help="compute everything in it")
    add("--cast", action="store_true", help="take weights of 16 bits, as float32")
    add_sampling(add)
