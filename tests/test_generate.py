"""The model against a second forward pass, and what becomes of its logits."""
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tinymlir import errors, generate, load_model
from tinymlir.checkpoint import BUNDLED
from tinymlir.model import (
    COMPILED,
    PLAIN,
    Model,
    encode,
    generate_ids,
    greedy,
    iterate_ids,
    sampler,
    stream,
)
from tinymlir.reference import forward

PROMPT = [5, 17, 200, 3, 3, 256]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def loaded(folder):
    return load_model(folder)


@pytest.fixture(scope="session")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="session")
def tokenizer(loaded):
    return loaded[1]


# ---------------------------------------------------------------- a second forward pass

def norm(t, name, x):
    """Of one row, in plain Python but for the dot products."""
    mean = x.sum() / len(x)
    spread = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / math.sqrt(spread + 1e-5) * t[f"{name}.weight"] + t[f"{name}.bias"]


def project(t, name, x):
    return x @ t[f"{name}.weight"].astype(float) + t[f"{name}.bias"]


def attend(t, i, rows):
    """Row by row and head by head: no mask, no batch, no transpose."""
    size = tiny.WIDTH // tiny.HEADS
    rows = [project(t, f"h.{i}.attn.c_attn", norm(t, f"h.{i}.ln_1", x)) for x in rows]
    out = []
    for n in range(len(rows)):
        merged = []
        for h in range(tiny.HEADS):
            q, k, v = (slice(part * tiny.WIDTH + h * size, part * tiny.WIDTH + (h + 1) * size)
                       for part in range(3))
            scores = [rows[n][q] @ rows[m][k] / math.sqrt(size) for m in range(n + 1)]
            powers = [math.exp(score) for score in scores]
            merged.append(sum(p * rows[m][v] for m, p in enumerate(powers)) / sum(powers))
        out.append(project(t, f"h.{i}.attn.c_proj", np.concatenate(merged)))
    return np.array(out)


def feed(t, i, rows):
    up = [project(t, f"h.{i}.mlp.c_fc", norm(t, f"h.{i}.ln_2", x)) for x in rows]
    bent = [[v / 2 * (1 + math.tanh(0.7978845608 * (v + 0.044715 * v * v * v))) for v in row]
            for row in up]
    return np.array([project(t, f"h.{i}.mlp.c_proj", np.array(row)) for row in bent])


def reference(ids, t):
    """Name -> residual, all in float64."""
    x = np.array([t["wte.weight"][token].astype(float) + t["wpe.weight"][n]
                  for n, token in enumerate(ids)])
    found = {"embedding": x}
    for i in range(tiny.BLOCKS):
        found[f"block {i} attention"] = x = x + attend(t, i, x)
        found[f"block {i} feed-forward"] = x = x + feed(t, i, x)
    found["logits"] = (t["wte.weight"].astype(float) @ norm(t, "ln_f", x[-1]))[None]
    return found


@pytest.mark.parametrize("length", [1, 2, 7, tiny.CONTEXT])
@pytest.mark.parametrize("run", [COMPILED, PLAIN], ids=["compiled", "plain"])
def test_every_residual(model, run, length):
    ids = np.random.default_rng(length).integers(0, tiny.VOCABULARY, length)
    want = reference(ids, tiny.make_tensors())
    trace = {}
    logits = replace(model, run=run)(ids, trace)
    assert list(trace) == list(want) and trace["logits"] is logits
    assert logits.shape == (1, tiny.VOCABULARY)
    for name in want:
        assert trace[name].dtype == (np.float32 if name == "embedding" else np.float64), name
        assert trace[name].shape == want[name].shape, name
        np.testing.assert_allclose(trace[name], want[name], rtol=3e-4, atol=3e-4, err_msg=name)


def test_no_trace_is_the_same(model):
    trace = {"kept": 1}
    np.testing.assert_array_equal(model(PROMPT), model(PROMPT, trace=trace))
    assert trace["kept"] == 1 and len(trace) == 3 + 2 * tiny.BLOCKS


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: np.array(x, np.uint16),
                                  lambda x: np.array(x, ">i4"), lambda x: np.array(x)[::1]])
def test_kinds_of_rows(model, kind):
    np.testing.assert_array_equal(model(kind(PROMPT)), model(PROMPT))


@pytest.mark.parametrize(("ids", "error", "words"), [
    ([], errors.GenerationError, "one or more, got none"),
    ([0, 257], errors.OutOfRangeError, "token id 257 at position 1"),
    ([-1], errors.OutOfRangeError, "token id -1 at position 0"),
    ([2**70], TypeError, "integers"),
    (np.array([2**64 - 1], np.uint64), errors.OutOfRangeError, "18446744073709551615"),
    ([1.0], errors.DTypeError, "float64"),
    ([True], errors.DTypeError, "bool"),
    (["a"], errors.DTypeError, "integers"),
    ([[1, 2]], errors.DTypeError, r"\(1, 2\)"),
    (7, errors.DTypeError, "row"),
    ([0] * 25, errors.GenerationError, "25 .* 0 .* 24"),
])
def test_ids_that_are_none(model, ids, error, words):
    with pytest.raises(error, match=words):
        model(ids)
    with pytest.raises(error):
        generate_ids(model, ids, 0)


