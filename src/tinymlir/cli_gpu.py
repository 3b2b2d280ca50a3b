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
    from tinymlir.saved import purpose_of, use_kernels
    if args.kernels:
        config = read_config(directory / "config.json", args.cast)
        use_kernels(args.kernels, **purpose_of(
            config, args.fused, args.dtype, args.precision))
    device()


def run_compile(args: argparse.Namespace) -> None:
    """Save everything a GPU machine needs to run a model without a compiler."""
    import numpy as np

    from tinymlir.gpu import check_chip
    from tinymlir.model import encode, load_model
    from tinymlir.saved import pretending, purpose_of, write_kernels
    from tinymlir.verify import choose_prompt
    if not args.gpu:
        args.parser.error("only kernels for a GPU can be saved; say --gpu")
    if args.cache or args.kernels:
        args.parser.error("--cache and --kernels do not go with compile")
    check_chip(args.chip, args.precision)
    directory = chosen_model(args)
    with pretending(args.chip) as plans:
        model, tokenizer = load_model(
            directory, "gpu", fused=args.fused, dtype=args.dtype, cast=args.cast,
            precision=args.precision)
        start = len(encode(tokenizer, choose_prompt(directory, args.prompt, 1)[0]))
        asked = args.lengths or range(start, start + args.tokens)
        for n in asked:
            model(np.zeros(n, int))
            model(np.zeros(n, int), trace={})
    purpose = purpose_of(model.config, args.fused, args.dtype, args.precision)
    write_kernels(args.out, args.chip, plans, lengths=list(asked), **purpose)
    print(f"{args.out}: {len(plans)} plans for {args.chip}, lengths "
          f"{min(asked)} to {max(asked)}", file=sys.stderr)


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
