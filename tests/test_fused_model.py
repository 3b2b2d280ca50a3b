"""The model as one function: the same numbers and ids as one kernel a sublayer."""
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tinymlir import errors, generate, jit, load_model
from tinymlir.cli import main
from tinymlir.expr import Op
from tinymlir.fused import FusedModel, last_logits, padded
from tinymlir.model import KINDS, Model, generate_ids

ROOT = Path(__file__).parents[1]
some_ids = st.lists(st.integers(0, tiny.VOCABULARY - 1), min_size=1, max_size=6)
few = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="session")
def model(folder):
    return load_model(folder)[0]


@pytest.fixture(scope="session")
def fused(folder):
    return load_model(folder, fused=True)[0]


def traced(model, ids):
    trace = {}
    model(ids, trace=trace)
    return trace


# ---------------------------------------------------------------- loading and running it

def test_load_model(model, fused):
    assert type(model) is Model and type(fused) is FusedModel
    assert fused.config == model.config


@pytest.mark.parametrize("home", KINDS.values())
def test_every_kind_is_there(home):
    assert callable(import_module(home).build)


@pytest.mark.parametrize("value", ["yes", 2, None])
def test_no_other_kind(folder, value):
    with pytest.raises(errors.UnsupportedError, match=f"fused={value!r} is not supported"):
        load_model(folder, fused=value)


def test_command(folder, capsys):
    words = ["generate", "Grüße", "--tokens", "5", "--model", str(folder)]
    assert main(words) == 0
    plain = capsys.readouterr()
    assert main([*words, "--fused"]) == 0
    assert capsys.readouterr() == plain
    assert plain.out == generate(*load_model(folder, fused=True), "Grüße", 5) + "\n"


def test_script_of_the_tutorial(folder):
    done = subprocess.run(
        [sys.executable, ROOT / "example.py", "abc", "--tokens", "3", "--model", folder, "--fused"],
        capture_output=True, encoding="utf-8", timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])})
    assert done.returncode == 0, done.stderr
    assert done.stdout == generate(*load_model(folder), "abc", 3) + "\n"


