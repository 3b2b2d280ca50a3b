"""`f.explain(x)`: bytes and operations counted by hand, the roof, the reasons."""
import numpy as np
import pytest

from tinymlir import errors, jit, ops, roof
from tinymlir.checkpoint import BUNDLED
from tinymlir.costs import Cost, costs
from tinymlir.explain import changed, kernels, marked
from tinymlir.model import load_model
from tinymlir.roof import Roof

EXP = {4: 24, 8: 36}  # operations of our exp, by bytes of its type: see `exp` of mathfn:
# one minimum, one subtraction, two products, and 3 + 7 or 3 + 13 fused multiply-adds
F4, F8 = np.float32, np.float64


@pytest.fixture(autouse=True)
def stated(monkeypatch):
    monkeypatch.setattr(roof, "stated", [Roof(10, 100, 200)])


def of(function, *arrays, **static):
    """What a function costs, as (read, written, flops) of each kernel."""
    compiled = jit(function).compile(*arrays, **static)
    return [(x.read, x.written, x.flops) for x in costs(compiled.graph)]


@pytest.mark.parametrize(("shape", "kinds"), [
    ((3, 5, 7), (F4, F4)), ((64, 32, 48), (F8, F4)), ((1, 40, 9), (F8, F8)),
    ((40, 8, 300), (F4, F8)), ((2, 2, 2), (np.int64, np.int64))])
def test_a_product(shape, kinds):
    m, k, n = shape
    a, b = np.ones((m, k), kinds[0]), np.ones((k, n), kinds[1])
    want = a @ b
    found = costs(jit(np.matmul).compile(a, b).graph)
    # a matrix that has to be widened first is another kernel, with no arithmetic
    assert [x for x in found if x.flops] == [found[-1]]
    assert found[-1].flops == 2 * m * n * k and found[-1].shape == (m, n, k)
    assert found[-1].written == want.nbytes
    if len(found) == 1:
        assert found[0].read == a.nbytes + b.nbytes


def test_a_product_with_a_transpose_copies_nothing():
    a, b = np.ones((6, 8), F4), np.ones((9, 8), F4)
    assert of(lambda a, b: a @ b.T, a, b) == [(a.nbytes + b.nbytes, 6 * 9 * 4, 2 * 6 * 8 * 9)]


def test_a_stack_of_products():
    a, b = np.ones((5, 6, 7)), np.ones((5, 7, 8))
    assert of(np.matmul, a, b) == [(a.nbytes + b.nbytes, (a @ b).nbytes, 2 * 5 * 6 * 7 * 8)]


@pytest.mark.parametrize("kind", [F4, F8])
@pytest.mark.parametrize("shape", [(16, 64), (7, 5), (3, 4, 5)])
def test_softmax(kind, shape):
    x = np.ones(shape, kind)
    rows, size = x.size // shape[-1], x.itemsize
    # the sum starts from 0 in NumPy's type, and is kept where its row is
    found = of(ops.softmax, x)
    assert sum(f for *_, f in found) == x.size * (EXP[size] + 4)  # max, sub, add, div
    read, written, _ = map(sum, zip(*found))
    assert x.nbytes <= read <= x.nbytes + 2 * rows * 8
    assert x.nbytes <= written <= 2 * x.nbytes + 4 * rows * 8


@pytest.mark.parametrize(("function", "each"), [(np.sum, 1), (np.max, 1), (np.mean, 1)])
def test_a_reduction(function, each):
    x = np.ones((30, 50), F8)
    found = of(lambda x: function(x, axis=-1), x)
    assert sum(f for *_, f in found) == each * x.size + (30 if function is np.mean else 0)
    assert sum(r for r, *_ in found) in (x.nbytes, x.nbytes + 30 * 8, x.nbytes + 2 * 30 * 8)


def test_elementwise_is_one_loop_and_reads_each_number_once():
    x, y = np.ones((20, 30), F4), np.ones(30, F4)
    assert of(lambda x, y: (x + y) * x - y, x, y) == [(x.nbytes + y.nbytes, x.nbytes, 3 * x.size)]


def test_whole_numbers():
    x = np.arange(12).reshape(3, 4)
    assert of(lambda x: x * x + 1, x) == [(x.nbytes, x.nbytes, 2 * x.size)]


def test_a_lookup_reads_the_rows_that_it_wants():
    table, ids = np.ones((1000, 8), F4), np.array([1, 2, 3])
    ((read, written, work), *_) = of(lambda t, i: t[i], table, ids)
    assert (read, written, work) == (3 * 8 * 4 + ids.nbytes, 3 * 8 * 4, 0)


