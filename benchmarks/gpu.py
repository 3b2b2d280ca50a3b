"""The check on a GPU; `benchmarks/gpu.sh` calls it and says how.

    gpu.py prepare DIR [--chip sm_80] [--small]       compile everything into DIR (needs MLIR)
    gpu.py run DIR --out OUT [--small] [--stand-in]   check, then time, with what is in DIR

`run` imports no compiler. What fails is said in the report and in the exit status, and no
kernel is timed that is wrong. Times are medians between CUDA events around a CUDA graph of
many launches, so Python is not in them; the time of a token is by the clock on the wall.
"""
import argparse
import contextlib
import datetime
import json
import math
import platform
import re
import statistics
import struct
import sys
import time
import traceback
from pathlib import Path

import numpy as np
from gpu_cases import cases, speed
from per_sublayer import GPT2, TOLERANCE, make_params, random_tensors

from tinymlir import cuda
from tinymlir.checkpoint import BUNDLED, Config, read_checkpoint
from tinymlir.devarray import put
from tinymlir.device import device, use
from tinymlir.driver import DeviceError, Mark, Module, Recording
from tinymlir.fused import FusedModel, residual_names
from tinymlir.fused import compiled as fused_for
from tinymlir.jit import jit
from tinymlir.model import Model, compiled, encode, greedy
from tinymlir.reference import forward
from tinymlir.saved import pretending, use_kernels, write_kernels
from tinymlir.verify import TALE, verify

SMALL = Config(blocks=2, width=32, heads=4, context=24, vocabulary=257, end=0)
PROMPT = {False: 16, True: 6}  # tokens before the first new one; the key is `small`
STEPS = {False: 3, True: 1}


# ---------------------------------------------------------------- what is compiled

def random_model(small, fused):
    """GPT-2 of 124M, or a small one, with random weights."""
    config = SMALL if small else GPT2
    params = make_params(config, random_tensors(config))
    return made(config, params, fused)


def made(config, params, fused):
    weights = cuda.place(params)
    if fused:
        return FusedModel(config, params, fused_for("gpu", None, "float32"), None, weights)
    return Model(config, params, compiled("gpu", None, "float32"), None, weights)


def bundled_model(small, fused):
    """The model of stories; for a device that is not there it is too large."""
    if small:
        return random_model(small, fused), None
    config, params, tokenizer = read_checkpoint(BUNDLED)
    return made(config, params, fused), tokenizer


def every_function(small):
    for name, case in cases().items():
        yield name, case.function, case.arrays
    for name, case in speed(small).items():
        yield name, case.function, case.arrays


def run_model(model, start, steps):
    for n in range(start, start + steps):
        ids = np.arange(n) % model.config.vocabulary
        model(ids)
        model(ids, trace={})


def prepare(args):
    """Everything that `run` will ask for, compiled."""
    with pretending(args.chip) as plans:
        for _, function, arrays in every_function(args.small):
            jit(function, target="gpu")(*arrays)
        for fused in (False, True):
            run_model(random_model(args.small, fused), PROMPT[args.small], STEPS[args.small])
            model, tokenizer = bundled_model(args.small, fused)
            start = len(encode(tokenizer, TALE)) if tokenizer else PROMPT[True]
            run_model(model, start, STEPS[args.small])
    write_kernels(Path(args.dir), args.chip, plans, small=args.small)
    size = sum(path.stat().st_size for path in Path(args.dir).iterdir())
    print(f"{args.dir}: {len(plans)} plans for {args.chip}, {size / 1e6:.1f} MB")


# ---------------------------------------------------------------- the report

class Report:
    """Lines of text as they come, and the same as data."""

    def __init__(self, folder):
        self.folder, self.lines, self.data, self.failed = folder, [], {}, []
        folder.mkdir(parents=True, exist_ok=True)

    def say(self, line=""):
        print(line, flush=True)
        self.lines.append(line)
        self.save()

    def keep(self, part, name, /, **values):
        self.data.setdefault(part, {})[name] = values

    def fail(self, name, why):
        self.failed.append(name)
        self.say(f"NOT OK  {name}: {why}")

    def save(self):
        text = json.dumps({**self.data, "failed": self.failed}, indent=1, default=str)
        (self.folder / "gpu.json").write_text(text + "\n")
        (self.folder / "gpu.txt").write_text("\n".join(self.lines) + "\n")


@contextlib.contextmanager
def watched(report, name):
    """An error in one part is a failure of the check, and not its end."""
    try:
        yield
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        report.fail(name, f"{type(error).__name__}: {error}")
        if isinstance(error, DeviceError) and device().driver.broken:
            raise SystemExit(1) from None


# ---------------------------------------------------------------- right

