"""What the loader accepts, and the one line that everything else gets."""
import json
import shutil

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tinymlir.checkpoint import BUNDLED, FILES, default_directory, read_checkpoint
from tinymlir.cli import main
from tinymlir.errors import CheckpointError

WEIGHTS = "model.safetensors"
SCRAP = np.zeros((3, 3), np.float32)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture
def folder(pristine, tmp_path_factory):
    """A copy to damage; its name has none of the words that messages must have."""
    return shutil.copytree(pristine, tmp_path_factory.mktemp("x") / "y")


def config(**changes):
    return lambda folder: tiny.write_config(folder, **changes)


def weights(**changes):
    """Keywords with two underscores in place of each dot."""
    return lambda folder: tiny.write_weights(
        folder, **{name.replace("__", "."): value for name, value in changes.items()})


def holds(name, data):
    """The file has these contents."""
    return lambda folder: (folder / name).write_bytes(data)


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def without(name):
    return lambda folder: (folder / name).unlink()


def replaced_by_folder(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def other_vocabulary(folder):
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save(str(folder / "tokenizer.json"))


def pickled(folder):
    import pickle
    (folder / WEIGHTS).write_bytes(pickle.dumps(tiny.make_tensors()))


def doubled(folder):
    tensors = tiny.make_tensors()
    tiny.write_weights(folder, **{"transformer.wte.weight": tensors["wte.weight"]})


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 548105171\n"
HTML = b"<!DOCTYPE html>\n<html><body>Not found</body></html>"

# what is wrong -> how to make it wrong, and words that the message must have
BAD = {
    # files
    **{f"no {name}": (without(name), [name, "nothing"]) for name in FILES},
    **{f"empty {name}": (holds(name, b""), [name, "empty"]) for name in FILES},
    **{f"{name} is a pointer": (holds(name, LFS), [name, "Git LFS"]) for name in FILES},
    **{f"{name} is a page": (holds(name, HTML), [name, "web page"]) for name in FILES},
    **{f"{name} is cut": (cut(name, 99), [name]) for name in FILES},
    "weights in a folder": (replaced_by_folder, [WEIGHTS, "a folder"]),
    "weights cut by a byte": (lambda f: cut(WEIGHTS, (f / WEIGHTS).stat().st_size - 1)(f),
                              [WEIGHTS, "bytes"]),
    "four bytes of weights": (cut(WEIGHTS, 4), [WEIGHTS, "4 bytes"]),
    "a pickle": (pickled, [WEIGHTS, "safetensors"]),
    "noise": (holds(WEIGHTS, bytes(range(256)) * 9), [WEIGHTS]),
    "config is no JSON": (holds("config.json", b"{n_layer: 2}"), ["config.json", "JSON"]),
    "config is no text": (holds("config.json", b"\xff\xfe\xfa"), ["config.json", "JSON"]),
    "config is a list": (holds("config.json", b"[1, 2]"), ["config.json", "list"]),
    "config is deep": (holds("config.json", b"[" * 100_000), ["config.json", "JSON"]),
    "tokenizer is no tokenizer": (holds("tokenizer.json", b"{}"), ["tokenizer.json"]),
    "another vocabulary": (other_vocabulary, ["tokenizer.json", "257", "258"]),
    # sizes
    **{f"no {key}": (config(**{key: None}), ["config.json", key, "None"])
       for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")},
    **{f"n_layer is {value!r}": (config(n_layer=value), ["n_layer", repr(value)])
       for value in (0, -2, 2.0, "2", True, [2])},
    "width does not divide": (config(n_head=5), ["n_embd", "5", "32"]),
    "end is no token": (config(eos_token_id=257), ["eos_token_id", "257"]),
    "end is a list": (config(eos_token_id=[0]), ["eos_token_id", "[0]"]),
    # switches
    "another model": (config(model_type="bert"), ["model_type", "gpt2", "bert"]),
    "exact gelu": (config(activation_function="gelu"), ["activation_function", "gelu_new"]),
    "no activation": (holds("config.json", json.dumps(
        {**tiny.CONFIG, "activation_function": None}).encode()), ["activation_function"]),
    "another epsilon": (config(layer_norm_epsilon=1e-6), ["layer_norm_epsilon", "1e-06"]),
    "unscaled scores": (config(scale_attn_weights=False), ["scale_attn_weights", "False"]),
    "scores by layer": (config(scale_attn_by_inverse_layer_idx=True),
                        ["scale_attn_by_inverse_layer_idx", "True"]),
    "upcast": (config(reorder_and_upcast_attn=True), ["reorder_and_upcast_attn"]),
    "cross attention": (config(add_cross_attention=True), ["add_cross_attention"]),
    "untied": (config(tie_word_embeddings=False), ["tie_word_embeddings"]),
    "another inner width": (config(n_inner=64), ["n_inner", "128", "64"]),
    "pruned": (config(pruned_heads={"0": [1]}), ["pruned_heads"]),
    "quantized": (config(quantization_config={"bits": 4}), ["quantization_config"]),
    "half precision": (config(torch_dtype="float16"), ["torch_dtype", "float16"]),
    # tensors
    "one tensor missing": (weights(h__1__mlp__c_fc__bias=None),
                           [WEIGHTS, "h.1.mlp.c_fc.bias", "(128,)", "no such tensor"]),
    "one block missing": (config(n_layer=3), [WEIGHTS, "h.2."]),
    "one block too many": (config(n_layer=1), [WEIGHTS, "h.1."]),
    "many blocks missing": (config(n_layer=10**9), [WEIGHTS, "h.2."]),
    "unknown tensor": (weights(score__weight=SCRAP), [WEIGHTS, "score.weight"]),
    "wrong shape": (weights(h__0__attn__c_proj__weight=SCRAP),
                    ["h.0.attn.c_proj.weight", "(32, 32)", "(3, 3)"]),
    "wrong vocabulary": (config(vocab_size=300), ["wte.weight", "(300, 32)", "(257, 32)"]),
    "float64": (weights(ln_f__bias=np.zeros(32)), ["ln_f.bias", "float32", "F64"]),
    "float16": (weights(ln_f__bias=np.zeros(32, np.float16)), ["ln_f.bias", "F16"]),
    "integers": (weights(ln_f__bias=np.zeros(32, np.int32)), ["ln_f.bias", "I32"]),
    "untied head": (weights(lm_head__weight=np.zeros((257, 32), np.float32)),
                    ["lm_head.weight", "wte.weight"]),
    "two of a name": (doubled, ["wte.weight", "two"]),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_by_name(folder, case):
    damage, words = BAD[case]
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    line = str(caught.value)
    assert line.startswith(str(folder)) and "\n" not in line
    assert all(word in line for word in [*words, "expected", "got", ";"]), line


@pytest.mark.parametrize("case", BAD)
def test_refused_on_the_command_line(folder, case, capsys):
    BAD[case][0](folder)
    assert main(["generate", "abc", "--model", str(folder)]) == 1
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == "" and first == f"model: {folder}"
    assert second.startswith(f"error: {folder}")


def test_missing_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere.config\.json.*nothing"):
        read_checkpoint(tmp_path / "nowhere")


def test_tensors_arrive(folder):
    found, params, tokenizer = read_checkpoint(str(folder))
    assert (found.blocks, found.width, found.heads) == (tiny.BLOCKS, tiny.WIDTH, tiny.HEADS)
    assert (found.context, found.vocabulary, found.end) == (tiny.CONTEXT, tiny.VOCABULARY, 0)
    want = tiny.make_tensors()
    np.testing.assert_array_equal(params.words, want["wte.weight"])
    np.testing.assert_array_equal(params.positions, want["wpe.weight"])
    np.testing.assert_array_equal(params.norm.gain, want["ln_f.weight"])
    for i, block in enumerate(params.blocks):
        for ours, name in zip(block, ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2",
                                      "mlp.c_fc", "mlp.c_proj"), strict=True):
            np.testing.assert_array_equal(ours[0], want[f"h.{i}.{name}.weight"])
            np.testing.assert_array_equal(ours[1], want[f"h.{i}.{name}.bias"])
    assert tokenizer.decode(tokenizer.encode("Grüße!").ids) == "Grüße!"


def leaves(params):
    yield from (params.words, params.positions, *params.norm)
    for block in params.blocks:
        for pair in block:
            yield from pair


def test_weights_are_mapped_not_copied(folder):
    params = read_checkpoint(folder).params
    data = params.words.base
    while data.base is not None and not isinstance(data, np.memmap):
        data = data.base
    assert isinstance(data, np.memmap)
    for array in leaves(params):
        assert type(array) is np.ndarray and array.dtype == np.float32
        assert np.shares_memory(array, data) and not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        params.words[0, 0] = 1


def test_odd_offsets_are_read(folder):
    """The format does not promise that numbers lie at multiples of four."""
    path = folder / WEIGHTS
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8:8 + length] + b" "
                     + data[8 + length:])
    want = tiny.make_tensors()
    params = read_checkpoint(folder).params
    np.testing.assert_array_equal(params.words, want["wte.weight"])
    np.testing.assert_array_equal(params.blocks[1].down.weight, want["h.1.mlp.c_proj.weight"])
    assert params.words.flags.aligned


