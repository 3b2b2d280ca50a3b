# Tangled from notebooks/09_cuda.md: edit the chapter, not this file.

# %% 09_cuda.md § Reading PTX (1)
"""PTX as instructions (chapter 9)."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

GUARD, NAME = r"(?:@(?P<no>!?)(?P<guard>%p\w+)\s+)?", r"(?P<name>[\w.:]+)"
LINE = re.compile(rf"{GUARD}{NAME}\s*(?P<rest>.*)", re.DOTALL)
ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)([^{]*)\{(.*?)\n\}", re.DOTALL)
PARAM = re.compile(r"\.param \.[a-z](\d+)(?: \.ptr[^,\n]*?)? (\w+)\s*(?:,|$)", re.M)
ARRAY = re.compile(r"\.(extern )?\.?(shared|local) \.align (\d+) \.b8\s+"
                   r"(\w+)\[(\d*)\]")
TABLE = re.compile(r"(\S+):\s*\.branchtargets\s*(.*)", re.DOTALL)
INNER = re.compile(r"\{\s*\.reg [^;]*;(.*?;)\s*\}")  # a register of one instruction
LIMIT = re.compile(r"\.(?:maxntid|reqntid) (\d+)(?:, (\d+))?(?:, (\d+))?")


class PTXError(Exception):
    """A text that this reader does not know."""


@dataclass(frozen=True)
class Instruction:
    """`@guard name operands;`"""

    name: tuple[str, ...]  # the parts between the dots
    operands: tuple[str, ...]
    guard: str = ""
    negated: bool = False


@dataclass
class Kernel:
    """An entry of a PTX text."""

    name: str
    params: dict[str, int]  # name -> bytes, in order
    threads: int  # the most that a block may have
    arrays: dict[str, tuple[str, int, int]]  # name -> kind, place, bytes
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # of "shared" and "local"
    tables: dict[str, list[str]] = field(default_factory=dict)  # of labels


# %% 09_cuda.md § Reading PTX (2)
def split(text: str) -> tuple[str, ...]:
    """Operands between commas; braces and brackets hold together."""
    return tuple(part.strip() for part in
                 re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text))


def instruction(text: str) -> Instruction:
    found = LINE.fullmatch(text)
    if found is None:
        raise PTXError(f"cannot read {text!r}")
    name = tuple(found["name"].replace("::", "_").split("."))
    return Instruction(
        name, split(found["rest"]), found["guard"] or "", bool(found["no"]))


def arrays_of(kernel: Kernel, text: str) -> None:
    """The places of shared and local arrays; an array without a size comes last."""
    found = [(not size, kind, int(align), name, int(size or 0))
             for _, kind, align, name, size in ARRAY.findall(text)]
    for _, kind, align, name, size in sorted(found, key=lambda a: a[0]):
        start = -(-kernel.sizes.get(kind, 0) // align) * align
        kernel.arrays[name] = kind, start, size
        kernel.sizes[kind] = start + size


# %% 09_cuda.md § Reading PTX (3)
FUNC = re.compile(r"\.func\s+(?:\(\.param \.\w+ (\w+)\)\s*)?([\w$]+)\s*\((.*?)\)"
                  r"\s*\{(.*?)\n\}", re.DOTALL)
CALL = re.compile(r"call(?:\.uni)?\s+(?:\((\w+)\),\s*)?([\w$]+),\s*\((.*?)\);")


def inlined(body: str, functions: dict[str, tuple[str, list[str], str]]) -> str:
    """The instructions with those of functions in place of calls."""
    while call := CALL.search(body):
        result, name, given = call.groups()
        if name not in functions:
            raise PTXError(f"call of {name}, which is not there")
        own, takes, code = functions[name]
        names = dict(zip(takes, split(given))) | {own: result}
        tail = f"_{call.start()}"

        def rename(word: re.Match, names=names, tail=tail) -> str:
            text = word[0]
            if text == "ret":
                return f"bra $end{tail}"
            return text + tail if text[0] in "%$" else names.get(text, text)

        code = re.sub(r"%(?:p|rs|r|rd|f|fd)\d+\b|\$?\b\w+", rename, code)
        body = f"{body[:call.start()]}\n{code}\n$end{tail}:\n{body[call.end():]}"
    return body


def kernels(text: str) -> dict[str, Kernel]:
    """Every kernel of a PTX text, by name. Raises PTXError."""
    found, text = {}, re.sub(r"//[^\n]*", "", text)
    functions = {name: (own, [p for _, p in PARAM.findall(takes)], code)
                 for own, name, takes, code in FUNC.findall(text)}
    outside = ENTRY.sub("", FUNC.sub("", text))
    for name, params, heads, body in ENTRY.findall(text):
        limit = LIMIT.search(heads)
        sizes = [int(n or 1) for n in limit.groups()] if limit else [1024]
        takes = {param: int(bits) // 8 for bits, param in PARAM.findall(params)}
        kernel = Kernel(name, takes, math.prod(sizes), {})
        whole = inlined(INNER.sub(r"\1", body), functions)
        arrays_of(kernel, outside + whole)
        read_body(kernel, INNER.sub(r"\1", whole))
        found[name] = kernel
    return found


def read_body(kernel: Kernel, body: str) -> None:
    """The instructions, and where the labels are."""
    for part in re.split(r"[;{}](?=\s*\n)|(?<=:)\s*\n", body):
        text = part.strip()
        if table := TABLE.fullmatch(text):
            kernel.tables[table[1]] = list(split(table[2]))
        elif text.endswith(":"):
            kernel.labels[text[:-1]] = len(kernel.code)
        elif text and not text.startswith("."):
            kernel.code.append(instruction(text))