@pytest.mark.parametrize("ids", [[], [257], [-1], [1.0], [[1]], [0] * (tiny.CONTEXT + 1)])
def test_ids_that_are_none(model, fused, ids):
    raised = []
    for either in (model, fused):
        with pytest.raises(errors.TinymlirError) as caught:
            either(ids)
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, tiny.CONTEXT])
def test_every_residual(model, fused, length):
    ids = np.random.default_rng(length).integers(0, tiny.VOCABULARY, length)
    ours, theirs = traced(fused, ids), traced(model, ids)
    assert list(ours) == list(theirs)
    for name, x in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (x.dtype, x.shape), name
        np.testing.assert_allclose(ours[name], x, rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(fused(ids), theirs["logits"], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- what must hold for any ids

@few
@given(some_ids)
def test_both_choose_the_same_ids(model, fused, ids):
    assert generate_ids(fused, ids, 2) == generate_ids(model, ids, 2)


@few
@given(some_ids, st.data())
def test_what_follows_is_not_seen(model, fused, ids, data):
    """The last token of a row never changes a residual of an earlier one."""
    other = data.draw(st.integers(0, tiny.VOCABULARY - 1))
    for either in (model, fused):
        one, two = traced(either, [*ids, ids[0]]), traced(either, [*ids, other])
        for name in [*one][:-1]:
            np.testing.assert_array_equal(one[name][:-1], two[name][:-1], err_msg=name)


@few
@given(some_ids, st.lists(st.integers(0, tiny.VOCABULARY - 1), min_size=1, max_size=4))
def test_a_prefix_has_its_own_logits(model, fused, ids, more):
    """Row n of a longer text is what n tokens alone make of it."""
    for either in (model, fused):
        long, short = traced(either, [*ids, *more]), traced(either, ids)
        for name in [*short][:-1]:
            np.testing.assert_allclose(long[name][:len(ids)], short[name], rtol=1e-5, atol=1e-5)


@few
@given(st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_padding_does_not_matter(fused, length, seed):
    dice = np.random.default_rng(seed)
    ids = dice.integers(0, tiny.VOCABULARY, length)
    zeros = padded(ids, tiny.CONTEXT)
    noise = np.concatenate([ids, dice.integers(0, tiny.VOCABULARY, len(zeros) - length)])

    def run(row):
        return last_logits(row, np.array(length - 1), fused.params, heads=tiny.HEADS,
                           residuals=True)

    (one, kept), (two, kept_two) = run(zeros), run(noise)
    np.testing.assert_array_equal(one, two)
    for a, b in zip(kept, kept_two):
        np.testing.assert_array_equal(a[:length], b[:length])


@pytest.mark.parametrize(("length", "room"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (17, 24),
                                              (24, 24)])
def test_padded(length, room):
    row = padded(np.arange(1, length + 1), 24)
    assert row.tolist() == [*range(1, length + 1), *[0] * (room - length)]


def test_one_program_for_each_power_of_two(fused):
    last_logits.cache_clear()
    for length in range(1, 9):
        fused([7] * length)
    assert len(last_logits.cache) == 4  # 1, 2, 4 and 8 tokens


# ---------------------------------------------------------------- somebody else's GPT-2

@dataclass
class Scale:
    g: np.ndarray
    b: np.ndarray


@dataclass
class Map:
    w: np.ndarray
    b: np.ndarray


@dataclass
class Layer:
    ln_1: Scale
    ln_2: Scale
    c_attn: Map
    mix: Map
    c_fc: Map
    c_proj: Map


@dataclass
class Everything:
    wte: np.ndarray
    wpe: np.ndarray
    blocks: list[Layer]
    ln_f: Scale


def gpt2(inputs: list[int], params: Everything, n_head: int) -> np.ndarray:
    """GPT-2 as a user might write it: one function, dataclasses, a list of blocks."""
    x = params.wte[inputs] + params.wpe[range(len(inputs))]
    n, width = x.shape[0], x.shape[-1]
    size = width // n_head
    for layer in params.blocks:
        centre = np.mean(x, axis=-1, keepdims=True)
        spread = np.var(x, axis=-1, keepdims=True)
        normed = layer.ln_1.g * ((x - centre) / np.sqrt(spread + 1e-5)) + layer.ln_1.b
        q, k, v = np.split(normed @ layer.c_attn.w + layer.c_attn.b, 3, axis=-1)
        q = q.reshape(n, n_head, size).transpose(1, 0, 2)
        k = k.reshape(n, n_head, size).transpose(1, 0, 2)
        v = v.reshape(n, n_head, size).transpose(1, 0, 2)
        later = np.triu(np.ones((n, n), dtype=x.dtype) * -np.inf, k=1)
        scores = (q @ k.transpose(0, 2, 1)) / np.sqrt(size) + later
        odds = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        odds = odds / np.sum(odds, axis=-1, keepdims=True)
        mixed = (odds @ v).transpose(1, 0, 2).reshape(n, width)
        x = x + (mixed @ layer.mix.w + layer.mix.b)
        centre = np.mean(x, axis=-1, keepdims=True)
        spread = np.var(x, axis=-1, keepdims=True)
        normed = layer.ln_2.g * ((x - centre) / np.sqrt(spread + 1e-5)) + layer.ln_2.b
        up = normed @ layer.c_fc.w + layer.c_fc.b
        bent = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = x + (bent @ layer.c_proj.w + layer.c_proj.b)
    centre = np.mean(x, axis=-1, keepdims=True)
    spread = np.var(x, axis=-1, keepdims=True)
    last = params.ln_f.g * ((x - centre) / np.sqrt(spread + 1e-5)) + params.ln_f.b
    return last @ params.wte.T


def everything(blocks):
    """Weights of so many blocks in the dataclasses of that function."""
    dice = np.random.default_rng(0)

    def w(*shape):
        return dice.normal(0, 0.3, shape).astype(np.float32)

    def layer():
        return Layer(Scale(w(32), w(32)), Scale(w(32), w(32)), Map(w(32, 96), w(96)),
                     Map(w(32, 32), w(32)), Map(w(32, 128), w(128)), Map(w(128, 32), w(32)))

    return Everything(w(97, 32), w(16, 32), [layer() for _ in range(blocks)],
                      Scale(w(32), w(32)))


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("kind", [list, np.array], ids=["list", "array"])
def test_the_single_function(kind, blocks):
    ids, params = [3, 1, 4, 1, 5, 9], everything(blocks)
    want, got = gpt2(ids, params, 4), jit(gpt2)(kind(ids), params, n_head=4)
    assert (got.dtype, got.shape) == (want.dtype, want.shape) == (np.float64, (6, 97))
    np.testing.assert_allclose(got, want, rtol=3e-4, atol=3e-4)


def test_its_blocks_are_calls():
    graph = jit(gpt2).compile(np.arange(6), everything(5), n_head=4).graph
    assert sum(node.op is Op.CALL for node in graph.nodes) >= 3


def test_an_array_of_ids_is_an_argument_a_list_is_not():
    quick, params = jit(gpt2), everything(2)
    for first in range(3):
        quick(np.array([first, 1]), params, n_head=4)
    assert len(quick.cache) == 1
    for first in range(3):
        quick([first, 1], params, n_head=4)
    assert len(quick.cache) == 4


def test_it_agrees_with_the_model(fused):
    """The same weights in both layouts."""
    p = fused.params
    params = Everything(p.words, p.positions, [
        Layer(Scale(*b.norm_1), Scale(*b.norm_2), Map(*b.qkv), Map(*b.out), Map(*b.up),
              Map(*b.down)) for b in p.blocks], Scale(*p.norm))
    ids = np.array([5, 17, 200, 3, 3, 256])
    logits = jit(gpt2)(ids, params, n_head=tiny.HEADS)[-1:]
    np.testing.assert_allclose(logits, fused(ids), rtol=3e-4, atol=3e-4)
