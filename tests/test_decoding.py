"""From logits to text, in every mode: the expected tokens are NumPy's or the tokenizer's."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tinymlir import errors, generate, jit, load_model, ops
from tinymlir.cli import main
from tinymlir.model import encode, generate_ids, greedy, iterate_ids, sampler, stream
from tinymlir.reference import forward

ROOT = Path(__file__).parents[1]
MODES = {"sublayers": {}, "fused": {"fused": True}}
FLAGS = {"sublayers": [], "fused": ["--fused"]}
PROMPT = [5, 17, 200]


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture
def changed(tmp_path):
    """A checkpoint with other weights or another configuration, loaded in a mode."""
    def make(mode, tensors=None, **config):
        place = tiny.write_checkpoint(tmp_path / "checkpoint")
        tiny.write_weights(place, **(tensors or {}))
        tiny.write_config(place, **config)
        return load_model(place, **MODES[mode])
    return make


def by_numpy(model, ids, tokens, pick=greedy):
    """New ids by the plain forward pass."""
    ids, new = list(ids), []
    for _ in range(tokens):
        new.append(pick(forward(np.array(ids), model.params, model.config.heads)[-1]))
        ids.append(new[-1])
    return new


# ---------------------------------------------------------------- which token

@pytest.mark.parametrize("length", [1, 2, 3, 8, 9])
def test_greedy_is_numpys(folder, mode, length):
    model, _ = load_model(folder, **MODES[mode])
    ids = np.random.default_rng(length).integers(0, tiny.VOCABULARY, length).tolist()
    assert generate_ids(model, ids, 3) == by_numpy(model, ids, 3)


TWINS = pytest.mark.parametrize(
    "twins", [(3, 130), (255, 256), (0, 256), (7, 8, 9, 128, 200, 256)])


@TWINS
def test_ties_take_the_lowest(changed, mode, twins):
    """Small integers, whose sums are exact: NumPy agrees."""
    dice = np.random.default_rng(1)
    bias = dice.integers(1, 9, tiny.WIDTH).astype(np.float32)
    words = dice.integers(-2, 3, (tiny.VOCABULARY, tiny.WIDTH)).astype(np.float32)
    words[list(twins)] = 5
    model, _ = changed(mode, {"wte.weight": words, "ln_f.bias": bias,
                              "ln_f.weight": np.zeros(tiny.WIDTH, np.float32)})
    np.testing.assert_array_equal(model(PROMPT), (bias @ words.T)[None])
    assert generate_ids(model, PROMPT, 3) == [min(twins)] * 3 == by_numpy(model, PROMPT, 3)
    assert list(iterate_ids(model, PROMPT, 3, pick=sampler(2.0, 1, 7))) == [min(twins)] * 3


@TWINS
def test_ties_of_rounded_sums(changed, mode, twins):
    """Equal rows score equally to the last bit, wherever they lie. Here a BLAS may differ:
    some sum the last columns of a product in another order than the others."""
    tensors = tiny.make_tensors()
    words, bias = tensors["wte.weight"], 10 * tensors["ln_f.bias"]
    words[list(twins)] = bias
    model, _ = changed(mode, {"wte.weight": words, "ln_f.bias": bias})
    ids = list(PROMPT)
    for _ in range(4):
        scores = model(ids)[0]
        assert len({float(scores[i]) for i in twins}) == 1
        ids.append(greedy(scores))
    assert ids == PROMPT + [min(twins)] * 4 == PROMPT + generate_ids(model, PROMPT, 4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("width", "vocabulary"), [
    (1, 1), (7, 13), (32, 257), (48, 1003), (192, 4096), (100, 4099), (768, 2051)])
def test_equal_rows_score_equally(width, vocabulary, dtype):
    """One row again and again: as many equal scores, in each tile and each remainder."""
    dice = np.random.default_rng(width)
    row = dice.normal(size=width).astype(np.float32)
    x = dice.normal(size=(1, width)).astype(dtype)
    words = np.tile(row, (vocabulary, 1))
    gain, bias = dice.normal(size=(2, width)).astype(np.float32)
    scores = jit(ops.logits)(x, gain, bias, words)
    want = ops.logits(x, gain, bias, words)
    assert scores.dtype == want.dtype and len(set(scores[0].tolist())) == 1
    np.testing.assert_allclose(scores, want, rtol=1e-4, atol=1e-4)


def test_all_equal(changed, mode):
    width = np.zeros(tiny.WIDTH, np.float32)
    model, _ = changed(mode, {"ln_f.weight": width, "ln_f.bias": width})
    assert generate_ids(model, PROMPT, 2) == [0, 0]


BROKEN = {
    "last norm": ("ln_f.bias", np.s_[3], np.nan),
    "a word that is not used": ("wte.weight", np.s_[99, 0], np.nan),
    "a word that is used": ("wte.weight", np.s_[17, 0], np.nan),
    "an infinite word": ("wte.weight", np.s_[99, 0], np.inf),
    "a position": ("wpe.weight", np.s_[0, 0], np.nan),
    "a projection": ("h.1.attn.c_attn.weight", np.s_[4, 5], np.nan),
    "an infinite projection": ("h.0.mlp.c_proj.weight", np.s_[4, 5], np.inf),
    "all": ("h.0.ln_1.weight", np.s_[:], np.nan),
}


@pytest.mark.parametrize("case", BROKEN)
def test_weights_that_are_no_numbers(changed, mode, case):
    name, place, value = BROKEN[case]
    tensors = tiny.make_tensors()
    tensors[name][place] = value
    model, tokenizer = changed(mode, {name: tensors[name]})
    for pick in (greedy, sampler(1.0)):
        with pytest.raises(errors.GenerationError, match="3 tokens hold NaN or infinity"):
            list(iterate_ids(model, PROMPT, 2, pick=pick))
    with pytest.raises(errors.GenerationError, match="NaN"):
        generate(model, tokenizer, "abc", 1)


def test_no_numbers_on_the_command_line(tmp_path, mode, capsys):
    place = tiny.write_checkpoint(tmp_path / "checkpoint")
    tiny.write_weights(place, **{"ln_f.bias": np.full(tiny.WIDTH, np.nan, np.float32)})
    assert main(["generate", "abc", "--model", str(place), *FLAGS[mode]]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 2
    assert err.splitlines()[1].startswith("error: the logits after 3 tokens hold NaN")


# ---------------------------------------------------------------- padding

def with_padding(size, fill):
    """Rows that would win or lose by far, and some that are no numbers."""
    rows = np.full((size - tiny.VOCABULARY, tiny.WIDTH), fill, np.float32)
    rows[1::2] *= -1
    return np.concatenate([tiny.make_tensors()["wte.weight"], rows])


@pytest.mark.parametrize(("size", "fill"), [(258, 50.0), (320, 50.0), (1024, 50.0),
                                            (264, np.nan), (264, 0.0)])
def test_padding_is_never_chosen(folder, changed, mode, size, fill):
    want, _ = load_model(folder, **MODES[mode])
    words = with_padding(size, fill)
    model, tokenizer = changed(mode, {"wte.weight": words}, vocab_size=size)
    assert model(PROMPT).shape == (1, tiny.VOCABULARY)
    np.testing.assert_array_equal(model(PROMPT), want(PROMPT))
    assert generate_ids(model, PROMPT, 5) == generate_ids(want, PROMPT, 5)
    hot = [list(iterate_ids(m, PROMPT, 12, pick=sampler(50.0, seed=3))) for m in (model, want)]
    assert hot[0] == hot[1] and max(hot[0]) < tiny.VOCABULARY
    with pytest.raises(errors.OutOfRangeError, match="257"):
        model([257])


# ---------------------------------------------------------------- dice

def test_top_1_is_greedy(folder, mode):
    model, _ = load_model(folder, **MODES[mode])
    want = generate_ids(model, PROMPT, 6)
    for temperature in (1e-320, 1e-300, 1e-9, 1.0, 1e300):
        pick = sampler(temperature, top_k=1, seed=5)
        assert list(iterate_ids(model, PROMPT, 6, pick=pick)) == want


@pytest.mark.parametrize("temperature", [1e-320, 5e-324, 1e-300, 1e-9, np.float32(1e-9)])
def test_the_coldest_dice_are_greedy(temperature):
    scores = np.array([-1e300, 5, 7, 7 - 1e-6, 1e-320, -3])
    pick = sampler(temperature)
    assert {pick(scores) for _ in range(50)} == {2}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_hottest_dice_are_even(dtype):
    pick = sampler(1e308, seed=1)
    counts = np.bincount([pick(np.arange(4, dtype=dtype)) for _ in range(8000)], minlength=4)
    np.testing.assert_allclose(counts / 8000, 0.25, atol=0.03)


def test_dice_follow_the_softmax(folder):
    """20,000 throws of one row, against the odds that NumPy computes."""
    model, _ = load_model(folder)
    scores = model(PROMPT)[0] / 4
    odds = np.exp(scores - scores.max())
    odds /= odds.sum()
    pick = sampler(seed=11)
    counts = np.bincount([pick(scores) for _ in range(20_000)], minlength=len(odds))
    assert np.abs(counts / 20_000 - odds).max() < 0.015
    assert not counts[odds < 1e-9].any()


def test_seeds_reproduce(folder):
    """The same in each mode, too: their logits differ by rounding alone."""
    runs = {}
    for mode, options in MODES.items():
        model, _ = load_model(folder, **options)
        for seed in (0, 0, 1, 2**70):
            new = list(iterate_ids(model, PROMPT, 10, pick=sampler(1.3, 40, seed)))
            assert runs.setdefault(seed, new) == new, mode
    assert len({tuple(new) for new in runs.values()}) == len(runs)


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"temperature": None}, {"seed": 1.0},
                                 {"temperature": 1j}, {"top_k": 2.0}, {"top_k": "3"},
                                 {"top_k": True}, {"seed": None}, {"seed": "0"},
                                 {"temperature": True}])
def test_dice_of_other_types(bad):
    (name, value), = bad.items()
    with pytest.raises(errors.ArgumentError, match=f"{name}: expected .* got {value!r}"):
        sampler(**bad)


# ---------------------------------------------------------------- length

def test_the_full_context(folder, mode):
    model, tokenizer = load_model(folder, **MODES[mode])
    room = tiny.CONTEXT - len(PROMPT)
    assert generate_ids(model, PROMPT, room) == by_numpy(model, PROMPT, room)
    full = [1] * tiny.CONTEXT
    assert generate_ids(model, full, 0) == [] and model(full).shape == (1, tiny.VOCABULARY)
    for ids, tokens in ((PROMPT, room + 1), (full, 1), ([*full, 1], 0)):
        with pytest.raises(errors.GenerationError, match=f"do not fit.*{tiny.CONTEXT}"):
            generate_ids(model, ids, tokens)
    with pytest.raises(errors.GenerationError, match="25 tokens and 1 new"):
        generate(model, tokenizer, "x" * 25, 1)


def test_no_token(folder, mode, capsys):
    for words in ([], ["--stop"], ["--temperature", "1"]):
        assert main(["generate", "abc", "--tokens", "0", "--model", str(folder),
                     *FLAGS[mode], *words]) == 0
        assert capsys.readouterr().out == "\n"


def test_stop(folder, mode, tmp_path, capsys):
    """The token that ends a text is the third that the model chooses."""
    model, tokenizer = load_model(folder)
    new = by_numpy(model, PROMPT, 6)
    end = next(token for token in new if token != new[0])
    place = new.index(end)
    other = tiny.write_checkpoint(tmp_path / "checkpoint")
    tiny.write_config(other, eos_token_id=end)
    model, _ = load_model(other, **MODES[mode])
    assert generate_ids(model, PROMPT, 6, stop=True) == new[:place]
    assert generate_ids(model, PROMPT, 6) == new
    prompt = tokenizer.decode([70, 71])
    ids = by_numpy(model, [70, 71], 8)
    ids = ids[:ids.index(end)] if end in ids else ids
    assert main(["generate", prompt, "--tokens", "8", "--stop", "--model", str(other),
                 *FLAGS[mode]]) == 0
    want = tokenizer.decode(ids, skip_special_tokens=False)
    assert capsys.readouterr().out == want + "\n"


# ---------------------------------------------------------------- text

TEXTS = ["a\tb", "a\nb\r\n\n", "  two  spaces  ", " ", "\t", "\n", "\x00", "\x1b[31mred\x1b[0m",
         "".join(map(chr, range(32))), "\x7f\x80\x9f\xa0", "é ü 本 \U0001f642", "\ufeffbom",
         "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪", "e\u0301 \u202e \u2028 \ufffd", "\U0010ffff\ue000",
         "<|endoftext|>", "a<|endoftext|>b <|endoftext|>", "<|endof", "|endoftext|>", "Ġ Ċ"]


@pytest.fixture(scope="session", params=["bytes", "merges"])
def tokenizer(request):
    """The small one, and one that learned to cut in the middle of characters."""
    if request.param == "bytes":
        return tiny.make_tokenizer()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    dice = np.random.default_rng(0)
    letters = list("ab é本語🙂🙃ü\n")
    made.train_from_iterator(
        ["".join(dice.choice(letters, 40)) for _ in range(300)],
        trainers.BpeTrainer(vocab_size=600, special_tokens=["<|endoftext|>"],
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                            show_progress=False))
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer, text):
    ids = encode(tokenizer, text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    pieces = list(stream(tokenizer, ids))
    assert "".join(pieces) == text and all(pieces)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_are_what_decode_makes(tokenizer, data):
    """Of any ids: with halves of characters, bytes that fit nowhere, ends of text."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(stream(tokenizer, ids)) == whole
    assert "".join(stream(tokenizer, iter(ids))) == whole


