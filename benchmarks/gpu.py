"""The check on a GPU; `benchmarks/gpu.sh` calls it and says how.

    gpu.py prepare DIR [--chip sm_80] [--small]       compile everything into DIR (needs MLIR)
    gpu.py run DIR --out OUT [--small] [--stand-in]   check, then time, with what is in DIR

`run` imports no compiler. What fails is said in the report and in the exit status, and no
kernel is timed that is wrong. Times are medians between CUDA events around a CUDA graph of
many launches, so Python is not in them; the time of a token is by the clock on the wall.

Each figure is in OUT/gpu.jsonl as soon as it is known, a line each, so a run that is cut
short loses none. Each part has so many seconds and leaves out what it has no time for, and
says so. After LIMIT seconds, or when one step hangs, the whole run ends.
"""
import argparse
import contextlib
import datetime
import functools
import json
import math
import os
import platform
import re
import statistics
import struct
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gpu_cases import cases, speed
from per_sublayer import GPT2, TOLERANCE, make_params, random_tensors

from tinymlir import cache, fused
from tinymlir import model as sublayers
from tinymlir.checkpoint import BUNDLED, Config, read_checkpoint
from tinymlir.devarray import put
from tinymlir.device import device, use
from tinymlir.driver import DeviceError, Mark, Module, Recording
from tinymlir.fused import residual_names
from tinymlir.jit import jit
from tinymlir.model import encode, greedy
from tinymlir.reference import forward
from tinymlir.saved import pretending, use_kernels, write_kernels
from tinymlir.verify import TALE, verify

SMALL = Config(blocks=2, width=32, heads=4, context=24, vocabulary=257, end=0)
PROMPT = {False: 16, True: 6}  # tokens before the first new one; the key is `small`
STEPS = {False: 3, True: 1}
MODES = {  # name -> what builds the model, and the dtype that it computes in
    "per sublayer": (sublayers.build, None), "fused": (fused.build, None),
    "with a cache": (cache.build, None), "fused, float32": (fused.build, "float32"),
    "with a cache, float32": (cache.build, "float32")}
ROOM = {None: TOLERANCE, "float32": 2e-3}  # dtype -> tolerance, relative and absolute
LIMIT = 285  # seconds, for everything
SECONDS = {"kernels": 75, "models": 75, "timings": 70, "tokens": 50}  # of each part
HANG = 60  # seconds that no single step takes


# ---------------------------------------------------------------- what is compiled

@functools.cache
def random_params(small):
    """GPT-2 of 124M, or a small one, with random weights."""
    config = SMALL if small else GPT2
    return config, make_params(config, random_tensors(config))


@functools.cache
def bundled():
    return read_checkpoint(BUNDLED)


def made(config, params, mode):
    build, dtype = MODES[mode]
    return build(config, params, "gpu", dtype)


def every_function(small):
    for name, case in cases().items():
        yield name, case.function, case.arrays
    for name, case in speed(small).items():
        yield name, case.function, case.make()


def run_model(model, start, steps):
    """All that the check will do with it. With a cache the second call is a step."""
    for n in range(start, start + steps):
        ids = np.full(n, n % model.config.vocabulary)
        for _ in range(2):
            model(ids)
            model(ids, trace={})


def prepare(args):
    """Everything that `run` will ask for, compiled."""
    begin = time.perf_counter()
    with pretending(args.chip) as plans:
        for _, function, arrays in every_function(args.small):
            jit(function, target="gpu")(*arrays)
        for mode in MODES:
            run_model(made(*random_params(args.small), mode), PROMPT[args.small],
                      STEPS[args.small])
            if not args.small and "float32" not in mode:
                config, params, tokenizer = bundled()
                run_model(made(config, params, mode), len(encode(tokenizer, TALE)),
                          STEPS[False])
    write_kernels(Path(args.dir), args.chip, plans, small=args.small)
    size = sum(path.stat().st_size for path in Path(args.dir).iterdir())
    print(f"{args.dir}: {len(plans)} plans for {args.chip}, {size / 1e6:.1f} MB, "
          f"{time.perf_counter() - begin:.0f} s")


# ---------------------------------------------------------------- the report