def test_no_arithmetic():
    x = np.ones((4, 6), F4)
    found = costs(jit(lambda x: x.T + 0 * x.T).compile(x).graph)
    assert len(found) == 1
    copy, = costs(jit(lambda x: np.concatenate([x.T, x.T])).compile(x).graph)[:1]
    assert copy.name == "copy" and copy.flops == 0 and copy.types == ("f32",)


def test_attention():
    """By hand, from the shapes: N tokens, E width, H heads, D = E / H."""
    n, e, h = 12, 32, 4
    d = e // h
    x = np.ones((n, e))
    qkv, out = ops.Linear(np.ones((e, 3 * e)), np.ones(3 * e)), ops.Linear(
        np.ones((e, e)), np.ones(e))
    compiled = jit(ops.attention).compile(x, qkv, out, heads=h)
    found = costs(compiled.graph)
    products = [(c.shape, c.flops) for c in found if c.name == "matmul"]
    assert products == [
        ((n, 3 * e, e), 2 * n * 3 * e * e), ((h, n, n, d), 2 * h * n * n * d),
        ((h, n, d, n), 2 * h * n * n * d), ((n, e, e), 2 * n * e * e)]
    rest = [c for c in found if c.name != "matmul"]
    softmax = h * n * n * (EXP[8] + 4 + 2)  # and the scale and the mask
    assert sum(c.flops for c in rest) == softmax + n * 3 * e + n * e  # and two biases
    weights = next(c for c in rest if "exp" in c.name)
    assert weights.read >= h * n * n * 8 + n * n * 8 and weights.types == ("f64",)


def test_scores_in_bands_cost_no_bytes():
    heads, n, size = 4, 512, 16
    q = np.ones((heads, n, size), np.float32)
    whole = heads * n * size * 4
    found = costs(jit(lambda q, k, v: np.tanh(q @ k.transpose(0, 2, 1)) @ v)
                  .compile(q, q, q).graph)
    assert [(x.read, x.written) for x in found] == [(2 * whole, 0), (0, 0), (whole, whole)]
    assert found[0].flops == found[2].flops == 2 * heads * n * n * size
    assert found[1].types == ("f32",) and found[1].intensity == float("inf")
    assert Roof(1, 1, 1).limit(found[1]) == "arithmetic"


def test_repeated_blocks_are_counted_as_often_as_they_run():
    model, tokenizer = load_model(BUNDLED, fused=True, dtype="float32")
    from tinymlir.fused import padded
    graph = model.run.compile(padded(np.zeros(5, int), model.config.context), np.array(4),
                              model.params, heads=model.config.heads,
                              residuals=False).graph
    found = costs(graph)
    e, blocks, n, v = (model.config.width, model.config.blocks, 8, model.config.vocabulary)
    of_weights = 2 * n * 12 * e * e * blocks
    of_scores = 2 * blocks * 2 * n * n * e
    total = sum(c.flops * c.times for c in found if c.name in ("matmul", "dots"))
    assert total == of_weights + of_scores + 2 * e * v
    assert {c.times for c in found} == {1, blocks}


# ---------------------------------------------------------------- the roof

@pytest.mark.parametrize(("flops", "kind", "limit", "seconds"), [
    (9_999, "f64", "memory", 1e-7), (10_000, "f64", "arithmetic", 1e-7),
    (19_999, "f32", "memory", 1e-7), (40_000, "f32", "arithmetic", 2e-7),
    (0, "i64", "memory", 1e-7)])
def test_which_limit_binds(flops, kind, limit, seconds):
    cost = Cost("loop", (1,), (kind,), 600, 400, flops)
    top = Roof(10, 100, 200)  # 1,000 bytes are read in the time of 10,000 operations
    assert top.limit(cost) == limit
    assert top.seconds(cost) == pytest.approx(seconds, rel=1e-3)


def test_a_roof_has_to_be_possible():
    with pytest.raises(errors.ArgumentError, match="double: expected a rate above 0, got 0"):
        Roof(1, 0, 1)


def test_this_machine_is_measured_once(monkeypatch):
    monkeypatch.setattr(roof, "stated", [])
    monkeypatch.setattr(roof, "LONG", 1 << 16)
    monkeypatch.setattr(roof, "SIDE", 64)
    first = roof.roof()
    assert first is roof.roof() and "measured" in first.source
    assert 0.01 < first.read < 1e5 and 0.01 < first.double < 1e6


