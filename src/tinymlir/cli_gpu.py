# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § The command (1)
"""The command `tinymlir compile`, and what `--gpu` does (chapter 9)."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinymlir.cli import add_model, at_least, chosen_model, command


LONGEST = 1 << 16  # tokens; no context is as long


def lengths(text: str) -> list[int]:
    """ "6-16,32" as numbers."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        span = range(int(first), int(last if dash else first) + 1)
        if not span or span[0] < 1 or span[-1] > LONGEST:
            raise ValueError
        found.update(span)
    return sorted(found)


# %% 09_cuda.md § The command (2)
def stages_for(example: Any, chip: str | None, precision: str
               ) -> Mapping[str, str]:
    """The stages of an example on a GPU, for a chip. Raises ArgumentError."""
    from tinymlir import cuda, gpu
    from tinymlir.jit import jit
    before = cuda.settings.chip
    cuda.settings.chip = gpu.check_chip(chip, precision) if chip else before
    try:
        function = jit(example.function, target="gpu", precision=precision)
        return function.compile(*example.arrays, **example.static).stages
    finally:
        cuda.settings.chip = before


def prepare(args: argparse.Namespace, directory: Path) -> None:
    """See that there is a GPU, and take its kernels from a folder if one is named.

    Raises DeviceError or KernelsError."""
    from tinymlir.checkpoint import read_config
    from tinymlir.device import device
    from tinymlir.saved import use_kernels
    device()  # or there is no use in going on
    if args.kernels:
        config = read_config(directory / "config.json", args.cast)
        kernels = use_kernels(args.kernels, **purpose(args, config))
        start = prompt_length(args, directory, config)
        if start + args.tokens <= config.context + 1:  # else the model says so
            kernels.check_lengths(start, args.tokens)


def purpose(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """What kernels have to be for."""
    from tinymlir.saved import purpose_of
    return purpose_of(config, args.fused and not args.cache, args.dtype, args.cache,
                      args.precision)


def prompt_length(args: argparse.Namespace, directory: Path, config: Any) -> int:
    """The tokens of the prompt, which `verify` may have to choose."""
    from tinymlir.checkpoint import read_tokenizer
    from tinymlir.model import encode
    from tinymlir.verify import choose_prompt
    tokenizer = read_tokenizer(directory / "tokenizer.json", config.vocabulary)
    prompt, _ = choose_prompt(directory, args.prompt, args.tokens)
    return len(encode(tokenizer, prompt))


def run_compile(args: argparse.Namespace) -> None:
    """Save everything a GPU machine needs to run a model without a compiler."""
    from tinymlir.gpu import check_chip
    from tinymlir.model import load_model
    from tinymlir.saved import pretending, write_kernels
    if not args.gpu:
        args.parser.error("only kernels for a GPU can be saved; say --gpu")
    if args.kernels:
        args.parser.error("--kernels does not go with compile")
    check_chip(args.chip, args.precision)
    directory = chosen_model(args)
    with pretending(args.chip) as plans:
        model, _ = load_model(directory, "gpu", fused=args.fused, dtype=args.dtype,
                              cache=args.cache, cast=args.cast,
                              precision=args.precision)
        start = prompt_length(args, directory, model.config)
        asked = args.lengths or range(start, start + args.tokens)
        for n in asked:
            run_all(model, n)
    write_kernels(args.out, args.chip, plans, lengths=list(asked),
                  **purpose(args, model.config))
    print(f"{args.out}: {len(plans)} plans for {args.chip}, lengths "
          f"{min(asked)} to {max(asked)}", file=sys.stderr)


def run_all(model: Any, n: int) -> None:
    """What a model does with a text of n tokens, with its residuals and without.

    A model with a cache has done less the second time: a step for the last one."""
    import numpy as np
    ids = np.full(n, n % model.config.vocabulary)  # nothing like those of n - 1
    for _ in range(2):
        model(ids)
        model(ids, trace={})


def add_compile(sub: Any) -> None:
    add = command(sub, "compile", run_compile)
    add_model(add)
    add("--chip", default="sm_80", help="the oldest GPU that has to run it (sm_80)")
    add("--out", type=Path, required=True, metavar="DIR", help="where to")
    add("--lengths", type=lengths, metavar="N-M,...",
        help="numbers of tokens (those of --prompt and --tokens)")
    add("--prompt", metavar="TEXT", help="the text to go on from (verify's)")
    add("--tokens", type=at_least(int, 1), default=10, metavar="N",
        help="how many tokens follow (10)")
