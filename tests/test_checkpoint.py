"""What the loader accepts, and the one line that everything else gets."""
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tinymlir.checkpoint import BUNDLED, FILES, default_directory, read_checkpoint
from tinymlir.cli import main
from tinymlir.errors import CheckpointError
from tinymlir.model import load_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
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


def parts(change=lambda files: None, **places):
    """Two files and an index; `change` edits what is in the files, not the index."""
    def write(folder):
        files = tiny.halves()
        tiny.write_parts(folder, files, **places)
        change(files)
        for name, tensors in files.items():
            save_file(tensors, folder / name)
    return write


def twice_in_parts(files):
    files[SECOND]["wte.weight"] = files[FIRST]["wte.weight"]


def elsewhere(name):
    """The index names a file outside, and there is one."""
    def write(folder):
        parts(**{"h.1.mlp.c_fc.bias": name})(folder)
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        shutil.copy(folder / SECOND, place)
    return write


def part_missing(folder):
    parts()(folder)
    (folder / SECOND).unlink()


def only(name):
    """Weights in another format alone."""
    def write(folder):
        (folder / WEIGHTS).rename(folder / name)
    return write


def bfloat16(folder):
    tiny.write_bfloat16(folder, tiny.make_tensors())


def header(change):
    """Lies in the index of the weights."""
    def write(folder):
        raw = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        new = change(json.loads(raw[8:8 + length]))
        new = (new if isinstance(new, str) else json.dumps(new)).encode()
        (folder / WEIGHTS).write_bytes(
            len(new).to_bytes(8, "little") + new + raw[8 + length:])
    return write


def offsets(name, start, stop):
    def change(head):
        first, last = head[name]["data_offsets"]
        head[name]["data_offsets"] = [first + start, last + stop]
        return head
    return header(change)


def length(value):
    return lambda f: (f / WEIGHTS).write_bytes(
        value.to_bytes(8, "little") + (f / WEIGHTS).read_bytes()[8:])


def link_to_itself(name):
    def write(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)
    return write


