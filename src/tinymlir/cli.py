# Tangled from notebooks/05_gpt2.md: edit the chapter, not this file.

# %% 05_gpt2.md § The command (1)
"""The command `tinymlir` (chapter 5)."""
from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from tinymlir import __version__
from tinymlir.errors import TinymlirError


def at_least(kind: type, low: float, strict: bool = False) -> Callable[[str], Any]:
    """A reader of numbers for argparse: an int or a float that is not too small."""
    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value < float("inf") or (strict and value == low):
            words = "more than" if strict else "at least"
            raise argparse.ArgumentTypeError(f"{text}: expected {words} {low}")
        return value
    read.__name__ = kind.__name__  # argparse puts it into "invalid int value"
    return read


# %% 05_gpt2.md § The subcommands (1)
def tell(kind: str, what: object) -> None:
    """One line on standard error."""
    print(f"{kind}: {' '.join(str(what).split())}", file=sys.stderr, flush=True)


def target_of(args: argparse.Namespace, directory: Path) -> str:
    """Where to run the model; refuses at once if that cannot be."""
    if args.kernels and not args.gpu:
        args.parser.error("--kernels needs --gpu")
    if args.precision != "float32" and not args.gpu:
        args.parser.error(f"--precision {args.precision} needs --gpu")
    if not args.gpu:
        return "cpu"
    from tinymlir.cli_gpu import prepare
    prepare(args, directory)
    return "gpu"


def chosen_model(args: argparse.Namespace) -> Path:
    """The checkpoint that was named, or the default one; says which."""
    from tinymlir.checkpoint import BUNDLED, default_directory
    directory = args.model or default_directory()
    known = {BUNDLED: "the bundled one (tales)", Path("model"): "./model"}
    print(f"model: {known.get(directory, directory)}", file=sys.stderr, flush=True)
    with suppress(AttributeError):  # a terminal that lacks a letter shows "?"
        sys.stdout.reconfigure(errors="replace")
    return directory


def run_generate(args: argparse.Namespace) -> None:
    """Write the text that follows a prompt, piece by piece."""
    from tinymlir.model import encode, iterate_ids, load_model, stream
    pick = choice(args)
    directory = chosen_model(args)
    model, tokenizer = load_model(directory, **options_of(args, directory))
    new = iterate_ids(
        model, encode(tokenizer, args.prompt), args.tokens, args.stop, pick)
    begun = False
    try:
        for piece in stream(tokenizer, new):
            print(piece, end="", flush=True)
            begun = True
    except BaseException:
        if begun:  # what is to be said next begins a line
            print(flush=True)
        raise
    print(flush=True)


# %% 05_gpt2.md § The subcommands (2)
def choice(args: argparse.Namespace) -> Callable[..., int]:
    """How the next token is chosen: the best one, or by throwing dice."""
    from tinymlir.model import greedy, sampler
    if args.temperature is not None:
        return sampler(args.temperature, args.top_k, args.seed or 0)
    if args.top_k is not None or args.seed is not None:
        args.parser.error("--top-k and --seed need --temperature")
    return greedy