def away(got, want, arrays):
    """How far: in ulps of the largest number, at the precision of the arguments."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return math.inf
    if want.dtype.kind != "f" or not want.size:
        return 0 if np.array_equal(got, want) else math.inf
    coarse = any(a.dtype == np.float32 for a in leaves(arrays)) or want.dtype == np.float32
    top = np.max(np.abs(want)).astype(np.float32 if coarse else want.dtype)
    same = np.isnan(want) & np.isnan(got) | (want == got)
    gap = np.where(same, 0, np.abs(got.astype(float) - want))
    return float(np.max(gap) / np.spacing(max(top, np.finfo(top.dtype).tiny)))


def leaves(tree):
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(
        tree, (tuple, list)) else [tree]


def check_cases(report):
    """Every operation, and every function of GPT-2, against NumPy."""
    every = cases()
    for name, case in every.items():
        with watched(report, name), np.errstate(all="ignore"):
            want = np.asarray(case.function(*case.arrays))
            got = jit(case.function, target="gpu")(*case.arrays)
            ulps = away(np.asarray(got), want, case.arrays)
            report.keep("cases", name, ulps=ulps, allowed=case.ulps)
            if not ulps <= case.ulps:
                report.fail(name, f"{ulps:.3g} ulps away, {case.ulps} are allowed")
    bad = sum(name in every for name in report.failed)
    report.say(f"{len(every) - bad} of {len(every)} kernels do what NumPy does")


def check_model(report, name, model, start, steps):
    """Every residual of a model with random weights against the reference."""
    names = residual_names(model.config.blocks)
    ids, worst = list(range(start)), 0.0
    for _ in range(steps):
        got, kept = {}, []
        logits = model(ids, trace=got)
        want = forward(np.array(ids), model.params, model.config.heads, kept)[-1:]
        for part, x in [*zip(names, kept, strict=True), ("logits", want)]:
            if (got[part].dtype, got[part].shape) != (x.dtype, x.shape):
                raise ValueError(f"{part}: got {got[part].dtype} {got[part].shape}")
            room = TOLERANCE * (1 + np.abs(x))
            worst = max(worst, float(np.max(np.abs(got[part] - x) / room)))
        if not np.array_equal(model(ids), logits):
            raise ValueError("another result without the residuals")
        ids.append(greedy(want[0]))
    report.keep("models", name, worst_of_tolerance=worst, steps=steps)
    report.say(f"{'OK' if worst <= 1 else 'NOT OK'}  {name}: {steps} steps from {start} "
               f"tokens, worst {worst:.2g} of the tolerance {TOLERANCE:g}")
    if not worst <= 1:
        report.failed.append(name)


def check_bundled(report, small, fused):
    """`tinymlir verify` of the bundled model."""
    name = f"bundled model, {'fused' if fused else 'per sublayer'}"
    model, tokenizer = bundled_model(small, fused)
    if tokenizer is None:
        return check_model(report, name, model, PROMPT[True], STEPS[small])
    found = verify(model, tokenizer, TALE, STEPS[small])
    report.keep("models", name, worst=found.worst.largest, text=found.texts[0].text)
    report.say(f"{'OK' if found.ok else 'NOT OK'}  {name}: worst {found.worst.largest:.1e} "
               f"at {found.worst.name}, text {found.texts[0].text!r}")
    if not found.ok:
        report.failed.append(name)


# ---------------------------------------------------------------- fast

def milliseconds(home, enqueue, rounds=7, least=4.0):
    """The median time of one `enqueue`, by events around a CUDA graph of many."""
    def once(count):
        with Recording(home.stream) as drawn:
            for _ in range(count):
                enqueue()
        times = []
        for _ in range(rounds):
            begin = Mark(home.stream)
            home.driver.call("cuGraphLaunch", drawn.graph, home.stream.handle)
            end = Mark(home.stream)
            times.append((end - begin) / count)
            begin.forget(), end.forget()
        home.driver.call("cuGraphExecDestroy", drawn.graph)
        return statistics.median(times[1:])

    with home.current():
        enqueue()
        home.stream.wait()
        return once(max(2, min(200, math.ceil(least / max(once(2), 1e-3)))))


FMA = """
.version 6.5
.target sm_75
.address_size 64
.visible .entry fma_{kind}(
	.param .u64 .ptr .align 1 fma_{kind}_param_0
)
.maxntid 256, 1, 1
{{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<4>;
	.reg .{kind} 	%x<16>;
	.reg .b64 	%rd<4>;
	ld.param.b64 	%rd1, [fma_{kind}_param_0];
	cvta.to.global.u64 	%rd2, %rd1;
	mov.u32 	%r1, %tid.x;
	cvt.rn.{kind}.u32 	%x15, %r1;
	mov.u32 	%r2, 0;
{start}
$L__LOOP:
{body}
	add.s32 	%r2, %r2, 1;
	setp.lt.s32 	%p1, %r2, {count};
	@%p1 bra 	$L__LOOP;
{sum}
	st.global.{kind} 	[%rd2], %x0;
	ret;

}}
"""


def fma_rate(home, kind, small):
    """TFLOP/s of multiply-adds that need nothing but registers."""
    count, lines = (2, 2) if small else (512, 16)
    start = "\n".join(f"\tadd.rn.{kind} \t%x{i}, %x15, {number(kind, i + 1)};"
                      for i in range(8))  # all different, or they would be one
    body = "\n".join(f"\tfma.rn.{kind} \t%x{i}, %x{i}, %x15, {number(kind, 0.5)};"
                     for _ in range(lines) for i in range(8))
    total = "\n".join(f"\tadd.rn.{kind} \t%x0, %x0, %x{i};" for i in range(1, 8))
    text = FMA.format(kind=kind, start=start, body=body, sum=total, count=count)
    blocks = 1 if small else home.properties.processors * 16
    with home.current():
        kernel = Module(home.driver, text).function(f"fma_{kind}", 0)
        room = home.pool.take(8)
    value = np.array([room.address], np.uint64)
    place = np.array([value.ctypes.data], np.uint64)
    took = milliseconds(home, lambda: home.stream.launch(
        kernel, (blocks, 1, 1), (256, 1, 1), 0, place.ctypes.data))
    return 2 * 8 * lines * count * 256 * blocks / took / 1e9


def number(kind, value):
    """A number as PTX writes it."""
    code, mark = {"f32": (">f", "0f"), "f64": (">d", "0d")}[kind]
    return mark + struct.pack(code, value).hex().upper()


def ceilings(report, home, small):
    """What this device can do: a copy, and multiply-adds in registers."""
    nbytes = 1 << 16 if small else 1 << 30
    with home.current():
        a, b = home.pool.take(nbytes), home.pool.take(nbytes)
    took = milliseconds(home, lambda: home.stream.copy(b.address, a.address, nbytes))
    found = {"GB/s": 2 * nbytes / took / 1e6,
             "float32": fma_rate(home, "f32", small), "float64": fma_rate(home, "f64", small)}
    report.keep("ceilings", "measured", **found)
    report.say(f"ceilings: copy {found['GB/s']:.0f} GB/s read and written, multiply-adds "
               f"{found['float32']:.1f} TFLOP/s in float32, {found['float64']:.1f} in float64")
    return found


def time_kernels(report, home, small, top):
    """Each kernel of `speed`, checked and then timed."""
    report.say("\n| kernel | ms | GB/s | of copy | TFLOP/s | of FMA | PyTorch ms | ratio |\n"
               "|---|---|---|---|---|---|---|---|")
    for name, case in speed(small).items():
        with watched(report, name):
            time_kernel(report, home, name, case, top)


def time_kernel(report, home, name, case, top):
    there = [put(a) for a in case.arrays]
    function = jit(case.function, target="gpu")
    want, got = np.asarray(case.function(*case.arrays)), function(*there).numpy()
    ulps = away(got, want, case.arrays)
    if not ulps <= case.ulps:
        report.fail(name, f"{ulps:.3g} ulps away, so it is not timed")
        return
    with home.current():
        loaded = function.compile(*there).program.on(home)
        held = loaded.hold(there)
    took = milliseconds(home, lambda: loaded.launches.enqueue([at for at, _ in held]))
    rate, flops = case.nbytes / took / 1e6, case.flops / took / 1e9
    theirs = torch_time(case)
    told = f"{theirs:.4f} | {theirs / took:.2f}" if theirs else "- | -"
    report.keep("kernels", name, ms=took, gb_s=rate, of_copy=rate / top["GB/s"],
                tflop_s=flops, of_fma=flops / top[case.dtype], torch_ms=theirs, ulps=ulps)
    report.say(f"| {name} | {took:.4f} | {rate:.0f} | {rate / top['GB/s']:.0%} | {flops:.2f} "
               f"| {flops / top[case.dtype]:.0%} | {told} |")


def torch_module():
    """PyTorch, in full float32, if it is there and sees the device."""
    with contextlib.suppress(ImportError):
        import torch
        if torch.cuda.is_available():
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
            return torch
    return None


def torch_time(case, rounds=7):
    """The same by PyTorch, in milliseconds."""
    torch = torch_module()
    if torch is None or case.torch is None:
        return None
    given = [torch.from_numpy(a).cuda() for a in case.arrays]
    for _ in range(3):
        case.torch(torch, *given)
    times, count = [], 20
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            case.torch(torch, *given)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return statistics.median(times)


def time_models(report, small):
    """The time of a token: random 124M, the prefix computed again at each step."""
    report.say("\n| model | tokens before | ms a token |\n|---|---|---|")
    start, rounds = PROMPT[small], 1 if small else 20
    ids = np.arange(start)
    for fused in (False, True):
        name = "fused" if fused else "per sublayer"
        with watched(report, f"time of {name}"):
            model = random_model(small, fused)
            took = wall(lambda model=model: model(ids), rounds)
            report.keep("tokens", name, ms=took, tokens=start)
            report.say(f"| {name} | {start} | {took:.2f} |")
    with watched(report, "time of PyTorch"):
        took = torch_token(ids, rounds)
        if took:
            report.keep("tokens", "PyTorch eager", ms=took, tokens=start)
            report.say(f"| PyTorch eager, float32 | {start} | {took:.2f} |")


def wall(function, rounds):
    """The median of a call, after three that are not counted."""
    times = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[3:])


def torch_token(ids, rounds):
    """The logits of the last token by PyTorch, kernel by kernel, on the same weights."""
    torch = torch_module()
    if torch is None:
        return None
    F, heads = torch.nn.functional, GPT2.heads
    params = make_params(GPT2, random_tensors(GPT2))
    there = torch_tree(torch, params)
    given = torch.from_numpy(ids).cuda()

    def block(x, b):
        h = F.layer_norm(x, x.shape[-1:], *b.norm_1)
        q, k, v = ((h @ b.qkv.weight + b.qkv.bias).view(len(x), 3, heads, -1)
                   .permute(1, 2, 0, 3))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + h.permute(1, 0, 2).reshape(x.shape) @ b.out.weight + b.out.bias
        h = F.layer_norm(x, x.shape[-1:], *b.norm_2)
        h = F.gelu(h @ b.up.weight + b.up.bias, approximate="tanh")
        return x + h @ b.down.weight + b.down.bias

    @torch.no_grad()
    def token():
        x = there.words[given] + there.positions[:len(given)]
        for b in there.blocks:
            x = block(x, b)
        x = F.layer_norm(x[-1:], x.shape[-1:], *there.norm)
        return (x @ there.words.T).cpu()

    return wall(token, rounds)


def torch_tree(torch, tree):
    """Named tuples of arrays as the same of tensors."""
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(np.array(tree)).cuda()
    parts = [torch_tree(torch, part) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


# ---------------------------------------------------------------- all of it

def run(args):
    """Check, then time; 1 if anything is wrong."""
    if args.stand_in:
        from tinymlir.standin import StandIn
        use(StandIn())
    report, begin, small = Report(Path(args.out)), time.perf_counter(), args.small
    home = device()
    known = home.properties
    report.keep("machine", "device", name=known.name, chip=known.chip,
                cuda=".".join(map(str, known.cuda)), processors=known.processors,
                date=str(datetime.date.today()), python=platform.python_version(),
                numpy=np.__version__, stand_in=args.stand_in)
    report.say(f"{known.name} ({known.chip}, {known.processors} multiprocessors), driver of "
               f"CUDA {known.cuda[0]}.{known.cuda[1]}, {datetime.date.today()}"
               + ("; A STAND-IN: no number below is of a GPU" if args.stand_in else ""))
    use_kernels(Path(args.dir), small=small)
    check_cases(report)
    for fused in (False, True):
        name = f"random {'small' if small else '124M'}, {'fused' if fused else 'per sublayer'}"
        with watched(report, name):
            check_model(report, name, random_model(small, fused), PROMPT[small], STEPS[small])
        with watched(report, f"bundled model {fused}"):
            check_bundled(report, small, fused)
    with watched(report, "timings"):
        time_kernels(report, home, small, ceilings(report, home, small))
        time_models(report, small)
    compilers = [m for m in sys.modules if re.match(r"(mlir|llvm)\b", m)]
    if compilers:
        report.fail("imports", f"a compiler was imported: {compilers[:3]}")
    took = time.perf_counter() - begin
    report.keep("machine", "check", seconds=took)
    report.say(f"\n{'OK' if not report.failed else 'NOT OK'}, {took:.0f} s")
    return int(bool(report.failed))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sub = parser.add_subparsers(required=True)
    for function in (prepare, run):
        own = sub.add_parser(function.__name__)
        own.set_defaults(function=function)
        own.add_argument("dir", help="the folder of kernels")
        own.add_argument("--small", action="store_true", help="for a device that is not there")
        own.add_argument("--chip", default="sm_80")
        own.add_argument("--out", default=".")
        own.add_argument("--stand-in", action="store_true")
    args = parser.parse_args()
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
