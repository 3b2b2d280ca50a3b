# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § What did it do? (1)
"""What a compiled function is, in words and numbers (chapter 4)."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from tinymlir.expr import ELEMENTWISE, REDUCTIONS, Expr, Op, TensorType
from tinymlir.graph import Graph
from tinymlir.jit import Jitted


def differences(key: tuple, other: tuple, names: Sequence[str]) -> list[str]:
    """What tells two keys apart, in words."""
    (structures, types, static), (structures2, types2, static2) = key, other
    found = []
    if structures != structures2:
        found.append("the structure of the arguments differs")
    elif types != types2:
        found += [f"{name}: {TensorType(*a)} instead of {TensorType(*b)}"
                  for name, a, b in zip(names, types, types2) if a != b]
    if static != static2:
        found.append("the static keywords differ")
    return found


FLOPS: dict[Op, Callable[[Expr], int]] = {
    **dict.fromkeys(ELEMENTWISE, lambda x: x.size),
    **dict.fromkeys(REDUCTIONS, lambda x: x.operands[0].size),
    Op.MATMUL: lambda x: 2 * x.size * x.operands[0].shape[-1],
    Op.CALL: lambda x: flops(x.attrs["body"])}


def flops(graph: Graph) -> int:
    """Arithmetic operations: two for each product of a matmul, else one."""
    return sum(FLOPS[x.op](x) for x in graph.nodes if x.op in FLOPS)


# %% 04_jit.md § What did it do? (2)
def explain(jitted: Jitted, args: tuple, static: dict) -> str:
    """The report of Jitted.explain."""
    known = list(jitted.cache)
    compiled = jitted.compile(*args, **static)
    key = next(k for k, c in jitted.cache.items() if c is compiled)
    graph = compiled.graph
    reasons = [differences(key, other, graph.names) for other in known]
    new = "; ".join(min(reasons, key=len)) if reasons else "this is the first call"
    inputs = sum(x.type.nbytes for x in (*graph.inputs, *graph.arrays))
    steps = [f"  {name}: {len(text.splitlines())} lines, "
             f"{text.count('linalg.generic')} generics, "
             f"{text.count('scf.for')} loops"
             for name, text in compiled.stages.items() if name != "asm"]
    takes = ", ".join(f"{n}: {x.type}" for n, x in zip(graph.names, graph.inputs))
    return "\n".join([
        f"{graph.name}({takes})",
        f"compiled already: {'yes' if key in known else 'no, ' + new}",
        f"specialisations: {len(jitted.cache)} of at most {jitted.limit}",
        f"bytes in {inputs}, out {sum(x.type.nbytes for x in graph.outputs)}; "
        f"operations {flops(graph)}", *steps])
