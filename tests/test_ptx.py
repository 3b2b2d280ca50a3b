"""The processor that executes PTX: single instructions and small kernels against NumPy."""
import numpy as np
import pytest

from tinymlir.ptx import PTXError, kernels
from tinymlir.simt import Fault, run
from tinymlir.vram import Memory

KERNEL = """
.version 8.0
.target sm_80
.address_size 64
{outside}
.visible .entry k(
	.param .u64 .ptr .align 1 k_param_0,
	.param .u64 .ptr .align 1 k_param_1,
	.param .u64 .ptr .align 1 k_param_2
)
.maxntid {threads}, 1, 1
{{
	.reg .pred 	%p<9>;
	.reg .b32 	%r<99>;
	.reg .b64 	%rd<99>;
{declare}
	ld.param.b64 	%rd90, [k_param_0];
	ld.param.b64 	%rd91, [k_param_1];
	ld.param.b64 	%rd92, [k_param_2];
	mov.u32 	%r90, %ctaid.x;
	mov.u32 	%r91, %tid.x;
	mad.lo.s32 	%r92, %r90, {threads}, %r91;
	mul.wide.u32 	%rd93, %r92, {wa};
	mul.wide.u32 	%rd94, %r92, {wb};
	mul.wide.u32 	%rd95, %r92, {wc};
	add.s64 	%rd96, %rd90, %rd93;
	add.s64 	%rd97, %rd91, %rd94;
	add.s64 	%rd98, %rd92, %rd95;
{body}
	ret;

}}
"""


def execute(body, a, b, result, threads=32, declare="", outside="", shared=0):
    """Run a body over a and b; %rd96 to %rd98 point at the thread's elements."""
    text = KERNEL.format(body=body, threads=threads, declare=declare, outside=outside,
                         wa=a.itemsize, wb=b.itemsize, wc=result.itemsize)
    memory = Memory(1 << 20)
    places = []
    for array in (a, b, result):
        place = memory.alloc(array.nbytes)
        memory.view(place, array.nbytes)[:] = np.frombuffer(array.tobytes(), np.uint8)
        places.append(np.uint64(place))
    kernel = kernels(text)["k"]
    grid = (-(-len(result) // threads), 1, 1)
    run(kernel, memory, grid, (threads, 1, 1), shared, dict(zip(kernel.params, places)))
    return memory.view(places[2], result.nbytes).view(result.dtype).copy()


BITS = {"f32": ("b32", "%r"), "f64": ("b64", "%rd"), "u32": ("b32", "%r"), "s32": ("b32", "%r"),
        "u64": ("b64", "%rd"), "s64": ("b64", "%rd"), "b32": ("b32", "%r"), "b64": ("b64", "%rd")}
DTYPE = {"f32": "f4", "f64": "f8", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8",
         "b32": "u4", "b64": "u8"}


def values(kind, seed=0):
    """Sixty-four numbers of a kind, some of them special."""
    dice, dtype = np.random.default_rng(seed), np.dtype(DTYPE[kind])
    if dtype.kind == "f":
        x = dice.normal(0, 10, 64)
        x[:8] = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5]
        return np.roll(x, 3 * seed).astype(dtype)
    info = np.iinfo(dtype)
    x = dice.integers(info.min, info.max, 64, dtype, endpoint=True)
    x[:6] = [0, 1, info.max, info.min, 2, 7]
    return np.roll(x, 3 * seed)


def instruction(name, kind, a, b, out=None):
    """c = name(a, b) for registers of a kind."""
    width, register = BITS[kind]
    wide, target = BITS[out or kind]
    body = (f"\tld.global.{width} \t{register}1, [%rd96];\n"
            f"\tld.global.{width} \t{register}2, [%rd97];\n"
            f"\t{name} \t{target}3, {register}1, {register}2;\n"
            f"\tst.global.{wide} \t[%rd98], {target}3;")
    return execute(body, a, b, np.zeros(64, DTYPE[out or kind]))


def wrapped(function, a, b, bits):
    """Integers of Python, and only then cut to the size."""
    made = [function(int(x), int(y)) & (1 << bits) - 1 for x, y in zip(a, b)]
    return np.array(made, f"u{bits // 8}").view(a.dtype)


INTEGERS = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul.lo": lambda x, y: x * y,
            "and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y,
            "min": min, "max": max}


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name, kind):
    a, b, bits = values(kind), values(kind, 1), int(kind[1:])
    typed = f"b{bits}" if name in ("and", "or", "xor") else kind
    got = instruction(f"{name}.{typed}", kind, a, b)
    np.testing.assert_array_equal(got, wrapped(INTEGERS[name], a, b, bits))


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_products_of_double_width(kind):
    a, b = values(kind), values(kind, 1)
    got = instruction(f"mul.wide.{kind}", kind, a, b, kind.replace("32", "64"))
    np.testing.assert_array_equal(got, a.astype("i8" if kind[0] == "s" else "u8") * b)
    high = instruction(f"mul.hi.{kind}", kind, a, b)
    np.testing.assert_array_equal(high, wrapped(lambda x, y: x * y >> 32, a, b, 32))


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_division_goes_towards_zero(kind):
    a, b = values(kind), values(kind, 1)
    b[b == 0] = 3
    b[b == -1] = 5 if kind[0] == "s" else b.max()

    def quotient(x, y):
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    bits = int(kind[1:])
    np.testing.assert_array_equal(instruction(f"div.{kind}", kind, a, b),
                                  wrapped(quotient, a, b, bits))
    np.testing.assert_array_equal(instruction(f"rem.{kind}", kind, a, b),
                                  wrapped(lambda x, y: x - y * quotient(x, y), a, b, bits))