def test_errors_are_numpys_too():
    assert issubclass(errors.OutOfRangeError, IndexError)
    assert issubclass(errors.GenerationError, ValueError)
    assert issubclass(errors.DTypeError, TypeError)


# ---------------------------------------------------------------- choosing

def fake(*rows, end=None, context=100):
    """A model with these logits, one row a step."""
    config = SimpleNamespace(end=end, context=context, vocabulary=len(rows[0]))
    steps = iter(rows)

    class Fake:
        def __call__(self, ids):
            return np.array([next(steps)], float)

    made = Fake()
    made.config = config
    return made


def test_greedy_matches_the_reference(model):
    ids, tensors = list(PROMPT), tiny.make_tensors()
    for _ in range(4):
        ids.append(int(np.argmax(reference(ids, tensors)["logits"])))
    assert generate_ids(model, PROMPT, 4) == ids[len(PROMPT):]


def test_ties_go_to_the_lowest():
    assert generate_ids(fake([0, 3, 1, 3], [2, 2, 2, 2], [-1, -9, -9, 0]), [0], 3) == [1, 0, 3]


def test_prompt_is_left_alone(model):
    ids = list(PROMPT)
    new = generate_ids(model, ids, 2)
    assert ids == PROMPT and len(new) == 2 and all(type(i) is int for i in new)


def test_the_end_only_stops_if_asked():
    rows = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert generate_ids(fake(*rows, end=2), [0], 3) == [1, 2, 0]
    assert generate_ids(fake(*rows, end=2), [0], 3, stop=True) == [1]
    assert generate_ids(fake(*rows, end=1), [0], 3, stop=True) == []
    with pytest.raises(errors.GenerationError, match="eos_token_id"):
        generate_ids(fake(*rows), [0], 3, stop=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers(bad):
    model = fake([0, 1, 0], [0, bad, 2])
    seen = []
    with pytest.raises(errors.GenerationError, match="2 tokens hold NaN"):
        seen.extend(iterate_ids(model, [0], 5))
    with pytest.raises(errors.GenerationError, match="NaN"):
        generate_ids(fake([bad, 1, 0]), [0], 1)


def test_nan_weights(model):
    norm = model.params.norm._replace(bias=np.full(tiny.WIDTH, np.nan, np.float32))
    broken = replace(model, params=model.params._replace(norm=norm))
    with pytest.raises(errors.GenerationError, match="NaN"):
        generate_ids(broken, PROMPT, 1)


def test_context_names_three_numbers(model):
    room = tiny.CONTEXT - len(PROMPT)
    with pytest.raises(errors.GenerationError) as caught:
        iterate_ids(model, PROMPT, room + 1)  # refused at once, not at the first token
    assert re.findall(r"\d+", str(caught.value)) == ["6", str(room + 1), str(tiny.CONTEXT)]
    assert len(generate_ids(model, PROMPT, room)) == room


@pytest.mark.parametrize(("tokens", "error"), [
    (-1, errors.GenerationError), (1.0, errors.ArgumentError), ("3", errors.ArgumentError),
    (True, errors.ArgumentError), (None, errors.ArgumentError)])
def test_numbers_of_tokens(model, tokens, error):
    with pytest.raises(error, match="tokens"):
        iterate_ids(model, PROMPT, tokens)


def test_no_tokens(model):
    assert generate_ids(model, PROMPT, 0) == []
    assert len(generate_ids(model, PROMPT, np.int64(2))) == 2


# ---------------------------------------------------------------- dice

def test_sampling_can_be_repeated(model):
    runs = [list(iterate_ids(model, PROMPT, 8, pick=sampler(1.5, seed=seed)))
            for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_cold_or_narrow_dice_are_greedy():
    scores = np.random.default_rng(0).normal(size=50)
    for pick in (sampler(top_k=1), sampler(1e-6)):
        assert [pick(scores) for _ in range(20)] == [greedy(scores)] * 20


def test_dice_are_fair():
    odds = np.array([0.5, 0.1, 0.3, 0.1])
    pick = sampler(seed=3)
    counts = np.bincount([pick(np.log(odds)) for _ in range(20_000)], minlength=4) / 20_000
    np.testing.assert_allclose(counts, odds, atol=0.02)
    pick = sampler(temperature=0.5, top_k=2, seed=3)
    counts = np.bincount([pick(np.log(odds)) for _ in range(20_000)], minlength=4) / 20_000
    np.testing.assert_allclose(counts, [25 / 34, 0, 9 / 34, 0], atol=0.02)


def test_equal_scores_keep_the_lowest_ids():
    pick = sampler(top_k=3)
    assert {pick(np.zeros(100)) for _ in range(200)} == {0, 1, 2}


def test_large_logits_do_not_overflow():
    assert sampler(0.1)(np.array([1e6, 2e6], np.float32)) == 1


@pytest.mark.parametrize("bad", [{"temperature": 0}, {"temperature": -1}, {"top_k": 0},
                                 {"temperature": math.nan}, {"temperature": math.inf},
                                 {"seed": -1}])
def test_dice_that_are_none(bad):
    with pytest.raises(errors.GenerationError, match=next(iter(bad))):
        sampler(**bad)


# ---------------------------------------------------------------- text

def test_generate_is_encode_choose_decode(model, tokenizer):
    text = generate(model, tokenizer, "König", 6)
    ids = generate_ids(model, tokenizer.encode("König").ids, 6)
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


def test_the_end_is_shown(tokenizer):
    ends = fake(*np.eye(257)[[0, 70]])
    assert generate(ends, tokenizer, "a", 2) == "<|endoftext|>" + tokenizer.decode([70])


@pytest.mark.parametrize(("prompt", "error", "words"), [
    ("", errors.GenerationError, "empty"),
    ("a\udcffb", errors.GenerationError, "UTF-8"),
    (b"abc", errors.ArgumentError, "bytes"),
    (None, errors.ArgumentError, "NoneType"),
])
def test_prompts_that_are_none(model, tokenizer, prompt, error, words):
    with pytest.raises(error, match=words):
        encode(tokenizer, prompt)
    with pytest.raises(error, match=words):
        generate(model, tokenizer, prompt, 1)


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=1, max_size=30))
def test_streamed_text_is_the_text(tokenizer, text):
    pieces = list(stream(tokenizer, tokenizer.encode(text).ids))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=30))