def test_prefix_masks_and_tied_head(folder):
    tensors = {f"transformer.{name}": value for name, value in tiny.make_tensors().items()}
    changes = {name: None for name in tiny.make_tensors()}
    mask = np.ones((1, 1, tiny.CONTEXT, tiny.CONTEXT), np.float32)
    tiny.write_weights(folder, **changes, **tensors, **{
        "transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": SCRAP,
        "lm_head.weight": tensors["transformer.wte.weight"]})
    params = read_checkpoint(folder).params
    np.testing.assert_array_equal(params.words, tensors["transformer.wte.weight"])


def test_bare_masks_are_skipped(folder):
    weights(h__0__attn__bias=SCRAP, h__1__attn__masked_bias=SCRAP)(folder)
    assert len(read_checkpoint(folder).params.blocks) == tiny.BLOCKS


@pytest.mark.parametrize("changes", [
    {"n_inner": 128}, {"torch_dtype": "float32"}, {"dtype": "float32"}, {"pruned_heads": {}},
    {"scale_attn_weights": True}, {"eos_token_id": None}, {"summary_type": "cls_index"},
    {"activation_function": None}, {"layer_norm_epsilon": None}, {"attn_pdrop": 0.1}])
def test_harmless_keys(folder, changes):
    tiny.write_config(folder, **changes)
    assert read_checkpoint(folder).config.width == tiny.WIDTH


def test_tokenizer_neither_cuts_nor_pads(folder):
    tokenizer = tiny.make_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    encode = read_checkpoint(folder).tokenizer.encode
    assert len(encode("abcdefgh").ids) == 8 and len(encode("ab").ids) == 2


def test_default_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_directory() == BUNDLED
    tiny.write_checkpoint(tmp_path / "model")
    assert default_directory().resolve() == tmp_path / "model"
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert default_directory() == BUNDLED


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_never_surprises(pristine, tmp_path_factory, data):
    """Whatever bytes of the index change, the loader works or raises its own error."""
    raw = bytearray((pristine / WEIGHTS).read_bytes())
    length = int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 8 + length - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damage")
    for name in FILES:
        shutil.copy(pristine / name, folder)
    (folder / WEIGHTS).write_bytes(raw[:data.draw(st.integers(len(raw) - 99, len(raw)))])
    try:
        read_checkpoint(folder)
    except CheckpointError as error:
        assert str(error).startswith(str(folder))
    finally:
        shutil.rmtree(folder)
