# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § What each loop costs (1)
"""What the loops and calls of compiled code read, write and compute (chapter 4)."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf, nan, prod
from typing import Any

from mlir import ir

from tinymlir import passes
from tinymlir.bands import bands, rows_of
from tinymlir.calls import constant_of, find
from tinymlir.compiler import begin, context, mlir_lock
from tinymlir.graph import Graph
from tinymlir.loops import ACCESS, LOOPS, body_of, root


@dataclass(frozen=True)
class Cost:
    """A kernel: a call of a matrix product, or a loop around loops.

    What is only known when the program runs is NaN."""

    name: str
    shape: tuple[float, ...]  # turns of its loops; M, N, K of a product
    types: tuple[str, ...]  # of A, B, C; of what a loop stores
    read: float = 0  # bytes
    written: float = 0
    flops: float = 0  # arithmetic operations
    times: int = 1  # how often it runs in one call

    @property
    def bytes(self) -> float:
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """Operations for each byte; infinite if all of them stay in a cache."""
        if not self.bytes:
            return inf if self.flops else 0.0
        return self.flops / self.bytes


# %% 04_jit.md § What each loop costs (2)
FLOATS: dict[str, str] = {  # operations on floats -> what they are called
    "arith.addf": "add", "arith.subf": "sub", "arith.mulf": "mul",
    "arith.divf": "div", "arith.negf": "neg", "arith.remf": "rem",
    "arith.maximumf": "max", "arith.minimumf": "min", "arith.maxnumf": "max",
    "arith.minnumf": "min", "math.fma": "fma", "math.absf": "abs",
    "math.sqrt": "sqrt", "math.log": "log", "math.powf": "pow", "math.exp": "exp",
    "math.tanh": "tanh"}
INTEGERS: dict[str, str] = {
    "arith.addi": "add", "arith.subi": "sub", "arith.muli": "mul",
    "arith.maxsi": "max", "arith.minsi": "min", "math.absi": "abs",
    "arith.andi": "and", "arith.ori": "or", "arith.xori": "xor",
    "arith.floordivsi": "div", "arith.divsi": "div", "arith.remsi": "rem"}
TWO = ("math.fma",)  # these count as two operations
BITS = {"index": 64, "i1": 8}  # of memory; the names of other types end with theirs


def size_of(element: str) -> int:
    """Bytes of an element in memory."""
    return BITS.get(element, 0) // 8 or int(element.lstrip("bfi")) // 8


def nan_in(*numbers: float) -> bool:
    return any(x != x for x in numbers)


def number(value: ir.Value) -> float:
    """The constant, or NaN."""
    known = constant_of(value)
    return nan if known is None else known


def turns(op: ir.Operation) -> list[tuple[ir.Value, float]]:
    """The variables of a loop, and how often each one turns."""
    n = len(list(body_of(op).arguments)) if op.name == LOOPS[0] else 1
    low, high, step = (list(op.operands)[i * n:i * n + n] for i in range(3))
    return [(place, max(-(-(number(b) - number(a)) // number(s)), 0))
            for place, a, b, s in zip(body_of(op).arguments, low, high, step)]


# %% 04_jit.md § What each loop costs (3)
Loops = list[tuple[ir.Value, float]]


def among(value: ir.Value, loops: Loops) -> set[int]:
    """Which of the loops (by number) a value depends on."""
    number_of = {variable: i for i, (variable, _) in enumerate(loops)}
    found, seen, todo = set(), set(), [value]
    while todo:
        value = todo.pop()
        if value in number_of:
            found.add(number_of[value])
        elif value not in seen and not isinstance(value.owner, ir.Block):
            todo += value.owner.operands
        seen.add(value)
    return found


STAYS = "tinymlir.stays"  # marks a buffer of which a cache holds all that is alive


def stays(buffer: ir.Value) -> bool:
    """Is it cut into bands, so that it never goes out to memory?"""
    made = root(buffer).owner
    return not isinstance(made, ir.Block) and STAYS in made.attributes


def mark_bands(work: passes.Work) -> None:
    """What `passes.bands` would cut stays whole, so that its sizes are known."""
    blocks = [x for op in find(work.module, "func.func") for x in op.regions[0]]
    for band in (x.trimmed() for block in blocks for x in bands(block)):
        own = band.own()
        if rows_of(band, own):
            for buffer in own:
                buffer.owner.attributes[STAYS] = ir.UnitAttr.get()


@dataclass
class Census:
    """What was found in a kernel so far."""

    reads: dict[ir.Value, float] = field(default_factory=dict)  # elements
    writes: dict[ir.Value, float] = field(default_factory=dict)
    floats: Counter = field(default_factory=Counter)
    integers: Counter = field(default_factory=Counter)
    products: list[tuple[Cost, float]] = field(default_factory=list)
    shape: tuple[float, ...] = ()  # of the deepest loops
    stored: str = ""  # the type of what was written last

    def access(self, op: ir.Operation, loops: Loops) -> None:
        at = ACCESS[op.name]
        buffer, *indices = list(op.operands)[at:]
        if at:
            self.stored = str(ir.MemRefType(buffer.type).element_type)
        if stays(buffer):
            return
        if not at and root(buffer) in map(root, self.writes):
            return  # it was written here, so it is in a cache
        used = set().union(*(among(x, loops) for x in indices))
        touched = prod(loops[i][1] for i in used)
        whole = prod(ir.MemRefType(buffer.type).shape)
        known = min(touched, whole) if whole >= 0 else touched
        kept = self.writes if at else self.reads
        both = known, kept.get(buffer, known)
        kept[buffer] = nan if nan_in(*both) else max(both)

    def count(self, op: ir.Operation, loops: Loops) -> None:
        often = prod(n for _, n in loops) * (2 if op.name in TWO else 1)
        if op.name in FLOATS:
            self.floats[FLOATS[op.name]] += often
        elif op.name in INTEGERS and str(op.results[0].type) != "index":
            self.integers[INTEGERS[op.name]] += often


# %% 04_jit.md § What each loop costs (4)
def visit(op: ir.Operation, census: Census, loops: Loops) -> None:
    """Enter an operation, and everything in it, into a census."""
    if op.name in LOOPS:
        loops = loops + turns(op)
        if len(loops) > len(census.shape):
            census.shape = tuple(n for _, n in loops)
    if op.name in ACCESS:
        census.access(op, loops)
    elif op.name == "func.call":
        census.products.append((product(op), prod(n for _, n in loops)))
    else:
        census.count(op, loops)
    for region in op.regions:
        for inner in (x for block in region for x in block):
            visit(inner.operation, census, loops)


def called(op: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(op.attributes["callee"]).value


def matrix(address: ir.Value) -> ir.Value:
    """The buffer that an operand of a call points into."""
    while address.owner.name != "memref.extract_aligned_pointer_as_index":
        address = address.owner.operands[0]
    return address.owner.operands[0]


def product(op: ir.Operation) -> Cost:
    """The cost of one call of a matrix product: its operands tell the sizes."""
    kind, *types = called(op).split("_")[:4]
    given = list(op.operands)
    a, b, c = given[3:5], given[10:12], given[17:19]  # rows and columns of each
    m, n, k = number(c[0]), number(c[1]), number(a[1])
    sizes = (0 if stays(matrix(address)) else prod(map(number, x)) * size_of(t)
             for x, t, address in zip((a, b, c), types, given[::7]))
    of_a, of_b, of_c = sizes
    return Cost(kind, (m, n, k), tuple(types), of_a + of_b, of_c, 2 * m * n * k)


# %% 04_jit.md § What each loop costs (5)
MOST = 5  # operations in a name, else four


def bytes_of(found: dict[ir.Value, float]) -> float:
    return sum(n * size_of(str(ir.MemRefType(buffer.type).element_type))
               for buffer, n in found.items())


def named(census: Census) -> str:
    """What a loop is called: by what it computes, in order."""
    done = [*(census.floats or census.integers)]
    if not done:
        return "copy" if census.reads else "fill"
    return " ".join(done if len(done) <= MOST else [*done[:MOST - 1], "..."])


def stored(op: ir.Operation, census: Census) -> tuple[str, ...]:
    """The element type of what a loop writes last, or of its sum."""
    if census.stored:
        return (census.stored,)
    return tuple(str(x.type) for x in op.results)


def cost(op: ir.Operation) -> Cost:
    """The cost of a loop or a call. Its name is only right before `functions`."""
    census = Census()
    visit(op, census, [])
    if census.products:
        one, often = census.products[0]
        shape = one.shape if op.name == "func.call" else (often, *one.shape)
        return replace(one, shape=shape, read=one.read * often,
                       written=one.written * often, flops=one.flops * often)
    work = sum((census.floats or census.integers).values())
    return Cost(named(census), census.shape, stored(op, census),
                bytes_of(census.reads), bytes_of(census.writes), work)


# %% 04_jit.md § What each loop costs (6)
def kernels_of(module: ir.Module) -> list[tuple[ir.Operation, int]]:
    """The loops and products of a module in order, and how often each runs."""
    bodies = {ir.StringAttr(f.attributes["sym_name"]).value: f
              for f in find(module, "func.func") if len(list(f.regions[0]))}

    def within(name: str, times: int) -> list[tuple[ir.Operation, int]]:
        ops = [x.operation for block in bodies[name].regions[0] for x in block]
        calls = Counter(called(op) for op in ops if op.name == "func.call")
        found = []
        for op in ops:
            callee = called(op) if op.name == "func.call" else ""
            if callee in bodies:  # all its calls at the place of the first
                found += within(callee, times * calls.pop(callee, 0))
            elif callee or op.name in LOOPS:
                found.append((op, times))
        return [(op, n) for op, n in found if n]

    return within("main", 1)


def costs(graph: Graph) -> list[Cost]:
    """Every kernel of the compiled graph, in order."""
    steps: list[Any] = []
    for stage in passes.CPU:  # up to the loops, but with `exp` and `tanh` in them
        steps += [mark_bands if step is passes.bands else step
                  for step in stage.steps if step is not passes.functions]
        if stage.name == "scheduled":
            break
    with mlir_lock, context():
        work = passes.run_stages(begin(graph), (passes.Stage("", tuple(steps)),))
        found = kernels_of(work.module)
        names = [cost(op).name for op, _ in found]
        passes.functions(work)
        return [replace(cost(op), name=name, times=times)
                for (op, times), name in zip(found, names)]