def pipe(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def tokenizer(make):
    """Another tokenizer: made anew, or the small one with a change."""
    def write(folder):
        made = tiny.make_tokenizer()
        made = make(made) or made
        made.save(str(folder / "tokenizer.json"))
    return write


def setting(**changes):
    def make(made):
        for name, value in changes.items():
            setattr(made, name, value)
    return tokenizer(make)


def holes(folder):
    """As many tokens as before, but the last of them is number 300."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 300
    path.write_text(json.dumps(data))


def end_in_the_padding(folder):
    padded(folder, 300)
    tiny.write_config(folder, vocab_size=300, eos_token_id=299)


def padded(folder, size, fill=9.0):
    """A longer table of words, whose last rows would win each comparison."""
    words = tiny.make_tensors()["wte.weight"]
    rows = np.full((size - tiny.VOCABULARY, tiny.WIDTH), fill, np.float32)
    rows[1::2] *= -1
    tiny.write_weights(folder, **{"wte.weight": np.concatenate([words, rows])})
    tiny.write_config(folder, vocab_size=size)


def doubled(folder):
    tensors = tiny.make_tensors()
    tiny.write_weights(folder, **{"transformer.wte.weight": tensors["wte.weight"]})


def dropped(made, letter):
    """The tokenizer with a word in place of a letter."""
    data = json.loads(made.to_str())
    data["model"]["vocab"]["word"] = data["model"]["vocab"].pop(letter)
    return Tokenizer.from_str(json.dumps(data))


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
       for key in ("n_layer", "n_embd", "n_head", "vocab_size")},
    "no context": (config(n_positions=None, n_ctx=None), ["n_positions", "None"]),
    "two contexts": (config(n_ctx=12), ["n_ctx", "n_positions = 24", "12"]),
    "a huge width": (config(n_embd=10**4000), ["n_embd", "positive"]),
    "a key comes twice": (holds("config.json", json.dumps(tiny.CONFIG).encode().replace(
        b"{", b'{"n_layer": 3, ')), ["config.json", "n_layer comes twice"]),
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
    "another inner width": (config(n_inner=64),
                            ["h.0.mlp.c_fc.weight", "(32, 64)", "(32, 128)"]),
    "no inner width": (config(n_inner=0), ["n_inner", "positive", "0"]),
    "inner width is text": (config(n_inner="128"), ["n_inner", "'128'"]),
    **{f"{name} activation": (config(activation_function=name),
                              ["activation_function", "gelu_new", name])
       for name in ("relu", "silu", "tanh", "gelu_fast", "gelu_pytorch_tanh")},
    **{f"unknown key {key}": (config(**{key: value}), [key, repr(value), "remove it"])
       for key, value in {"rotary_dim": 64, "alibi": True, "multi_query": True,
                          "scale_embedding": 2.0, "use_rms_norm": True}.items()},
    "an encoder": (config(is_encoder_decoder=True), ["is_encoder_decoder"]),
    "pruned": (config(pruned_heads={"0": [1]}), ["pruned_heads"]),
    "quantized": (config(quantization_config={"bits": 4}), ["quantization_config"]),
    "half precision": (config(torch_dtype="float16"),
                       ["torch_dtype", "float16", "--cast"]),
    "brain precision": (config(dtype="bfloat16"), ["dtype", "bfloat16", "--cast"]),
    "double precision": (config(dtype="float64"), ["dtype", "float64"]),
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
    "float16": (weights(ln_f__bias=np.zeros(32, np.float16)),
                ["ln_f.bias", "F16", "--cast", "cast=True"]),
    "bfloat16": (bfloat16, ["wte.weight", "BF16", "--cast"]),
    "integers": (weights(ln_f__bias=np.zeros(32, np.int32)), ["ln_f.bias", "I32"]),
    "untied head": (weights(lm_head__weight=np.zeros((257, 32), np.float32)),
                    ["lm_head.weight", "wte.weight"]),
    "misshapen head": (weights(lm_head__weight=SCRAP),
                       ["lm_head.weight", "(257, 32)", "(3, 3)"]),
    "head of another type": (weights(lm_head__weight=np.zeros((257, 32), np.float16)),
                             ["lm_head.weight", "F16"]),
    "head with a bias": (weights(lm_head__bias=np.zeros(257, np.float32)),
                         ["lm_head.bias", "GPT-2's tensors"]),
    "two of a name": (doubled, ["wte.weight", "two"]),
    # the index of a file
    "tensors overlap": (offsets("ln_f.bias", -4, -4), [WEIGHTS]),
    "tensor leaves the file": (offsets("wte.weight", 0, 2**40), [WEIGHTS]),
    "negative place": (offsets("wte.weight", -2**40, 0), [WEIGHTS]),
    "gap": (header(lambda h: {k: v for k, v in h.items() if k != "wpe.weight"}), [WEIGHTS]),
    "index is a list": (header(lambda h: []), [WEIGHTS]),
    "index has a name twice": (
        header(lambda h: json.dumps(h)[:-1] + ', "ln_f.bias": '
               + json.dumps(h["ln_f.bias"]) + "}"), [WEIGHTS, "ln_f.bias"]),
    **{f"index of {value} bytes": (length(value), [WEIGHTS])
       for value in (0, 1, 2**20, 2**40, 2**63, 2**64 - 1)},
    # parts
    "part is missing": (part_missing, [SECOND, "nothing"]),
    **{f"part is {name}": (elsewhere(name), [INDEX, "h.1.mlp.c_fc.bias", repr(name)])
       for name in ("../outside.safetensors", "sub/inside.safetensors")},
    **{f"part is {name!r}": (parts(**{"h.1.mlp.c_fc.bias": name}),
                             [INDEX, "h.1.mlp.c_fc.bias", "same folder"])
       for name in ("/etc/passwd", "..", "", "pytorch_model.bin", "a\\b.safetensors",
                    7, ["a"])},
    "part without its tensor": (parts(lambda f: f[SECOND].pop("h.1.mlp.c_fc.bias")),
                                [SECOND, "h.1.mlp.c_fc.bias", "no such tensor"]),
    "tensor in both parts": (parts(twice_in_parts), [SECOND, "wte.weight", "one too many"]),
    "tensor in no part": (parts(lambda f: f[SECOND].pop("h.1.mlp.c_fc.bias"),
                                **{"h.1.mlp.c_fc.bias": None}),
                          [INDEX, "h.1.mlp.c_fc.bias", "no such tensor"]),
    "tensor in the wrong part": (parts(**{"h.1.mlp.c_fc.bias": FIRST}),
                                 [FIRST, "h.1.mlp.c_fc.bias"]),
    "tensor under two names": (parts(**{"transformer.wte.weight": SECOND}),
                               [INDEX, "wte.weight", "two"]),
    "index places nothing": (lambda f: (parts()(f), holds(INDEX, b"{}")(f)),
                             [INDEX, "weight_map", "None"]),
    "index of parts is a pointer": (lambda f: (parts()(f), holds(INDEX, LFS)(f)),
                                    [INDEX, "Git LFS"]),
    "part is a page": (lambda f: (parts()(f), holds(SECOND, HTML)(f)),
                       [SECOND, "web page"]),
    "part is cut": (lambda f: (parts()(f), cut(SECOND, 500)(f)), [SECOND]),
    # other formats and other things than files
    **{f"only {name}": (only(name), [WEIGHTS, name, "save safetensors"])
       for name in ("pytorch_model.bin", "model.ckpt", "tf_model.h5", "flax_model.msgpack",
                    "model.gguf")},
    **{f"{name} links to itself": (link_to_itself(name), [name, "leads nowhere"])
       for name in FILES},
    "config is a pipe": (pipe, ["config.json", "not a file"]),
    # tokenizers
    "far too few tokens": (lambda f: (padded(f, 1281)), ["tokenizer.json", "1281", "257"]),
    "end in the padding": (end_in_the_padding, ["eos_token_id", "299", "257"]),
    "holes in the numbers": (holes, ["tokenizer.json", "0 to 256"]),
    "another model of tokens": (
        tokenizer(lambda t: Tokenizer(models.WordLevel(t.get_vocab(), "a"))),
        ["tokenizer.json", "model", "BPE", "WordLevel"]),
    "pieces of words": (
        tokenizer(lambda t: Tokenizer(models.WordPiece(t.get_vocab(), unk_token="a"))),
        ["tokenizer.json", "BPE", "WordPiece"]),
    "another decoder": (setting(decoder=decoders.Metaspace()), ["decoder", "Metaspace"]),
    "lower case": (setting(normalizer=normalizers.Lowercase()),
                   ["tokenizer.json", "loses"]),
    "spaces are dropped": (setting(pre_tokenizer=pre_tokenizers.Whitespace()),
                           ["tokenizer.json", "loses"]),
    "a space in front": (setting(pre_tokenizer=pre_tokenizers.ByteLevel(
        add_prefix_space=True)), ["tokenizer.json", "loses"]),
    "a byte is missing": (
        tokenizer(lambda t: dropped(t, "\u0120")), ["tokenizer.json", "loses"]),
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
    {"n_inner": 128}, {"n_positions": None}, {"n_ctx": None}, {"use_cache": True},
    {"bos_token_id": 0}, {"task_specific_params": {"a": 1}}, {"_name_or_path": "x"},
    {"architectures": ["GPT2LMHeadModel"]}, {"new_in_2030": False}, {"new": 0},
    {"id2label": {"0": "x"}, "num_labels": 1}, {"transformers_version": "4.57"},
    {"repetition_penalty": 1.2, "top_k": 5, "num_beams": 2}, {"torch_dtype": "float32"},
    {"dtype": "float32"}, {"pruned_heads": {}},
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


def same_params(params, tensors):
    want = [tensors["wte.weight"], tensors["wpe.weight"], tensors["ln_f.weight"],
            tensors["ln_f.bias"]]
    for i in range(tiny.BLOCKS):
        for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
            want += [tensors[f"h.{i}.{name}.weight"], tensors[f"h.{i}.{name}.bias"]]
    got = list(leaves(params))
    assert len(got) == len(want)
    for ours, theirs in zip(got, want):
        assert ours.dtype == np.float32 and not ours.flags.writeable
        np.testing.assert_array_equal(ours, theirs.astype(np.float32))


def test_parts_are_the_whole(folder):
    parts()(folder)
    same_params(read_checkpoint(folder).params, tiny.make_tensors())


def test_parts_with_prefix_and_masks(folder):
    files = {part: {f"transformer.{name}": value for name, value in tensors.items()}
             for part, tensors in tiny.halves().items()}
    files[FIRST]["transformer.h.0.attn.bias"] = SCRAP
    tiny.write_parts(folder, files)
    same_params(read_checkpoint(folder).params, tiny.make_tensors())


def test_a_whole_file_comes_before_parts(folder):
    whole = (folder / WEIGHTS).read_bytes()
    parts(part_is_never_read=None)(folder)
    (folder / SECOND).unlink()
    (folder / WEIGHTS).write_bytes(whole)
    same_params(read_checkpoint(folder).params, tiny.make_tensors())


def test_parts_behind_links(folder, tmp_path):
    """As caches of downloads keep them; the name is in the folder, the bytes elsewhere."""
    parts()(folder)
    shutil.move(folder / SECOND, tmp_path / "blob")
    (folder / SECOND).symlink_to(tmp_path / "blob")
    same_params(read_checkpoint(folder).params, tiny.make_tensors())


SPECIAL = np.array([0, -0.0, 1, -np.inf, np.inf, np.nan, 2**-24, 65504, 2**-14, -3.14],
                   np.float32)


def test_cast_of_float16(folder):
    half = {k: v.astype(np.float16) for k, v in tiny.make_tensors().items()}
    half["ln_f.bias"][:10] = SPECIAL
    tiny.write_weights(folder, **half)
    tiny.write_config(folder, torch_dtype="float16")
    same_params(read_checkpoint(folder, cast=True).params, half)


def test_cast_of_bfloat16_is_exact(folder):
    tensors = tiny.make_tensors()
    tensors["ln_f.bias"][:10] = [*SPECIAL[:7], 3.3e38, 1e-39, -1e-45]
    exact = tiny.write_bfloat16(folder, tensors)
    params = read_checkpoint(folder, cast=True).params
    same_params(params, exact)
    bits, want = (x.view(np.uint32) for x in (params.norm.bias, exact["ln_f.bias"]))
    np.testing.assert_array_equal(bits, want)
    np.testing.assert_allclose(params.words, tensors["wte.weight"], rtol=2**-7)


def test_cast_of_a_mixture_at_odd_places(folder):
    """A prime number of halves first, so that all that follows is at an odd place."""
    tensors = tiny.make_tensors()
    tensors |= {"ln_f.bias": tensors["ln_f.bias"].astype(np.float16),
                "lm_head.weight": tensors["wte.weight"]}
    tiny.write_weights(folder, **tensors)
    path = folder / WEIGHTS
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    path.write_bytes((size + 1).to_bytes(8, "little") + raw[8:8 + size] + b" "
                     + raw[8 + size:])
    same_params(read_checkpoint(folder, cast=True).params, tensors)


def test_cast_of_float32_changes_nothing(folder):
    params = read_checkpoint(folder, cast=True).params
    same_params(params, tiny.make_tensors())
    assert params.words.base is not None


def test_cast_takes_no_other_types(folder):
    tiny.write_weights(folder, **{"ln_f.bias": np.zeros(32)})
    with pytest.raises(CheckpointError, match="ln_f.bias.*F64"):
        read_checkpoint(folder, cast=True)


def test_cast_on_the_command_line(folder, capsys):
    half = {k: v.astype(np.float16) for k, v in tiny.make_tensors().items()}
    tiny.write_weights(folder, **half)
    ask = ["generate", "abc", "--tokens", "3", "--model", str(folder)]
    assert main(ask) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "wte.weight" in line and "--cast" in line
    assert main([*ask, "--cast"]) == 0
    got = capsys.readouterr().out
    tiny.write_weights(folder, **{k: v.astype(np.float32) for k, v in half.items()})
    assert main(ask) == 0 and capsys.readouterr().out == got


def test_inner_width(folder):
    """Against the same forward pass in NumPy; equal to a 4 E that ends in zeros."""
    from tinymlir.reference import forward
    tensors = tiny.make_tensors()
    for i in range(tiny.BLOCKS):
        for name, axis in (("c_fc.weight", 1), ("c_fc.bias", 0), ("c_proj.weight", 0)):
            key = f"h.{i}.mlp.{name}"
            tensors[key] = np.ascontiguousarray(np.take(tensors[key], range(48), axis))
    tiny.write_weights(folder, **tensors)
    tiny.write_config(folder, n_inner=48)
    ids = [5, 17, 200]
    for fused in (False, True):
        model, _ = load_model(folder, fused=fused)
        want = forward(np.array(ids), model.params, tiny.HEADS)[-1:]
        np.testing.assert_allclose(model(ids), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [258, 300, tiny.VOCABULARY + 1023])
def test_padding_is_cut_off(folder, size):
    padded(folder, size)
    found, params, tokenizer = read_checkpoint(folder)
    assert found.vocabulary == tiny.VOCABULARY == tokenizer.get_vocab_size()
    np.testing.assert_array_equal(params.words, tiny.make_tensors()["wte.weight"])


def test_the_path_is_a_file(folder):
    with pytest.raises(CheckpointError, match=r"config\.json: .* a file in place of"):
        read_checkpoint(folder / WEIGHTS)


def test_the_path_is_a_loop(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"config\.json: .* a link to nowhere"):
        read_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "y/" * 3000])
def test_paths_that_cannot_be(tmp_path, name):
    with pytest.raises(CheckpointError, match="expected a file"):
        read_checkpoint(tmp_path / name)


def test_unreadable(folder, monkeypatch):
    """Permissions mean nothing to a superuser, so the system call is played."""
    import errno
    from pathlib import Path

    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match="config.json.*can be read.*Permission denied"):
        read_checkpoint(folder)


@pytest.mark.parametrize("split", [False, True])
def test_only_json_and_safetensors_are_opened(folder, split):
    """By the interpreter's own audit, with other formats beside them."""
    if split:
        parts()(folder)
    for name in ("pytorch_model.bin", "model.pt", "merges.txt", "vocab.json", "modeling.py"):
        (folder / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    code = ("import os, sys\nfrom tinymlir.checkpoint import read_checkpoint\nseen = set()\n"
            "def hook(event, args):\n"
            "    if event == 'open' and str(args[0]).startswith(sys.argv[1]):\n"
            "        seen.add(os.path.basename(args[0]))\n"
            "    assert event not in ('pickle.find_class', 'os.system', 'subprocess.Popen')\n"
            "read_checkpoint(sys.argv[1])  # imports what it needs\n"
            "sys.addaudithook(hook)\nread_checkpoint(sys.argv[1])\n"
            "print(*sorted(seen))")
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True,
                          text=True, timeout=120)
    opened = done.stdout.split()
    weights = [FIRST, SECOND, INDEX] if split else [WEIGHTS]
    assert set(opened) | {"tokenizer.json"} == {"config.json", *weights, "tokenizer.json"}, done


def test_parts_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts()(tiny.write_checkpoint(tmp_path / "model"))
    assert default_directory().resolve() == tmp_path / "model"
    (tmp_path / "model" / INDEX).unlink()
    assert default_directory() == BUNDLED


def test_parts_are_not_fetched_again(folder, monkeypatch):
    from tinymlir import fetch
    parts()(folder)
    monkeypatch.setattr(fetch, "download", None)
    same_params(fetch.fetch(folder).params, tiny.make_tensors())
    assert not (folder / WEIGHTS).exists() and not (folder / ".incomplete").exists()


def test_nothing_is_compiled_for_a_bad_folder(folder, monkeypatch):
    """A refusal comes before the first compilation."""
    monkeypatch.setattr(import_module("tinymlir.jit"), "trace", None)
    config(scale_attn_by_inverse_layer_idx=True)(folder)
    for fused in (False, True):
        with pytest.raises(CheckpointError, match="scale_attn_by_inverse"):
            load_model(folder, fused=fused)


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


ODD = [None, 0, -1, 1, 2**31, 2**70, 1.5, float("nan"), float("inf"), "", "x", [], {}, [1],
       {"a": 1}, True, False, "\ud800", "a\nb.safetensors", "\0.safetensors", ".safetensors"]


def places(data, path=()):
    """Every place in a tree of JSON but the root."""
    items = data.items() if isinstance(data, dict) else (
        enumerate(data) if isinstance(data, list) else ())
    for key, value in list(items)[:12]:
        yield (*path, key)
        yield from places(value, (*path, key))


def with_odd_values(raw):
    for path in places(json.loads(raw)):
        for value in ODD:
            data = json.loads(raw)
            inner = data
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            yield json.dumps(data).encode()


def with_odd_bytes(raw):
    dice = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(raw)
        for place in dice.integers(0, len(raw), dice.integers(1, 4)):
            damaged[place] = dice.integers(256)
        yield bytes(damaged)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX, WEIGHTS])
