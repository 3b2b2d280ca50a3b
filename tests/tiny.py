"""A checkpoint so small that a test can write it: two blocks of width 32, 257 tokens."""
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BLOCKS, WIDTH, HEADS, CONTEXT, VOCABULARY, END = 2, 32, 4, 24, 257, 0

CONFIG = {
    "activation_function": "gelu_new", "eos_token_id": END, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": CONTEXT, "n_embd": WIDTH, "n_head": HEADS,
    "n_layer": BLOCKS, "n_positions": CONTEXT, "vocab_size": VOCABULARY,
}


def make_tensors(seed=0):
    """Random weights under the names of the file format."""
    dice = np.random.default_rng(seed)

    def draw(*shape, mean=0.0):
        return dice.normal(mean, 0.3, shape).astype(np.float32)

    tensors = {"wte.weight": draw(VOCABULARY, WIDTH), "wpe.weight": draw(CONTEXT, WIDTH)}
    for i in range(BLOCKS):
        for name, inputs, outputs in (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1),
                                      ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)):
            tensors[f"h.{i}.{name}.weight"] = draw(WIDTH * inputs, WIDTH * outputs)
            tensors[f"h.{i}.{name}.bias"] = draw(WIDTH * outputs)
        for name in ("ln_1", "ln_2"):
            tensors[f"h.{i}.{name}.weight"] = draw(WIDTH, mean=1.0)
            tensors[f"h.{i}.{name}.bias"] = draw(WIDTH)
    return {**tensors, "ln_f.weight": draw(WIDTH, mean=1.0), "ln_f.bias": draw(WIDTH)}


def make_tokenizer():
    """One token for each byte, and one that ends a text."""
    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def write_config(folder, **changes):
    """config.json with some keys changed; None leaves a key out."""
    data = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(data))


def write_weights(folder, **changes):
    """model.safetensors with some tensors changed; None leaves one out."""
    tensors = {k: v for k, v in {**make_tensors(), **changes}.items() if v is not None}
    save_file(tensors, folder / "model.safetensors")


def write_parts(folder, parts, **places):
    """The tensors spread over files, and an index; `places` changes the index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    listed = {name: part for part, tensors in parts.items() for name in tensors}
    for part, tensors in parts.items():
        save_file(tensors, folder / part)
    listed = {k: v for k, v in {**listed, **places}.items() if v is not None}
    index = {"metadata": {"total_size": 0}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def halves(**extra):
    """The tensors in two files, a block in each."""
    tensors = {**make_tensors(), **extra}
    first = {k: v for k, v in tensors.items() if not k.startswith(("h.1.", "ln_f."))}
    second = {k: v for k, v in tensors.items() if k not in first}
    return {"model-00001-of-00002.safetensors": first,
            "model-00002-of-00002.safetensors": second}


def write_bfloat16(folder, tensors):
    """model.safetensors of upper halves; returns what they are in float32."""
    header, data, exact = {}, b"", {}
    for name, value in tensors.items():
        bits = (value.view(np.uint32) >> 16).astype("<u2")
        exact[name] = (bits.astype(np.uint32) << 16).view(np.float32)
        header[name] = {"dtype": "BF16", "shape": list(value.shape),
                        "data_offsets": [len(data), len(data) + bits.nbytes]}
        data += bits.tobytes()
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return exact


def write_checkpoint(folder):
    """All three files; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder)
    write_weights(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
