# Tangled from notebooks/07_parity.md: edit the chapter, not this file.

# %% 07_parity.md § A reference of somebody else (1)
"""Runs in the reference's environment: it must not import tinymlir (chapter 7).

usage: python upstream_runner.py FOLDER, which holds request.json"""
from __future__ import annotations

import hashlib
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np


def read_tensors(path: str) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file."""
    from safetensors import safe_open
    with safe_open(path, framework="numpy") as file:
        return {name.removeprefix("transformer."): file.get_tensor(name)
                for name in file.keys()}  # noqa: SIM118  it is no dict


# %% 07_parity.md § A reference of somebody else (2)
def adapt(t: dict[str, np.ndarray], blocks: int) -> Any:
    """The tensors in the reference's dataclasses."""
    kinds = import_module("tinygpt2.gpt2_tensors")

    def pair(kind: Any, name: str) -> Any:
        return kind(t[f"{name}.weight"], t[f"{name}.bias"])

    def block(at: str) -> Any:
        return kinds.TransformerBlockParams(
            ln_1=pair(kinds.LayerNormParams, f"{at}.ln_1"),
            ln_2=pair(kinds.LayerNormParams, f"{at}.ln_2"),
            attn=kinds.AttentionParams(
                c_attn=pair(kinds.LinearParams, f"{at}.attn.c_attn"),
                c_proj=pair(kinds.LinearParams, f"{at}.attn.c_proj")),
            mlp=kinds.MLPParams(
                c_fc=pair(kinds.LinearParams, f"{at}.mlp.c_fc"),
                c_proj=pair(kinds.LinearParams, f"{at}.mlp.c_proj")))

    return kinds.ModelParams(
        wte=t["wte.weight"], wpe=t["wpe.weight"],
        blocks=[block(f"h.{i}") for i in range(blocks)],
        ln_f=pair(kinds.LayerNormParams, "ln_f"))


# %% 07_parity.md § A reference of somebody else (3)
def residuals(ids: list[int], params: Any, heads: int) -> dict[str, np.ndarray]:
    """Every residual, and the last logits, by the reference's functions."""
    ops = import_module("tinygpt2.gpt2_ops")
    x = params.wte[ids] + params.wpe[range(len(ids))]
    found = {"embedding": x}
    for i, b in enumerate(params.blocks):
        x = x + ops.mha(ops.layer_norm(x, b.ln_1.g, b.ln_1.b),
                        b.attn.c_attn, b.attn.c_proj, heads)
        found[f"block {i} attention"] = x
        x = x + ops.ffn(ops.layer_norm(x, b.ln_2.g, b.ln_2.b), b.mlp.c_fc.w,
                        b.mlp.c_fc.b, b.mlp.c_proj.w, b.mlp.c_proj.b)
        found[f"block {i} feed-forward"] = x
    last = ops.layer_norm(x, params.ln_f.g, params.ln_f.b)
    return {**found, "logits": (last @ params.wte.T)[-1:]}


# %% 07_parity.md § A reference of somebody else (4)
def check_whole(whole: Any, ids: list[int], params: Any, heads: int,
                logits: np.ndarray) -> None:
    """Does the reference's whole function have the logits of the residuals?"""
    want = whole(list(ids), params, heads)[-1:]
    close = np.allclose(logits, want, rtol=3e-4, atol=3e-4)
    if want.dtype != logits.dtype or not close:
        sys.exit(f"{whole.__module__}.{whole.__name__} has other logits than the "
                 f"residuals lead to")


def own_tokenizer(folder: Path, vocabulary: int) -> Any:
    """The reference's tokenizer, if it has one for this vocabulary."""
    if vocabulary != 50257 or not (folder / "encoder.json").is_file():
        return None
    return import_module("tinygpt2.encoder").get_encoder("", str(folder))


# %% 07_parity.md § A reference of somebody else (5)
def main(folder: Path) -> None:
    """Obey request.json: so many steps, each with a file of its residuals."""
    request = json.loads((folder / "request.json").read_text())
    tensors, heads = read_tensors(request["weights"]), request["heads"]
    digests = {name: hashlib.sha256(np.ascontiguousarray(x)).hexdigest()
               for name, x in tensors.items()}
    params = adapt(tensors, request["blocks"])
    whole = import_module(f"tinygpt2.{request['whole']}").gpt2
    words = own_tokenizer(Path(request["tokenizer"]), len(params.wte))
    ids, start = request["ids"], len(request["ids"])
    if words and words.encode(request["prompt"]) != ids:
        sys.exit(f"its tokens of the prompt are {words.encode(request['prompt'])}, "
                 f"ours are {ids}")
    texts = []
    for number in range(request["tokens"]):
        found = residuals(ids, params, heads)
        check_whole(whole, ids, params, heads, found["logits"])
        np.savez(folder / f"{number}.npz", **found)
        ids = [*ids, int(np.argmax(found["logits"][-1]))]
        texts.append(words.decode(ids[start:]) if words else None)
    answer = {"digests": digests, "tokens": ids[start:], "texts": texts}
    (folder / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