class Report:
    """Lines of text, and the same as data. All of it is on disk at once."""

    def __init__(self, folder, limit=LIMIT):
        self.folder, self.data, self.failed, self.left_out = folder, {}, [], []
        self.begin, self.limit, self.step = time.monotonic(), limit, ("begin", math.inf)
        self.part, self.until = "begin", math.inf
        folder.mkdir(parents=True, exist_ok=True)
        self.lines, self.records = (
            (folder / f"gpu.{kind}").open("w") for kind in ("txt", "jsonl"))

    def write(self, file, line):
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())

    def say(self, line=""):
        print(line, flush=True)
        self.write(self.lines, line)

    def keep(self, part, name, /, **values):
        self.data.setdefault(part, {})[name] = values
        seconds = round(time.monotonic() - self.begin, 1)
        self.write(self.records, json.dumps(
            {"part": part, "name": name, "at": seconds, **values}, default=str))

    def fail(self, name, why):
        self.failed.append(name)
        self.keep("failed", name, why=why)
        self.say(f"NOT OK  {name}: {why}")

    def begins(self, part):
        self.part, self.until = part, time.monotonic() + SECONDS[part]

    def has_time(self, name):
        """Is there time for one step more in this part? It is noted if not."""
        self.step = name, time.monotonic() + HANG
        if time.monotonic() < self.until:
            return True
        self.left_out.append(name)
        self.keep("left out", name, of=self.part)
        return False

    def watch(self):
        """End the process when the time is over or a step hangs: a GPU may."""
        def wait():
            while True:
                time.sleep(0.5)
                now, (name, until) = time.monotonic(), self.step
                if now > min(until, self.begin + self.limit):
                    self.fail(name, f"cut after {now - self.begin:.0f} s")
                    os._exit(1)
        threading.Thread(target=wait, daemon=True).start()

    def end(self):
        """1 if something is wrong or was left out; the last lines."""
        took = time.monotonic() - self.begin
        self.step = "end", math.inf
        self.keep("machine", "check", seconds=took)
        if self.left_out:
            self.say(f"\nno time for {len(self.left_out)}: {', '.join(self.left_out[:8])}")
        good = not self.failed and not self.left_out
        self.say(f"\n{'OK' if good else 'NOT OK'}, {took:.0f} s")
        (self.folder / "gpu.json").write_text(json.dumps(
            {**self.data, "failed": self.failed, "left out": self.left_out}, indent=1,
            default=str) + "\n")
        return int(not good)


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

@functools.cache
def workers():
    return ThreadPoolExecutor()  # NumPy lets other threads run while it computes


def in_parts(function, arrays, cut=0):
    """The function by NumPy; of the first `cut` arrays, each worker gets some rows."""
    if not cut or len(arrays[0]) < 64:
        return np.asarray(function(*arrays))
    parts = zip(*(np.array_split(a, 64) for a in arrays[:cut]))
    return np.concatenate(list(workers().map(
        lambda part: function(*part, *arrays[cut:]), parts)))


