# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § Waiting for each other (1)
"""A program for the CPU that runs all threads of a kernel in turns (chapter 8)."""
from __future__ import annotations

from mlir import ir

from tinymlir import native, passes
from tinymlir.onethread import SLOTS, Emulated, emulated, to_function


# %% 08_gpu.md § Waiting for each other (2)
BEGIN = """) -> !llvm.ptr attributes {passthrough = ["presplitcoroutine"]} {
  %co_zero = llvm.mlir.constant(0 : i32) : i32
  %co_null = llvm.mlir.zero : !llvm.ptr
  %co_false = llvm.mlir.constant(false) : i1
  %co_id = llvm.intr.coro.id %co_zero, %co_null, %co_null, %co_null
    : (i32, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> !llvm.token
  %co_size = llvm.intr.coro.size : i64
  %co_63 = llvm.mlir.constant(63 : i64) : i64
  %co_64 = llvm.mlir.constant(64 : i64) : i64
  %co_mask = llvm.mlir.constant(-64 : i64) : i64
  %co_sum = llvm.add %co_size, %co_63 : i64
  %co_whole = llvm.and %co_sum, %co_mask : i64
  %co_memory = llvm.call @aligned_alloc(%co_64, %co_whole) : (i64, i64) -> !llvm.ptr
  %co = llvm.intr.coro.begin %co_id, %co_memory
    : (!llvm.token, !llvm.ptr) -> !llvm.ptr
"""
WAIT = """
  %co_save{n} = llvm.intr.coro.save %co : (!llvm.ptr) -> !llvm.token
  %co_how{n} = llvm.intr.coro.suspend %co_save{n}, %co_false : i8
  llvm.switch %co_how{n} : i8, ^co_leave [0: ^co_on{n}, 1: ^co_end]
^co_on{n}:
"""
END = """
^co_end:
  %co_used = llvm.intr.coro.free %co_id, %co : (!llvm.token, !llvm.ptr) -> !llvm.ptr
  llvm.call @free(%co_used) : (!llvm.ptr) -> ()
  llvm.br ^co_leave
^co_leave:
  %co_none = llvm.mlir.none : !llvm.token
  llvm.intr.coro.end %co, %co_false, %co_none
    : (!llvm.ptr, i1, !llvm.token) -> !llvm.void
  llvm.return %co : !llvm.ptr
}
"""
HELPERS = """
llvm.func @aligned_alloc(i64, i64) -> !llvm.ptr
llvm.func @free(!llvm.ptr)
llvm.func @go_on(%h: !llvm.ptr) {
  llvm.intr.coro.resume %h : !llvm.ptr
  llvm.return
}
"""


# %% 08_gpu.md § Waiting for each other (3)
def as_coroutine(text: str, name: str) -> str:
    """A function that stops at each barrier, and goes on when it is resumed."""
    head, body = text.split("\n", 1)
    head = head.replace(f"@{name}(", f"@{name}_start(")
    head = head[:head.rindex(")", 0, head.rindex("{"))] + BEGIN
    parts = body.rstrip().removesuffix("}").split("llvm.call @barrier() : () -> ()")
    stops = [WAIT.format(n=n) for n in range(len(parts) - 1)]
    body = "".join(a + b for a, b in zip(parts, [*stops, ""]))
    return head + body.replace("llvm.return", "llvm.br ^co_end") + END


# %% 08_gpu.md § The driver (1)
DRIVER = """
{declared}
func.func @{name}_run({takes}, %slots: memref<{slots}xi64>, %state: memref<3xi64>,
    %gx: index, %gy: index, %gz: index, %back: index) {{
  %0 = arith.constant 0 : index
  %1 = arith.constant 1 : index
  %bx = arith.constant {block[0]} : index
  %by = arith.constant {block[1]} : index
  %n = arith.constant {threads} : index
  %last = arith.constant {last} : index
  %gxy = arith.muli %gx, %gy : index
  %grid = arith.muli %gxy, %gz : index
  %end = arith.subi %grid, %1 : index
  %z = arith.constant 0 : i64
  %all = arith.constant {threads} : i64
  %two = arith.constant 2 : index
  %nobody = arith.constant -1 : i64
  %flip = arith.cmpi ne, %back, %0 : index
  %handles = memref.alloca() : memref<{threads}xi64>
  scf.for %i = %0 to %grid step %1 {{
    %ri = arith.subi %end, %i : index
    %b = arith.select %flip, %ri, %i : index
    %b0 = arith.remui %b, %gx : index
    %bq = arith.divui %b, %gx : index
    %b1 = arith.remui %bq, %gy : index
    %b2 = arith.divui %bq, %gy : index
    memref.store %z, %state[%0] : memref<3xi64>
{poison}
    scf.for %j = %0 to %n step %1 {{
      %rj = arith.subi %last, %j : index
      %t = arith.select %flip, %rj, %j : index
      %t0 = arith.remui %t, %bx : index
      %tq = arith.divui %t, %bx : index
      %t1 = arith.remui %tq, %by : index
      %t2 = arith.divui %tq, %by : index
{begin}
    }}
{rounds}
  }}
  return
}}
"""
CALL = ("func.call @{name}({given}, %slots, %state, %b0, %b1, %b2, %t0, %t1, %t2)"
        " : ({kinds})")
