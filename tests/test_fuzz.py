"""Random programs: compiled code does what NumPy does, and the fuzzer would notice if not."""
import os
import random
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from mlir.dialects import arith
from spec import battery

from tinymlir import fuzz
from tinymlir.expr import Op
from tinymlir.fuzz_bounds import BOUND, bounds
from tinymlir.fuzz_check import MODES, Mode, check, interpreted, wrong_error
from tinymlir.fuzz_phrases import PHRASES, write_program
from tinymlir.fuzz_programs import Input, Program, literal
from tinymlir.graph import trace
from tinymlir.scalars import SCALAR

BY_REWRITES = {Op.CALL, Op.RESULT, Op.ATTEND}  # bounds are taken without them


@pytest.fixture(autouse=True)
def nothing_on_disk(monkeypatch):
    monkeypatch.setenv("TINYMLIR_CACHE", "off")


def program(line, *arrays):
    inputs = [Input(name, np.asarray(x), "{}") for name, x in zip("abc", arrays)]
    return Program(tuple(inputs), (f"v = {line}",), ("v",))


# ---------------------------------------------------------------- nothing is wrong

def test_programs_of_hypothesis_agree():
    report = fuzz.search(25, seed=20)
    assert report.faults == [] and report.kinds["agree"] > 15, report.faults


def test_every_operation_is_tried_and_nothing_is_wrong():
    """A new operation fails here until it has a phrase and a bound."""
    assert set(PHRASES) == set(Op) == set(BOUND) | BY_REWRITES
    report = fuzz.Report()
    for seed in range(1000, 1500):
        if seed < 1040 or report.untried:
            made = write_program(random.Random(seed).choice)
            verdict = check(made)
            assert verdict.fault is None, fuzz.snippet(made, verdict.fault[0])
            report.count(verdict)
    assert report.untried == set()
    share = {kind: n / report.compared.total() for kind, n in report.compared.items()}
    assert share["exact"] > 0.6 and share["unknown"] < 0.1, share


FOUND = {  # by random programs, in earlier versions
    "take by an empty list": lambda x, _: np.take(x, [], axis=0),
    "take from one number": lambda x, _: np.take(x[0, 0], [0, -1], axis=0),
    "negative power of nothing": lambda _, i: np.power(i[:0], -1),
    **{f"a number at the end: {n}": lambda x, i, n=n: [
        np.concatenate([y, n], axis=None) for y in (x, i, x > 0, x.astype("f4"))]
       for n in (2, 2.5, True, np.float32(2), np.float64(2), 2**40)},
}


def test_what_was_found_before():
    battery(FOUND, np.arange(6.0).reshape(2, 3), np.arange(3))


def test_a_rewritten_graph_keeps_its_order():
    def f(a):  # a folded constant, and a loop that becomes calls
        m = np.logical_and(a, np.array(False))
        m, kept = m.T @ m, []
        for _ in range(3):
            a = a @ m
            kept.append(a * 2)
        return np.stack(kept)

    battery({"order": f}, np.full((3, 3), 100, np.int32))


def test_the_interpreter_answers_in_native_byte_order():
    assert interpreted(lambda x: x)(np.ones(2, ">f8")).dtype.isnative


# ---------------------------------------------------------------- something is wrong

@pytest.fixture
def nan_equals_nan():
    right = SCALAR[Op.NE, "f"]
    SCALAR[Op.NE, "f"] = partial(arith.cmpf, arith.CmpFPredicate.ONE)
    yield
    SCALAR[Op.NE, "f"] = right


def test_a_fault_is_found_and_can_be_pasted(nan_equals_nan, capsys):
    (text,) = fuzz.search(3000, 3, {"fused": MODES["fused"]}).faults
    assert len(text.splitlines()) <= 7 and "np.nan" in text
    exec(text, {})
    ours, theirs = capsys.readouterr().out.split(" is not ")
    assert ours.strip() != theirs.strip()