def away(got, want, arrays):
    """How far: in ulps of the largest number, at the precision of the arguments."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return math.inf
    if want.dtype.kind != "f" or not want.size:
        return 0 if np.array_equal(got, want) else math.inf
    coarse = any(a.dtype == np.float32 for a in leaves(arrays)) or want.dtype == np.float32
    kind = np.float32 if coarse else want.dtype.type
    parts = [np.array_split(x.reshape(-1), 1 + x.size // 100_000) for x in (got, want)]
    tops, gaps = zip(*workers().map(gap, *parts))
    top = kind(np.max(tops))
    return float(np.max(gaps) / np.spacing(max(top, np.finfo(kind).tiny)))


def gap(got, want):
    """The largest number and the largest difference; NaN is equal to NaN."""
    same = np.isnan(want) & np.isnan(got) | (want == got)
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0, np.abs(got.astype(float) - want))
    return np.max(np.abs(want)), np.max(distance)


def leaves(tree):
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(
        tree, (tuple, list)) else [tree]


def check_cases(report):
    """Every operation, and every function of GPT-2, against NumPy."""
    every, right = cases(), 0
    for name, case in every.items():
        if not report.has_time(name):
            continue
        with watched(report, name), np.errstate(all="ignore"):
            want = np.asarray(case.function(*case.arrays))
            got = jit(case.function, target="gpu")(*case.arrays)
            ulps = away(np.asarray(got), want, case.arrays)
            report.keep("cases", name, ulps=ulps, allowed=case.ulps)
            if ulps <= case.ulps:
                right += 1
            else:
                report.fail(name, f"{ulps:.3g} ulps away, {case.ulps} are allowed")
    report.say(f"{right} of {len(every)} kernels do what NumPy does")


@functools.cache
def references(small, dtype):
    """(ids, residuals, logits) by NumPy, for each step of a model with random weights."""
    config, params = random_params(small)
    ids, found = list(range(PROMPT[small])), []
    for _ in range(STEPS[small]):
        kept = []
        number = np.dtype(dtype or np.float64).type
        want = forward(np.array(ids), params, config.heads, kept, number)[-1:]
        found.append((list(ids), kept, want))
        ids.append(greedy(want[0]))
    return found


def check_random(report, small, mode):
    """Every residual of a model with random weights against NumPy."""
    name = f"random {'small' if small else '124M'}, {mode}"
    if not report.has_time(name):
        return
    with watched(report, name):
        model, dtype, worst = made(*random_params(small), mode), MODES[mode][1], 0.0
        names = residual_names(model.config.blocks)
        for ids, kept, want in references(small, dtype):
            got = {}
            logits = model(ids, trace=got)
            for part, x in [*zip(names, kept, strict=True), ("logits", want)]:
                if (got[part].dtype, got[part].shape) != (x.dtype, x.shape):
                    raise ValueError(f"{part}: got {got[part].dtype} {got[part].shape}")
                room = ROOM[dtype] * (1 + np.abs(x))
                worst = max(worst, float(np.max(np.abs(got[part] - x) / room)))
            again = model(ids)
            if not np.allclose(again, logits, rtol=ROOM[dtype], atol=ROOM[dtype]):
                raise ValueError("another result without the residuals")
        report.keep("models", name, worst_of_tolerance=worst, steps=STEPS[small])
        report.say(f"{'OK' if worst <= 1 else 'NOT OK'}  {name}: {STEPS[small]} steps from "
                   f"{PROMPT[small]} tokens, worst {worst:.2g} of the tolerance {ROOM[dtype]:g}")
        if not worst <= 1:
            report.failed.append(name)


def check_bundled(report, mode):
    """`tinymlir verify` of the bundled model."""
    name = f"bundled model, {mode}"
    if not report.has_time(name):
        return
    with watched(report, name):
        config, params, tokenizer = bundled()
        found = verify(made(config, params, mode), tokenizer, TALE, STEPS[False])
        report.keep("models", name, worst=found.worst.largest, text=found.texts[0].text)
        report.say(f"{'OK' if found.ok else 'NOT OK'}  {name}: worst {found.worst.largest:.1e} "
                   f"at {found.worst.name}, text {found.texts[0].text!r}")
        if not found.ok:
            report.failed.append(name)


def check_models(report, small):
    for mode in MODES:
        check_random(report, small, mode)
        if not small and "float32" not in mode:  # too large for a device that is not there
            check_bundled(report, mode)


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
        if report.has_time(name):
            with watched(report, name):
                time_kernel(report, home, name, case, top)


def time_kernel(report, home, name, case, top):
    arrays = case.make()
    there = [put(a) for a in arrays]
    function = jit(case.function, target="gpu")
    got = function(*there).numpy()
    ulps = away(got, in_parts(case.function, arrays, case.cut), arrays)
    if not ulps <= case.ulps:
        report.fail(name, f"{ulps:.3g} ulps away, so it is not timed")
        return
    with home.current():
        loaded = function.compile(*there).program.on(home)
        held = loaded.hold(there)
    took = milliseconds(home, lambda: loaded.launches.enqueue([at for at, _ in held]))
    rate, flops = case.nbytes / took / 1e6, case.flops / took / 1e9
    report.keep("kernels", name, ms=took, gb_s=rate, of_copy=rate / top["GB/s"],
                tflop_s=flops, of_fma=flops / top[case.dtype], ulps=ulps)
    theirs = torch_time(case, arrays)
    told = f"{theirs:.4f} | {theirs / took:.2f}" if theirs else "- | -"
    if theirs:
        report.keep("PyTorch", name, ms=theirs, ratio=theirs / took)
    report.say(f"| {name} | {took:.4f} | {rate:.0f} | {rate / top['GB/s']:.0%} | {flops:.2f} "
               f"| {flops / top[case.dtype]:.0%} | {told} |")


@functools.cache
def torch_module():
    """PyTorch, in full float32, if it is there and sees the device."""
    with contextlib.suppress(ImportError):
        import torch
        if torch.cuda.is_available():
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
            return torch
    return None


def torch_time(case, arrays, rounds=7):
    """The same by PyTorch, in milliseconds."""
    torch = torch_module()
    if torch is None or case.torch is None:
        return None
    given = [torch.from_numpy(a).cuda() for a in arrays]
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
    """The time of a token of the random 124M, in each mode and by PyTorch."""
    report.say("\n| model | tokens before | ms a token |\n|---|---|---|")
    start, rounds = PROMPT[small], 1 if small else 20
    modes = {mode: functools.partial(tokens_of, small, mode) for mode in reversed(MODES)}
    modes |= {"PyTorch eager, float32": functools.partial(torch_tokens, False),
              "PyTorch eager, float32, with a cache": functools.partial(torch_tokens, True)}
    for name, make in modes.items():
        if not report.has_time(f"time of {name}"):
            continue
        with watched(report, f"time of {name}"):
            token = make()
            if token:
                took = wall(token, rounds)
                report.keep("tokens", name, ms=took, tokens=start)
                report.say(f"| {name} | {start} | {took:.2f} |")


def tokens_of(small, mode):
    """A function that computes the logits after one token more.

    With a cache each call has a token that is new; without one the text stays as it is."""
    model, start = made(*random_params(small), mode), PROMPT[small]
    if "cache" not in mode:
        return lambda: model(np.arange(start))
    count = iter(range(start, model.config.context))
    return lambda: model(np.arange(next(count)))


def wall(function, rounds):
    """The median of a call, after three that are not counted."""
    times = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[3:])


def torch_tokens(with_cache):
    """The same by PyTorch, kernel by kernel, on the same weights; None without it."""
    torch = torch_module()
    if torch is None:
        return None
    functional, heads = torch.nn.functional, GPT2.heads
    there = torch_tree(torch, random_params(False)[1])
    past = [None] * GPT2.blocks

    def attention(x, b, i):
        q, k, v = ((x @ b.qkv.weight + b.qkv.bias).view(len(x), 3, heads, -1)
                   .permute(1, 2, 0, 3))
        if with_cache and past[i]:
            k, v = (torch.cat([old, new], 1) for old, new in zip(past[i], (k, v)))
        past[i] = k, v
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=len(x) > 1)
        return h.permute(1, 0, 2).reshape(x.shape) @ b.out.weight + b.out.bias

    def block(x, b, i):
        x = x + attention(functional.layer_norm(x, x.shape[-1:], *b.norm_1), b, i)
        h = functional.layer_norm(x, x.shape[-1:], *b.norm_2)
        h = functional.gelu(h @ b.up.weight + b.up.bias, approximate="tanh")
        return x + h @ b.down.weight + b.down.bias

    @torch.no_grad()
    def logits(ids, first):
        given = torch.from_numpy(ids).cuda()
        x = there.words[given] + there.positions[first:first + len(ids)]
        for i, b in enumerate(there.blocks):
            x = block(x, b, i)
        x = functional.layer_norm(x[-1:], x.shape[-1:], *there.norm)
        return (x @ there.words.T).cpu()

    start = PROMPT[False]
    if not with_cache:
        return lambda: logits(np.arange(start), 0)
    logits(np.arange(start), 0)
    count = iter(range(start, GPT2.context))

    def token():
        n = next(count)
        return logits(np.array([n]), n)
    return token


def torch_tree(torch, tree):
    """Named tuples of arrays as the same of tensors."""
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(np.array(tree)).cuda()
    parts = [torch_tree(torch, part) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


# ---------------------------------------------------------------- all of it

def run(args):
    """Check, then time; 1 if anything is wrong or was left out."""
    if args.stand_in:
        from tinymlir.standin import StandIn
        use(StandIn())
    report, small = Report(Path(args.out), args.limit), args.small
    report.watch()
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
    report.begins("kernels")
    check_cases(report)
    report.begins("models")
    check_models(report, small)
    report.begins("timings")
    with watched(report, "timings"):
        time_kernels(report, home, small, ceilings(report, home, small))
    report.begins("tokens")
    time_models(report, small)
    compilers = [m for m in sys.modules if re.match(r"(mlir|llvm)\b", m)]
    if compilers:
        report.fail("imports", f"a compiler was imported: {compilers[:3]}")
    return report.end()


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
        own.add_argument("--limit", type=float, default=LIMIT, help="seconds for everything")
        own.add_argument("--stand-in", action="store_true")
    args = parser.parse_args()
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