@pytest.mark.parametrize("name, kind", [("shl", "b32"), ("shr", "u32"), ("shr", "s32"),
                                        ("shl", "b64"), ("shr", "u64"), ("shr", "s64")])
@pytest.mark.parametrize("by", [0, 1, 31, 32, 40, 63, 64, 100])
def test_shifts_beyond_the_width(name, kind, by):
    a = values(kind)
    width, register = BITS[kind]
    body = (f"\tld.global.{width} \t{register}1, [%rd96];\n"
            f"\t{name}.{kind} \t{register}3, {register}1, {by};\n"
            f"\tst.global.{width} \t[%rd98], {register}3;")
    got = execute(body, a, a, np.zeros(64, a.dtype))
    by_python = (lambda x, y: x << by) if name == "shl" else (lambda x, y: x >> by)
    np.testing.assert_array_equal(got, wrapped(by_python, a, a, int(kind[1:])))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("start, length", [(0, 5), (3, 7), (30, 2), (28, 20), (5, 0), (0, 32)])
def test_fields_of_bits(kind, start, length):
    a, bits = values(kind), int(kind[1:])
    width, register = BITS[kind]
    body = (f"\tld.global.{width} \t{register}1, [%rd96];\n"
            f"\tbfe.{kind} \t{register}3, {register}1, {start}, {length};\n"
            f"\tst.global.{width} \t[%rd98], {register}3;")
    got = execute(body, a, a, np.zeros(64, a.dtype))

    def field(x, _):
        size = min(length, bits - start)
        found = (x >> start) & (1 << size) - 1
        sign = kind[0] == "s" and size > 0 and found >> size - 1
        return found - (1 << size) if sign else found

    np.testing.assert_array_equal(got, wrapped(field, a, a, bits))


FLOATS = {"add.rn": np.add, "sub.rn": np.subtract, "mul.rn": np.multiply,
          "div.rn": np.divide, "max": np.fmax, "min": np.fmin, "max.NaN": np.maximum,
          "min.NaN": np.minimum}


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", FLOATS)
def test_floats(name, kind):
    a, b = values(kind), values(kind, 1)
    with np.errstate(all="ignore"):
        want = FLOATS[name](a, b)
    np.testing.assert_array_equal(instruction(f"{name}.{kind}", kind, a, b), want)


@pytest.mark.parametrize("mode", ["rn", "rm"])
def test_fused_multiply_add_rounds_once(mode):
    a, b = values("f32")[8:40], values("f32", 1)[8:40]
    body = ("\tld.global.b32 \t%r1, [%rd96];\n\tld.global.b32 \t%r2, [%rd97];\n"
            f"\tfma.{mode}.f32 \t%r3, %r1, %r2, 0f3DCCCCCD;\n\tst.global.b32 \t[%rd98], %r3;")
    got = execute(body, a, b, np.zeros(32, "f4"))
    exact = a.astype("f8") * b + np.float64(np.float32(0.1))
    near = exact.astype("f4")
    lower = np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)
    np.testing.assert_array_equal(got, near if mode == "rn" else lower)


COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
           "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b),
           "ltu": lambda a, b: ~(a >= b), "neu": np.not_equal,
           "equ": lambda a, b: ~((a < b) | (a > b)), "geu": lambda a, b: ~(a < b),
           "nan": lambda a, b: np.isnan(a) | np.isnan(b),
           "num": lambda a, b: ~(np.isnan(a) | np.isnan(b))}


def select(setp, kind, a, b):
    width, register = BITS[kind]
    body = (f"\tld.global.{width} \t{register}1, [%rd96];\n"
            f"\tld.global.{width} \t{register}2, [%rd97];\n\t{setp}\n"
            f"\tselp.b32 \t%r4, 1, 0, %p1;\n\tst.global.b32 \t[%rd98], %r4;")
    return execute(body, a, b, np.zeros(64, "u4")).astype(bool)


@pytest.mark.parametrize("how", COMPARE)
def test_comparisons_with_nan(how):
    a, b = values("f32"), np.roll(values("f32"), 1)
    b[::3] = a[::3]
    got = select(f"setp.{how}.f32 \t%p1, %r1, %r2;", "f32", a, b)
    np.testing.assert_array_equal(got, COMPARE[how](a, b))


def test_comparisons_of_integers_and_of_two_at_once():
    a, b = values("s32"), values("s32", 1)
    np.testing.assert_array_equal(select("setp.lt.s32 \t%p1, %r1, %r2;", "s32", a, b), a < b)
    np.testing.assert_array_equal(select("setp.lo.u32 \t%p1, %r1, %r2;", "s32", a, b),
                                  a.view("u4") < b.view("u4"))
    both = "setp.gt.s32 \t%p2, %r1, 0;\n\tsetp.lt.and.s32 \t%p1, %r1, %r2, !%p2;"
    np.testing.assert_array_equal(select(both, "s32", a, b), (a < b) & ~(a > 0))


CONVERT = {  # instruction: from, to, what NumPy says
    "cvt.rzi.s32.f32": ("f32", "s32", lambda a: clipped(np.trunc(a), "i4")),
    "cvt.rni.s32.f32": ("f32", "s32", lambda a: clipped(np.rint(a), "i4")),
    "cvt.rzi.u64.f64": ("f64", "u64", lambda a: clipped(np.trunc(a), "u8")),
    "cvt.rni.f32.f32": ("f32", "f32", np.rint), "cvt.rmi.f64.f64": ("f64", "f64", np.floor),
    "cvt.rpi.f64.f64": ("f64", "f64", np.ceil), "cvt.f64.f32": ("f32", "f64", np.float64),
    "cvt.rn.f32.f64": ("f64", "f32", lambda a: a.astype("f4")),
    "cvt.rn.f32.s32": ("s32", "f32", lambda a: a.astype("f4")),
    "cvt.rn.f64.u64": ("u64", "f64", lambda a: a.astype("f8")),
    "cvt.s64.s32": ("s32", "s64", lambda a: a.astype("i8")),
    "cvt.u64.u32": ("u32", "u64", lambda a: a.astype("u8")),
    "cvt.u32.u64": ("u64", "u32", lambda a: a.astype("u4")),
    "cvt.sat.f32.f32": ("f32", "f32", lambda a: np.where(np.isnan(a), 0, np.clip(a, 0, 1))),
}


def clipped(x, dtype):
    """What a GPU makes of a float that does not fit: the nearest that does; of NaN, zero."""
    info = np.iinfo(dtype)
    return np.array([0 if np.isnan(v) else min(max(int(v) if np.isfinite(v) else int(
        np.sign(v)) * 2**70, info.min), info.max) for v in x.astype("f8")], dtype)


@pytest.mark.parametrize("name", CONVERT)
def test_conversions(name):
    source, target, numpy = CONVERT[name]
    a = values(source)
    (read, x), (write, y) = BITS[source], BITS[target]
    body = (f"\tld.global.{read} \t{x}1, [%rd96];\n\t{name} \t{y}2, {x}1;\n"
            f"\tst.global.{write} \t[%rd98], {y}2;")
    with np.errstate(all="ignore"):
        want = numpy(a)
    np.testing.assert_array_equal(execute(body, a, a, np.zeros(64, DTYPE[target])), want)


@pytest.mark.parametrize("kind, dtype", [("s8", "i1"), ("u8", "u1"), ("s16", "i2"),
                                         ("u16", "u2"), ("s32", "i4"), ("u32", "u4")])