@pytest.mark.parametrize(("engine", "words"), [
    (lambda f: lambda x: f(x) + np.spacing(f(x)), "is not"),
    (lambda f: lambda x: f(x).astype("f4"), "float32(2,) is not float64(2,)"),
    (lambda f: lambda x: f(x)[:1], "float64(1,) is not float64(2,)"),
    (lambda f: lambda x: f(x) + 0.0, "is not"),  # 0 in place of -0
    (lambda f: lambda x: 1 // 0, "ZeroDivisionError"),
])
def test_small_differences_count(engine, words):
    verdict = check(program("a * 2", [-0.0, 0.1]), {"bad": Mode(engine)})
    assert verdict.fault[0] == "bad" and words in verdict.fault[1]


@pytest.mark.parametrize(("line", "engine", "words"), [
    ("a @ a", lambda f: lambda x: x, "not refused"),
    ("a.reshape(5)", lambda f: lambda x: int("x"), "int()"),
    ("a[[True, False]]", lambda f: lambda x: x[9], "refused, unlike NumPy, by IndexError"),
])
def test_refusals_are_compared(line, engine, words):
    verdict = check(program(line, np.ones((1, 2, 3)) if "@" in line else np.ones(2)),
                    {"bad": Mode(engine)})
    assert words in verdict.fault[1]


def test_a_refusal_that_nobody_knows_of_is_a_fault():
    from tinymlir.errors import UnsupportedError
    assert "unlike NumPy" in wrong_error(UnsupportedError("np.tanh cannot be traced"), None)
    assert wrong_error(UnsupportedError("dtype float16 is not supported"), None) is None


def dies(count, seed, journal):
    journal.write_text("the last program")
    os.abort()


def test_a_program_that_kills_its_process_is_reported(monkeypatch):
    monkeypatch.setattr(fuzz, "search", dies)
    (text,) = fuzz.isolated((1, 1)).faults
    assert text.startswith("the last program") and "killed" in text


def test_the_command(tmp_path):
    done = subprocess.run([sys.executable, "-m", "tinymlir.fuzz", "--count", "12", "--seed", "5"],
                          text=True, capture_output=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "matmul" in done.stdout and "agree" in done.stdout


# ---------------------------------------------------------------- bounds

@pytest.mark.parametrize(("line", "array", "expected"), [
    ("a * 3 - 1", [1e300, 0.1], [0, 0]), ("np.sqrt(a) / 7", [2.0], [0]),
    ("np.tanh(a) > 1", [1.0, 50], [0, np.inf]), ("np.log(a) == 0", [1.0, 2], [np.inf, 0]),
    ("1 / np.sum(a - a)", [1.0, 2], np.inf), ("np.exp(a)", [np.inf, np.nan], [0, 0]),
    ("np.where(np.exp(a) > 1, a, 0)", [0.0, 1], [np.inf, 0]), ("np.max(a)", [0.0, -0.0], 5e-324),
    ("np.sum(a)", [1, 2], 0), ("np.tanh(a).astype(int)", [0.5, 20], [0, np.inf]),
    ("np.sum(a)", [np.inf, 1.0], 0), ("np.sum(a)", [1e308, 1e308, -1e308], np.inf),
])
def test_bounds(line, array, expected):
    made = program(line, array)
    graph, _ = trace(made.function(), tuple(made.arrays()), {})
    found = bounds(graph, *made.arrays())[id(graph.outputs[0])]
    np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=0, atol=1e-320)


@pytest.mark.parametrize("line", [
    "np.exp(a) - 1", "np.sum(np.tanh(a) * a)", "a @ np.exp(-a * a)", "np.var(a) / np.mean(a)",
    "np.sqrt(np.abs(np.sum(a))) ** 1.5", "np.log(np.sum(a * a)) - 3"])
def test_bounds_hold_what_single_precision_does(line):
    """float32 and float64 are two answers; the bound in float32 holds their difference."""
    x = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    made = program(line, x)
    graph, _ = trace(made.function(), (x,), {})
    bound = bounds(graph, x)[id(graph.outputs[0])]
    exact = made.function()(x.astype(np.float64))
    error = np.abs(made.function()(x).astype(float) - exact)
    assert (error <= bound).all() and (bound < 0.02 * (1 + np.abs(exact))).all()


def test_literals_make_the_array():
    for x in (np.array([1, np.nan, -np.inf]), np.zeros((2, 0), "i4"), np.full((2, 2), True),
              np.float32(0.1), np.array([-0.0, 0.0])):
        back = eval(literal(np.asarray(x)), {"np": np})
        assert back.tobytes() == np.asarray(x).tobytes() and back.dtype == x.dtype