def test_half_a_character_at_the_end(tokenizer):
    ids = encode(tokenizer, "a🙂")
    for n in range(len(ids) + 1):
        whole = tokenizer.decode(ids[:n], skip_special_tokens=False)
        assert "".join(stream(tokenizer, ids[:n])) == whole


def test_end_of_text_in_a_prompt_is_the_token(folder, mode, capsys):
    model, tokenizer = load_model(folder, **MODES[mode])
    assert encode(tokenizer, "<|endoftext|>") == [tiny.END]
    letters = {c: encode(tokenizer, c)[0] for c in "ab"}
    assert encode(tokenizer, "a<|endoftext|>b") == [letters["a"], tiny.END, letters["b"]]
    assert len(encode(tokenizer, "<|endoftext|")) == 12
    assert main(["generate", "<|endoftext|>", "--tokens", "4", "--model", str(folder),
                 *FLAGS[mode]]) == 0
    want = tokenizer.decode(by_numpy(model, [tiny.END], 4), skip_special_tokens=False)
    assert capsys.readouterr().out == want + "\n"


def test_help_says_what_end_of_text_is(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "<|endoftext|>" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["a\tb\n\x01", " ", "🙂\x7f", "\x1b[2J"])
def test_prompts_from_the_command_line(folder, mode, text, capsys):
    model, tokenizer = load_model(folder)
    assert main(["generate", text, "--tokens", "3", "--model", str(folder), *FLAGS[mode]]) == 0
    ids = by_numpy(model, tokenizer.encode(text).ids, 3)
    want = tokenizer.decode(ids, skip_special_tokens=False)
    assert capsys.readouterr().out == want + "\n"