def test_a_load_extends_to_the_register_and_a_store_cuts(kind, dtype):
    a = np.arange(-32, 32).astype(dtype)
    body = f"\tld.global.{kind} \t%rd1, [%rd96];\n\tst.global.b64 \t[%rd98], %rd1;"
    np.testing.assert_array_equal(execute(body, a, a, np.zeros(64, "i8")), a.astype("i8"))
    big = np.arange(64) * 0x123456789
    body = "\tld.global.b64 \t%rd1, [%rd96];\n\tst.global.b32 \t[%rd98], %rd1;"
    np.testing.assert_array_equal(execute(body, big, big, np.zeros(64, "u4")),
                                  big.astype("u4"))


def test_vectors_and_halves():
    a = np.arange(64, dtype="u8") * 0x1_0000_0003
    body = ("\tld.global.b64 \t%rd1, [%rd96];\n\tmov.b64 \t{%r1, %r2}, %rd1;\n"
            "\tmov.b64 \t%rd2, {%r2, %r1};\n\tst.global.b64 \t[%rd98], %rd2;")
    got = execute(body, a, a, np.zeros(64, "u8"))
    np.testing.assert_array_equal(got, a << np.uint64(32) | a >> np.uint64(32))
    wide = np.arange(256, dtype="f4").reshape(64, 4).view("V16")[:, 0]
    body = ("\tld.global.v4.b32 \t{%r1, %r2, %r3, %r4}, [%rd96];\n"
            "\tst.global.v2.b32 \t[%rd98], {%r4, %r1};")
    got = execute(body, wide, wide, np.zeros(64, "u8"))
    np.testing.assert_array_equal(got.view("f4").reshape(64, 2),
                                  wide.view("f4").reshape(64, 4)[:, [3, 0]])


# ---------------------------------------------------------------- threads

@pytest.mark.parametrize("how, source", [
    ("bfly", lambda lane: lane ^ 5), ("down", lambda lane: lane + 5 if lane < 27 else lane),
    ("up", lambda lane: lane - 5 if lane >= 5 else lane), ("idx", lambda lane: 5)])