def test_numbers_that_are_only_known_at_run_time():
    nan = float("nan")
    unknown = Cost("matmul", (nan, 4, 5), ("f32",) * 3, nan, nan, nan)
    assert Roof(1, 1, 1).limit(unknown) == "?"


# ---------------------------------------------------------------- the report

def test_the_report_has_all_parts():
    f = jit(lambda x, w: np.tanh(x @ w))
    report = f.explain(np.ones((4, 8)), np.ones((8, 2)))
    for part in ("compiled already: no, nothing was", "graph: ", "+   %0 = matmul",
                 "asm: ", "4x2x8", "memory is the limit below 10.0 flops a byte",
                 "10 GB/s; 100 GFLOP/s in float64"):
        assert part in report
    assert "compiled already: yes" in f.explain(np.ones((4, 8)), np.ones((8, 2)))
    assert repr(report) == report  # a reader who does not print it sees lines


def test_the_nearest_program_gives_the_reason():
    f = jit(lambda x, y, n: x * n + y)
    x, y = np.ones((2, 3)), np.ones(3)
    f(x, y, n=1)
    f(x[:1].astype(F4), y, n=2)
    report = f.explain(x[:1], y, n=1)
    assert "compiled already: no; x: f64[1,3] instead of f64[2,3]\n" in report
    report = f.explain(x, y, n=1.0)
    assert "no; static n: float 1.0 instead of int 1\n" in report
    f(x, y, n=True)
    assert "compiled already: yes" in f.explain(x, y, n=1.0)


def test_another_structure_is_a_reason():
    def f(p):
        return p["w"] + sum(p.get("more", ()))

    compiled, x = jit(f), np.ones(3)
    compiled({"w": x})
    told = compiled.explain({"w": x, "more": (x, x)}).splitlines()
    line = next(line for line in told if line.startswith("compiled already"))
    assert "p: dict(an array, tuple(an array, an array)) instead of dict(an array)" in line
    assert "p['more'][0]: f64[3] instead of nothing" in line


def test_only_new_lines_are_marked():
    before, after = "a\n  %1 = add %0\nb", "a\n  %7 = add %3\nc\nb\nc"
    assert changed(after, before) == ([False, False, True, False, True], 0)
    assert marked("s", after, before).splitlines() == [
        "s: 5 lines, 2 new, 0 gone", "  a", "    %7 = add %3", "+ c", "  b", "+ c"]
    assert changed("a", "a\na\nb") == ([False], 2)


def test_a_long_stage_is_shortened():
    text = "\n".join(map(str, range(100)))
    told = marked("s", text + "\nnew", text).splitlines()
    assert told == ["s: 101 lines, 1 new, 0 gone", "  ...", "  99", "+ new"]
    assert len(marked("s", text, "").splitlines()) == 8


def test_every_example_can_be_counted():
    for name, example in ops.EXAMPLES.items():
        compiled = jit(example.function).compile(*example.arrays, **example.static)
        found = costs(compiled.graph)
        assert found and all(c.bytes > 0 and c.bytes == c.bytes for c in found), name
        assert len(kernels(compiled).splitlines()) == len(found) + 4


def test_another_target_says_that_it_does_not_count():
    f = jit(lambda x: x + 1, target="emulator")
    assert f.explain(np.ones(3, F4)).endswith("kernels for emulator: not counted")


def test_a_step_of_any_length_has_question_marks():
    """How many rows of the cache count is not known before the call."""
    model, tokenizer = load_model(BUNDLED, cache=True, dtype="float32")
    model(tokenizer.encode("The king").ids)
    told = kernels(next(iter(model.run.cache.values())))
    row = next(line for line in told.splitlines() if " exp " in line).split()
    assert row[-1] == row[-2] == "?" and "all but those with ?" in told and "nan" not in told


def test_a_list_of_numbers_gets_a_hint():
    f = jit(lambda x, y: 0.5 * x + y)
    with pytest.raises(TypeError, match="multiply sequence") as told:
        f([1.0, 2.0], np.ones(2))
    assert told.value.__notes__ == ["`x` is a list without an array in it; pass np.asarray(x)"]
    with pytest.raises(TypeError) as told:
        f(np.ones(2), {"y": np.ones(2)})
    assert not getattr(told.value, "__notes__", None) or "asarray" not in told.value.__notes__[0]