def test_streamed_bytes_are_what_decode_makes(tokenizer, ids):
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == whole


def test_streaming_does_not_wait(tokenizer):
    seen = []

    def source():
        for i in tokenizer.encode("é!").ids:
            seen.append(i)
            yield i

    pieces = stream(tokenizer, source())
    assert next(pieces) == "é" and len(seen) == 2
    assert next(pieces) == "!" and len(seen) == 3


# ---------------------------------------------------------------- options

@pytest.mark.parametrize("option", [{"fused": 2}, {"cache": 7}, {"dtype": "float16"},
                                    {"dtype": "float64"}, {"target": "tpu"}])
def test_options_that_there_are_not(tmp_path, option):
    (name, value), = option.items()
    with pytest.raises(errors.UnsupportedError, match=f"{name}={value!r} is not supported"):
        load_model(tmp_path, **option)


def test_models_share_the_compiled_functions(model):
    assert Model(model.config, model.params).run is model.run is COMPILED


# ---------------------------------------------------------------- float32

@pytest.fixture(scope="module", params=[False, True], ids=["sublayers", "fused"])
def single(folder, request):
    return load_model(folder, dtype="float32", fused=request.param)[0]


@pytest.mark.parametrize("length", [1, 2, 7, tiny.CONTEXT])
def test_float32_is_numpys(single, length):
    """Against NumPy in float32 within 1e-4, and in its own types within 1e-3."""
    ids = np.random.default_rng(length).integers(0, tiny.VOCABULARY, length)
    trace, kept = {}, []
    single(ids, trace)
    last = forward(ids, single.params, tiny.HEADS, kept, np.float32)[-1:]
    want = reference(ids, tiny.make_tensors())
    assert list(trace) == list(want)
    for (name, ours), theirs in zip(trace.items(), [*kept, last], strict=True):
        assert ours.dtype == theirs.dtype == np.float32, name
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(ours, want[name], rtol=1e-3, atol=1e-3, err_msg=name)


def test_float32_leaves_nothing_wide(single):
    """No float64 in what is compiled, but for the accumulators of sums."""
    single(PROMPT)
    run = single.run if isinstance(single.run, tuple) else [single.run]
    graphs = [c.graph for f in run for c in f.cache.values()]
    assert graphs
    for node in (n for g in graphs for n in g.nodes):
        assert node.dtype != np.float64, node


def test_float32_writes_the_same_text(single):
    bundled = load_model(BUNDLED, dtype="float32", fused=type(single).__name__ != "Model")
    faithful = load_model(BUNDLED)
    prompt = "Once upon a time there was a"
    assert generate(*bundled, prompt, 40) == generate(*faithful, prompt, 40)