def test_shuffles(how, source):
    a = np.arange(128, dtype="u4") * 3
    clamp = 0 if how == "up" else 31
    body = ("\tld.global.b32 \t%r1, [%rd96];\n"
            f"\tshfl.sync.{how}.b32 \t%r2|%p1, %r1, 5, {clamp}, -1;\n"
            "\tst.global.b32 \t[%rd98], %r2;")
    got = execute(body, a, a, np.zeros(128, "u4"), threads=64)
    want = [a[i // 32 * 32 + source(i % 32)] for i in range(128)]
    np.testing.assert_array_equal(got, want)


def test_a_shuffle_of_sixteen_lanes():
    a = np.arange(64, dtype="u4")
    body = ("\tld.global.b32 \t%r1, [%rd96];\n"
            "\tshfl.sync.down.b32 \t%r2|%p1, %r1, 1, 4127, -1;\n"  # 4127 = 16 << 8 | 31
            "\tselp.b32 \t%r3, %r2, 999, %p1;\n\tst.global.b32 \t[%rd98], %r3;")
    got = execute(body, a, a, np.zeros(64, "u4"))
    want = np.where(a % 16 < 15, a + 1, 999)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("k", [4, 8])
def test_tensor_cores(k):
    """D = A B + C by one warp: elements go to the lanes as the manual of PTX says."""
    dice = np.random.default_rng(k)
    left, right = dice.integers(-9, 9, (16, k)), dice.integers(-9, 9, (k, 8))
    more = dice.integers(-9, 9, (16, 8))
    given = np.zeros((32, 16), "f4")  # of each lane: four of A, two of B, four of C
    for lane in range(32):
        group, inside = divmod(lane, 4)
        given[lane, :4] = [left[group + 8 * (i % 2), inside + 4 * (i // 2)] if i < k // 2 else 0
                           for i in range(4)]
        given[lane, 4:6] = [right[inside + 4 * i, group] if i < k // 4 else 0 for i in range(2)]
        given[lane, 8:12] = [more[group + 8 * (i // 2), 2 * inside + i % 2] for i in range(4)]
    loads = "".join(f"\tld.global.b32 \t%r{i}, [%rd96+{4 * i}];\n" for i in range(12))

    def registers(first, count):
        return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"

    body = (loads + f"\tmma.sync.aligned.m16n8k{k}.row.col.f32.tf32.tf32.f32 {registers(20, 4)}, "
            f"{registers(0, k // 2)}, {registers(4, k // 4)}, {registers(8, 4)};\n"
            "\tst.global.v4.b32 \t[%rd98], {%r20, %r21, %r22, %r23};")
    rows = given.reshape(32, 16).view("V64")[:, 0]
    got = execute(body, rows, rows, np.zeros((32, 4), "f4").view("V16")[:, 0])
    want = (left @ right + more).astype("f4")
    for lane, four in enumerate(got.view("f4").reshape(32, 4)):
        group, inside = divmod(lane, 4)
        for i in range(4):
            assert four[i] == want[group + 8 * (i // 2), 2 * inside + i % 2]


def test_tensor_cores_see_nineteen_bits():
    a = np.full(32, 1 + 2**-11, "f4")
    body = ("\tld.global.b32 \t%r1, [%rd96];\n\tmov.b32 \t%r2, 0;\n"
            "\tmma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%r3, %r4, %r5, %r6}, "
            "{%r1, %r1}, {%r1}, {%r2, %r2, %r2, %r2};\n\tst.global.b32 \t[%rd98], %r3;")
    assert set(execute(body, a, a, np.zeros(32, "f4"))) == {4}


def test_loops_of_different_lengths_join_again():
    a = np.arange(64, dtype="u4") % 9
    body = """	ld.global.b32 	%r1, [%rd96];
	mov.b32 	%r2, 0;
	mov.b32 	%r3, 0;
	setp.eq.s32 	%p1, %r1, 0;
	@%p1 bra 	$L__DONE;
$L__LOOP:
	add.s32 	%r2, %r2, 1;
	add.s32 	%r3, %r3, %r2;
	setp.lt.s32 	%p2, %r2, %r1;
	@%p2 bra 	$L__LOOP;
$L__DONE:
	shfl.sync.idx.b32 	%r4, %r3, 8, 31, -1;
	add.s32 	%r5, %r3, %r4;
	st.global.b32 	[%rd98], %r5;"""
    got = execute(body, a, a, np.zeros(64, "u4"))
    sums = a * (a + 1) // 2
    np.testing.assert_array_equal(got, sums + np.repeat(sums[[8, 40]], 32))


def test_a_table_of_branches():
    a = np.arange(64, dtype="u4") % 3
    body = """	ld.global.b32 	%r1, [%rd96];
	mov.b32 	%r2, 100;
	$L_brx_0: .branchtargets
		$L__A,
		$L__B,
		$L__C;
	brx.idx 	%r1, $L_brx_0;
$L__A:
	add.s32 	%r2, %r2, 1;
$L__B:
	add.s32 	%r2, %r2, 10;
$L__C:
	st.global.b32 	[%rd98], %r2;"""
    got = execute(body, a, a, np.zeros(64, "u4"))
    np.testing.assert_array_equal(got, np.array([111, 110, 100])[a])


def test_guards_on_single_instructions():
    a = np.arange(64, dtype="u4")
    body = """	ld.global.b32 	%r1, [%rd96];
	and.b32 	%r2, %r1, 1;
	setp.eq.b32 	%p1, %r2, 0;
	mov.b32 	%r3, 7;
	@%p1 add.s32 	%r3, %r3, %r1;
	@!%p1 mov.b32 	%r3, 1000;
	st.global.b32 	[%rd98], %r3;"""
    got = execute(body, a, a, np.zeros(64, "u4"))
    np.testing.assert_array_equal(got, np.where(a % 2 == 0, 7 + a, 1000))


SHARED = "\t.shared .align 16 .b8 room[256];"
REVERSE = """	ld.global.b32 	%r1, [%rd96];
	mov.b32 	%r2, room;
	shl.b32 	%r3, %r91, 2;
	add.s32 	%r4, %r2, %r3;
	st.shared.b32 	[%r4], %r1;
	{barrier}
	sub.s32 	%r5, 63, %r91;
	shl.b32 	%r6, %r5, 2;
	add.s32 	%r7, %r2, %r6;
	ld.shared.b32 	%r8, [%r7{offset}];
	st.global.b32 	[%rd98], %r8;"""


def test_shared_memory_belongs_to_a_block():
    a = np.arange(256, dtype="u4")
    body = REVERSE.format(barrier="bar.sync 	0;", offset="")
    got = execute(body, a, a, np.zeros(256, "u4"), threads=64, declare=SHARED)
    np.testing.assert_array_equal(got, a.reshape(4, 64)[:, ::-1].ravel())


def test_dynamic_shared_memory():
    a = np.arange(128, dtype="u4")
    body = REVERSE.format(barrier="bar.sync 	0;", offset="")
    outside = ".extern .shared .align 16 .b8 room[];"
    got = execute(body, a, a, np.zeros(128, "u4"), threads=64, outside=outside, shared=256)
    np.testing.assert_array_equal(got, a.reshape(2, 64)[:, ::-1].ravel())
    with pytest.raises(Fault, match="outside of the 128 bytes of shared memory"):
        execute(body, a, a, np.zeros(128, "u4"), threads=64, outside=outside, shared=128)


def test_a_function_is_called_in_each_thread():
    outside = """.func  (.param .b64 func_retval0) square_or_one(
	.param .b64 square_or_one_param_0
)
{
	.reg .pred 	%p<2>;
	.reg .b64 	%rd<4>;
	ld.param.b64 	%rd1, [square_or_one_param_0];
	setp.gt.s64 	%p1, %rd1, 20;
	@%p1 bra 	$L__BB1_2;
	mul.lo.s64 	%rd2, %rd1, %rd1;
	st.param.b64 	[func_retval0], %rd2;
	ret;
$L__BB1_2:
	st.param.b64 	[func_retval0], 1;
	ret;

}"""
    a = np.arange(64)
    call = """	{ // callseq %d, 0
	.param .b64 	param0;
	.param .b64 	retval0;
	st.param.b64 	[param0], %%rd%d;
	call.uni (retval0), square_or_one, (param0);
	ld.param.b64 	%%rd%d, [retval0];
	} // callseq %d"""
    body = ("\tld.global.b64 \t%rd1, [%rd96];\n" + call % (0, 1, 2, 0) + "\n"
            + call % (1, 2, 3, 1) + "\n\tst.global.b64 \t[%rd98], %rd3;")
    got = execute(body, a, a, np.zeros(64, "i8"), outside=outside)

    def once(x):
        return np.where(x > 20, 1, x * x)

    np.testing.assert_array_equal(got, once(once(a)))


# ---------------------------------------------------------------- what a GPU would not survive

@pytest.mark.parametrize("body, why", [
    ("\tld.global.b32 \t%r1, [%rd96+256];", "outside of every allocation"),
    ("\tld.global.b32 \t%r1, [%rd96+-4];", "outside of every allocation"),
    ("\tld.global.b32 \t%r1, [%rd96+2];", "misaligned"),
    ("\tld.global.v4.b32 \t{%r1, %r2, %r3, %r4}, [%rd96];", "misaligned"),
    ("\tst.global.b32 \t[%rd96+256], %r91;", "outside of every allocation"),
    (REVERSE.format(barrier="bar.sync 0;", offset="+4"), "outside of the 256 bytes of shared"),
])
def test_wrong_addresses(body, why):
    a = np.zeros(64, "u4")
    with pytest.raises(Fault, match=why):
        execute("\tmov.b64 \t%rd1, 0;\n" + body, a, a, a, threads=64, declare=SHARED)


def test_a_shuffle_from_a_thread_that_is_not_there():
    a = np.arange(64, dtype="u4")
    body = """	setp.ge.u32 	%p1, %r91, 16;
	@%p1 bra 	$L__END;
	mov.b32 	%r1, %r91;
	shfl.sync.idx.b32 	%r2, %r1, 20, 31, -1;
	st.global.b32 	[%rd98], %r2;
$L__END:"""
    with pytest.raises(Fault, match="a thread that is not there"):
        execute(body, a, a, a)


@pytest.mark.parametrize("text", ["frobnicate.b32 \t%r1, %r2;", "???;"])
def test_what_it_does_not_know_is_an_error(text):
    a = np.zeros(64, "u4")
    with pytest.raises((PTXError, KeyError)):
        execute("\tmov.b32 \t%r2, 0;\n\t" + text, a, a, a)


def test_memory_that_nobody_wrote_is_nan():
    memory = Memory(1 << 16)
    place = memory.alloc(64)
    assert np.isnan(memory.view(place, 64).view("f4")).all()