# %% 05_gpt2.md § The subcommands (3)
def expected(got: str, known: Iterable[str]) -> str:
    """What to say of a word that is none of those known: the nearest one first."""
    near = get_close_matches(got, list(known), 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{got}: {hint}expected one of {', '.join(known)}"


def run_emit(args: argparse.Namespace) -> None:
    """Print a stage of an example's compilation, or how two stages differ."""
    from tinymlir.ops import EXAMPLES
    if args.list:
        for name, example in EXAMPLES.items():
            print(name.ljust(22), example.function.__doc__)
        return
    if args.name not in EXAMPLES:
        args.parser.error(expected(args.name or "no name", EXAMPLES))
    print(listing(args, EXAMPLES[args.name]), flush=True)


# %% 05_gpt2.md § The subcommands (4)
def stages_of(args: argparse.Namespace, example: Any) -> Any:
    """Stage name -> text, for this processor or for a GPU."""
    from tinymlir.jit import jit
    if args.gpu:
        from tinymlir.cli_gpu import stages_for
        return stages_for(example, args.chip, args.precision)
    if args.chip or args.precision != "float32":
        args.parser.error(f"--{'chip' if args.chip else 'precision'} needs --gpu")
    return jit(example.function).compile(*example.arrays, **example.static).stages


def listing(args: argparse.Namespace, example: Any) -> str:
    """The text that `emit` was asked for."""
    from tinymlir.show import diff
    stages = stages_of(args, example)
    asked = args.diff or (list(stages) if args.stage == "all" else [args.stage])
    for stage in asked:
        if stage not in stages:
            args.parser.error(expected(stage, ["all", *stages]))
    if args.diff:
        return str(diff(*(stages[stage] for stage in asked)))
    heads = "==== {}\n{}\n" if args.stage == "all" else "{1}"
    return "\n".join(heads.format(s, str(stages[s]).rstrip()) for s in asked)


# %% 05_gpt2.md § The subcommands (5)
def run_fetch(args: argparse.Namespace) -> None:
    """Download GPT-2 (550 MB) into a folder; if interrupted, run it again."""
    from tinymlir.fetch import fetch
    config = fetch(args.directory).config
    print(f"{args.directory}: {config.blocks} blocks of width {config.width}, "
          f"{config.vocabulary:,} tokens", file=sys.stderr)


# %% 05_gpt2.md § The subcommands (6)
def run_verify(args: argparse.Namespace) -> int:
    """Compare every residual with a reference's; status 1 if one differs."""
    from tinymlir.blame import blame
    from tinymlir.model import load_model
    from tinymlir.upstream import Upstream, fetch_checkout
    from tinymlir.verify import choose_prompt, summary, table, verify
    directory = chosen_model(args)
    model, tokenizer = load_model(directory, **options_of(args, directory))
    prompt, known = choose_prompt(directory, args.prompt, args.tokens)
    checkout = fetch_checkout() if args.fetch_reference else args.reference
    if checkout and args.dtype:
        args.parser.error("--reference promotes as NumPy does; leave out --dtype")
    reference = checkout and Upstream(
        checkout, directory, model.config, model.params)
    report = verify(model, tokenizer, prompt, args.tokens, reference, known)
    print(table(report), summary(report), sep="\n\n", flush=True)
    if not report.ok:
        print(blame(model, report))
    print("OK" if report.ok else "NOT OK")
    return int(not report.ok)


# %% 05_gpt2.md § The subcommands (7)
def command(sub: Any, name: str, function: Callable[..., int | None]) -> Callable:
    """A new subcommand; returns what adds arguments to it."""
    text = function.__doc__
    parser = sub.add_parser(name, help=text, description=text)
    parser.set_defaults(function=function, parser=parser)
    return parser.add_argument


def add_precision(add: Callable) -> None:
    add("--precision", choices=["float32", "tf32"], default="float32",
        help="with --gpu: tf32 multiplies float32 matrices on tensor cores, which "
             "look at 11 bits of each number (float32)")


def add_model(add: Callable) -> None:
    add("--model", type=Path, metavar="DIR",
        help="a checkpoint (./model if there is one, else the bundled one)")
    add("--fused", action="store_true", help="run it as one function")
    add("--cache", action="store_true", help="compute each token once")
    add("--dtype", choices=["float32"], help="compute everything in it")
    add("--cast", action="store_true", help="take weights of 16 bits, as float32")
    add("--gpu", action="store_true", help="run it on an NVIDIA GPU")
    add_precision(add)
    add("--kernels", type=Path, metavar="DIR",
        help="with --gpu: what `tinymlir compile` has saved; nothing is compiled")


def options_of(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The options of `load_model`."""
    names = "fused", "cache", "dtype", "cast", "precision"
    options = {name: getattr(args, name) for name in names}
    return {"target": target_of(args, directory), **options}


def add_generate(sub: Any) -> None:
    add = command(sub, "generate", run_generate)
    add("prompt", help="the text to go on from; <|endoftext|> in it is not these "
        "letters but the token that ends a text")
    add("--tokens", type=at_least(int, 0), default=10, metavar="N",
        help="how many tokens to add (10)")
    add_model(add)
    add("--stop", action="store_true", help="end where the model ends the text")
    add_sampling(add)


def add_sampling(add: Callable) -> None:
    add("--temperature", type=at_least(float, 0, strict=True), metavar="T",
        help="throw dice instead of taking the best token; below 1 is tamer")
    add("--top-k", type=at_least(int, 1), metavar="K", help="of the K best tokens")
    add("--seed", type=at_least(int, 0), metavar="S", help="of the dice (0)")


# %% 05_gpt2.md § The subcommands (8)
def add_emit(sub: Any) -> None:
    add = command(sub, "emit", run_emit)
    add("name", nargs="?", help="an example; --list names them")
    add("--stage", default="graph", help="a stage of the compiler, or all (graph)")
    add("--diff", nargs=2, metavar="STAGE", help="what changed between two stages")
    add("--list", action="store_true", help="the examples")
    add("--gpu", action="store_true", help="for an NVIDIA GPU; needs none")
    add("--chip", metavar="sm_XX", help="with --gpu: for which one")
    add_precision(add)


def add_verify(sub: Any) -> None:
    add = command(sub, "verify", run_verify)
    add_model(add)
    add("--prompt", metavar="TEXT", help="the text to go on from")
    add("--tokens", type=at_least(int, 1), default=10, metavar="N",
        help="how many steps to compare (10)")
    add("--reference", type=Path, metavar="DIR",
        help="a checkout of sdiehl/tiny-gpt2 to compare with, not our own NumPy")
    add("--fetch-reference", action="store_true",
        help="get that checkout first, unless it is there (git, network)")


def add_fetch(sub: Any) -> None:
    add = command(sub, "fetch", run_fetch)
    add("directory", nargs="?", type=Path, default=Path("model"), metavar="DIR",
        help="where to (./model)")


LATER = [  # "module:function" of subcommands that other chapters add
    "tinymlir.chat:add_chat",
    "tinymlir.doctor:add_doctor",
    "tinymlir.cli_gpu:add_compile",  # chapter 9
]


def make_parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    parser = argparse.ArgumentParser(
        prog="tinymlir", description="A tensor compiler that is a book.")
    parser.add_argument(
        "--version", action="version", version=f"tinymlir {__version__}")
    sub = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_generate, add_verify, add_emit, add_fetch):
        add(sub)
    for place in LATER:
        module, _, name = place.partition(":")
        getattr(import_module(module), name)(sub)
    return parser


# %% 05_gpt2.md § The subcommands (9)
def main(argv: list[str] | None = None) -> int:
    """Obey a command line; the exit status is 0, 1 for refused or 2 for usage."""
    from tinymlir.progress import progress
    args = make_parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda what, *where: tell("warning", what)
            with progress():
                return args.function(args) or 0
    except BrokenPipeError:  # nobody reads on; what is in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (TinymlirError, OSError, Warning) as error:  # Warning: with -W error
        tell("error", error)
        return 1