@pytest.mark.parametrize("damage", [with_odd_values, with_odd_bytes])
def test_damaged_json_never_surprises(folder, name, damage):
    """Any value in any place: it works, or one line says why not. Never a panic."""
    rest = b""
    if name == INDEX:
        parts()(folder)
    raw = (folder / name).read_bytes()
    if name == WEIGHTS:
        size = 8 + int.from_bytes(raw[:8], "little")
        raw, rest = raw[8:size], raw[size:]
    for data in damage(raw):
        head = len(data).to_bytes(8, "little") if name == WEIGHTS else b""
        (folder / name).write_bytes(head + data + rest)
        try:
            _, _, made = read_checkpoint(folder, cast=True)
            assert made.decode(made.encode("a b\té").ids) == "a b\té"
        except CheckpointError as error:
            assert str(error).isprintable() and str(error).startswith(str(folder))


def test_a_terminal_obeys_no_file(folder, capsys):
    """Names out of a file are quoted without control characters."""
    tiny.write_weights(folder, **{"evil\x1b[2J\nname": SCRAP})
    assert main(["generate", "abc", "--model", str(folder)]) == 1
    line = capsys.readouterr().err.splitlines()[1]
    assert "evil" in line and line.isprintable()


@pytest.mark.parametrize("flags", [[], ["--fused"]])
def test_all_at_once(folder, flags, capsys):
    """Parts, prefix, masks, 16 bits, padding and n_ctx alone: the text is as before."""
    tensors = {k: v.astype(np.float16) for k, v in tiny.make_tensors().items()}
    tiny.write_weights(folder, **{k: v.astype(np.float32) for k, v in tensors.items()})
    ask = ["generate", "abc", "--tokens", "6", "--model", str(folder), *flags]
    assert main(ask) == 0
    want = capsys.readouterr().out
    files = tiny.halves()
    padding = np.full((63, tiny.WIDTH), 99, np.float16)
    tensors["wte.weight"] = np.concatenate([tensors["wte.weight"], padding])
    files = {part: {f"transformer.{name}": tensors[name] for name in file}
             for part, file in files.items()}
    files[SECOND]["lm_head.weight"] = tensors["wte.weight"].astype(np.float32)
    files[SECOND]["transformer.h.1.attn.bias"] = np.ones((1, 1, 24, 24), bool)
    tiny.write_parts(folder, files)
    tiny.write_config(folder, n_positions=None, vocab_size=320, torch_dtype="float16")
    assert main([*ask, "--cast"]) == 0
    assert capsys.readouterr().out == want