ROUNDS = """
    scf.while : () -> () {
      %d = memref.load %state[%0] : memref<3xi64>
      %more = arith.cmpi eq, %d, %z : i64
      scf.condition(%more)
    } do {
      scf.for %j = %0 to %n step %1 {
        %rj = arith.subi %last, %j : index
        %t = arith.select %flip, %rj, %j : index
        %w = memref.load %handles[%t] : memref<THREADSxi64>
        %h = llvm.inttoptr %w : i64 to !llvm.ptr
        llvm.intr.coro.resume %h : !llvm.ptr
      }
      scf.yield
    }
    %d = memref.load %state[%0] : memref<3xi64>
    %lost = arith.cmpi ne, %d, %all : i64
    scf.if %lost { memref.store %d, %state[%two] : memref<3xi64> }
"""
JUNK = {"f32": "0xFFFFFFFF", "f64": "0xFFFFFFFFFFFFFFFF"}  # is NaN
POISON = """
    %p{i} = arith.constant {junk} : {element}
    %c{i} = arith.constant {size} : index
    scf.for %j = %0 to %c{i} step %1 {{ memref.store %p{i}, %s{i}[%j] : {kind} }}
"""


# %% 08_gpu.md § The driver (2)
def driver(e: Emulated) -> str:
    """A function that runs all blocks, and in each all threads in turns."""
    memory = [*(f"%a{i}" for i in range(len(e.arrays))),
              *(f"%s{i}" for i in range(len(e.shared)))]
    types = [str(k) for k in (*e.arrays, *e.shared)]
    kinds = ", ".join([*types, f"memref<{e.threads * SLOTS}xi64>", "memref<3xi64>",
                       *["index"] * 6])
    name = f"{e.name}_start" if e.waits else e.name
    declared = f"func.func private @{name}({kinds}) -> !llvm.ptr"
    call = CALL.format(name=name, given=", ".join(memory), kinds=kinds)
    begin = (f"%h = {call} -> !llvm.ptr\n%w = llvm.ptrtoint %h : !llvm.ptr to i64\n"
             f"memref.store %w, %handles[%t] : memref<{e.threads}xi64>")
    poison = "".join(
        POISON.format(i=i, size=k.shape[0], element=k.element_type, kind=k,
                      junk=JUNK.get(str(k.element_type), "-1"))
        for i, k in enumerate(e.shared))
    return DRIVER.format(
        name=e.name, declared=declared if e.waits else "", threads=e.threads,
        slots=e.threads * SLOTS, block=e.block, last=e.threads - 1,
        takes=", ".join(f"{n}: {t}" for n, t in zip(memory, types)), poison=poison,
        begin=begin if e.waits else f"{call} -> ()",
        rounds=ROUNDS.replace("THREADS", str(e.threads)) if e.waits else "")


# %% 08_gpu.md § The driver (3)
LOWER = passes.LOWER_PROGRAM.replace(  # with what the folding of vectors leaves
    "convert-index-to-llvm", "convert-index-to-llvm,convert-ub-to-llvm")
PASSES = f"coro-early,cgscc(coro-split),coro-cleanup,{native.PASSES}"


def to_llvm(module: ir.Module) -> tuple[str, list[Emulated]]:
    """LLVM's text of a CPU program for a module of kernels; uses the module up."""
    inside = module.body.operations[0].regions[0].blocks[0]
    with ir.Location.unknown():
        kernels = [emulated(op.operation) for op in inside]
        new = ir.Module.create()
        for e in kernels:
            to_function(e, new.body)
        texts = [str(op) for op in new.body.operations]
    texts += ["func.func private @barrier()", *map(driver, kernels)]
    whole = ir.Module.parse("\n".join(texts))
    passes.run_pipeline(whole, LOWER)
    waiting = {e.name for e in kernels if e.waits}
    texts = [HELPERS]
    for op in whole.body.operations:
        name = ir.StringAttr(op.attributes["sym_name"]).value
        if name.removesuffix("_start") in waiting and name.endswith("_start"):
            continue
        text = str(op)
        texts.append(as_coroutine(text, name) if name in waiting else text)
    return passes.to_llvm(ir.Module.parse("\n".join(texts))), kernels