# ---------------------------------------------------------------- what reaches the terminal

def run(folder, *options, **variables):
    path = os.pathsep.join([str(ROOT / "src"), *sys.path])
    return subprocess.run(
        [sys.executable, *options, "-m", "tinymlir", "generate", "abc", "--tokens", "2",
         "--model", str(folder)], capture_output=True, encoding="utf-8", timeout=120,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **variables})


def expected(folder):
    model, tokenizer = load_model(folder)
    ids = by_numpy(model, tokenizer.encode("abc").ids, 2)
    return tokenizer.decode(ids, skip_special_tokens=False) + "\n"


def test_no_output_for_developers(folder, tmp_path):
    done = run(folder, "-X", "dev", "-W", "error", TINYMLIR_CACHE=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, expected(folder)), done.stderr
    assert done.stderr == f"model: {folder}\n"


def test_a_warning_is_one_line(folder, tmp_path):
    (tmp_path / "file").touch()
    cache = {"TINYMLIR_CACHE": str(tmp_path / "file" / "cache")}
    done = run(folder, **cache)
    first, *others = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (0, expected(folder))
    assert others and all(line.startswith("warning: compiled code is not kept")
                          for line in others), done.stderr
    assert len(others) == len(set(others))
    done = run(folder, "-W", "error", **cache)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("error: compiled code is not kept")
    assert "Traceback" not in done.stderr


def test_warnings_are_as_before_after_a_command(folder, capsys):
    import warnings
    before = warnings.showwarning
    main(["generate", "abc", "--tokens", "0", "--model", str(folder)])
    assert warnings.showwarning is before
