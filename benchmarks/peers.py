"""GPT-2 for other engines: an ONNX file made from the same weights, and PyTorch.

`engines` gives functions from token ids (N,) to the logits (V,) of the next token, in
float32; `decoders` gives functions from new ids and the cache so far to the logits and the
cache. An engine that is not installed is left out. llama.cpp is not in the `bench` extra,
since it is compiled when it is installed: `pip install llama-cpp-python gguf`.
"""
import importlib.util
import os
import tempfile
from pathlib import Path

import numpy as np

EPSILON = 1e-5


def installed(*names):
    return all(importlib.util.find_spec(name) for name in names)


# ---------------------------------------------------------------- ONNX

class Onnx:
    """A few lines around onnx.helper: nodes get names, arrays become initializers."""

    def __init__(self):
        self.nodes, self.arrays, self.count = [], [], 0

    def __call__(self, kind, *inputs, **attributes):
        from onnx import helper
        names = [x if isinstance(x, str) else self.array(x) for x in inputs]
        self.count += 1
        self.nodes.append(helper.make_node(kind, names, [f"v{self.count}"], **attributes))
        return f"v{self.count}"

    def array(self, value):
        from onnx import numpy_helper
        name = f"a{len(self.arrays)}"
        self.arrays.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name


def onnx_block(g, x, block, heads, past=None):
    """One block on (1, N, E), the operations as exporters write them; with `past`, the
    names of a block's keys and values so far. Returns x and the new keys and values."""
    width = len(block.norm_1.gain)
    size = width // heads
    y = g("LayerNormalization", x, *block.norm_1, axis=-1, epsilon=EPSILON)
    y = g("Add", g("MatMul", y, block.qkv.weight), block.qkv.bias)
    parts = []
    for i in range(3):
        part = g("Slice", y, *(np.array([at]) for at in (i * width, (i + 1) * width, 2)))
        part = g("Reshape", part, np.array([1, -1, heads, size]))
        parts.append(g("Transpose", part, perm=[0, 2, 1, 3]))
    q, *new = parts
    if past:
        new = [g("Concat", old, part, axis=2) for old, part in zip(past, new)]
    k, v = g("Transpose", new[0], perm=[0, 1, 3, 2]), new[1]
    scores = g("Mul", g("MatMul", q, k), np.float32(size**-0.5))
    weights = g("Softmax", g("Add", scores, "mask"), axis=-1)
    y = g("Reshape", g("Transpose", g("MatMul", weights, v), perm=[0, 2, 1, 3]),
          np.array([1, -1, width]))
    x = g("Add", x, g("Add", g("MatMul", y, block.out.weight), block.out.bias))
    y = g("LayerNormalization", x, *block.norm_2, axis=-1, epsilon=EPSILON)
    y = g("Gelu", g("Add", g("MatMul", y, block.up.weight), block.up.bias),
          approximate="tanh")
    y = g("Add", g("MatMul", y, block.down.weight), block.down.bias)
    return g("Add", x, y), new


def onnx_file(params, heads, folder, cached=False):
    """GPT-2 as an ONNX file: ids (1, N) and a mask to logits (1, V), and if cached the
    keys and values of all blocks (1, H, P, D) to those with N more."""
    import onnx
    from onnx import TensorProto, helper
    g = Onnx()
    words = g.array(params.words)
    x = g("Add", g("Gather", words, "ids"), g("Gather", params.positions, "places"))
    old, new = [], []
    for i, block in enumerate(params.blocks):
        past = [f"key{i}", f"value{i}"] if cached else None
        x, made = onnx_block(g, x, block, heads, past)
        old += past or []
        new += made if cached else []
    x = g("LayerNormalization", x, *params.norm, axis=-1, epsilon=EPSILON)
    last = g("Gather", x, np.array(-1), axis=1)
    g("Gemm", last, words, transB=1)
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "n"]),
              helper.make_tensor_value_info("places", TensorProto.INT64, [1, "n"]),
              helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", "m"])]
    size = len(params.norm.gain) // heads
    outputs = [helper.make_tensor_value_info(
        g.nodes[-1].output[0], TensorProto.FLOAT, [1, len(params.words)])]
    for names, place, last in ((old, inputs, "past"), (new, outputs, "all")):
        place += [helper.make_tensor_value_info(
            name, TensorProto.FLOAT, [1, heads, last, size]) for name in names]
    graph = helper.make_graph(g.nodes, "gpt2", inputs, outputs, g.arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    file = Path(folder, "cached.onnx" if cached else "whole.onnx")
    onnx.save(model, file)
    return file


def feeds(ids, past=()):
    n, done = len(ids), past[0].shape[2] if past else 0
    mask = np.triu(np.full((n, done + n), -np.inf, np.float32), done + 1)
    given = {"ids": np.asarray(ids, np.int64)[None], "mask": mask,
             "places": np.arange(done, done + n)[None]}
    names = [f"{kind}{i}" for i in range(len(past) // 2) for kind in ("key", "value")]
    return given | dict(zip(names, past))


def onnxruntime_session(file, threads):
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(file), options,
                                        providers=["CPUExecutionProvider"])


def onnxruntime_forward(file, threads):
    session = onnxruntime_session(file, threads)
    return lambda ids: session.run(None, feeds(ids))[0][0]


def onnxruntime_decoder(file, threads):
    session = onnxruntime_session(file, threads)

    def run(ids, past):
        logits, *past = session.run(None, feeds(ids, past))
        return logits[0], past

    return run


def openvino_request(file, threads):
    import openvino
    core = openvino.Core()
    compiled = core.compile_model(str(file), "CPU", {
        "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32"})
    return compiled.create_infer_request()


def openvino_forward(file, threads):
    request = openvino_request(file, threads)
    return lambda ids: request.infer(feeds(ids))[0][0].copy()


def openvino_decoder(file, threads):
    request = openvino_request(file, threads)

    def run(ids, past):
        found = request.infer(feeds(ids, past))
        logits, *past = (found[i].copy() for i in range(len(found)))
        return logits[0], past

    return run


# ---------------------------------------------------------------- PyTorch

def torch_forward(params, heads, threads):
    """Eager PyTorch with its fused attention."""
    import torch
    from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention
    torch.set_num_threads(threads)

    def tensors(tree):
        if isinstance(tree, np.ndarray):
            return torch.from_numpy(tree)
        made = [tensors(part) for part in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)

    p = tensors(params)
    shape = (len(params.norm.gain),)

    def block(x, b):
        n, width = x.shape
        y = torch.addmm(b.qkv.bias, layer_norm(x, shape, *b.norm_1, EPSILON), b.qkv.weight)
        q, k, v = (z.view(n, heads, -1).transpose(0, 1)[None] for z in y.split(width, 1))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)[0]
        y = y.transpose(0, 1).reshape(n, width)
        x = x + torch.addmm(b.out.bias, y, b.out.weight)
        y = torch.addmm(b.up.bias, layer_norm(x, shape, *b.norm_2, EPSILON), b.up.weight)
        return x + torch.addmm(b.down.bias, gelu(y, approximate="tanh"), b.down.weight)

    @torch.inference_mode()
    def forward(ids):
        x = p.words[torch.from_numpy(ids)] + p.positions[:len(ids)]
        for b in p.blocks:
            x = block(x, b)
        return (layer_norm(x[-1], shape, *p.norm, EPSILON) @ p.words.T).numpy()

    return forward


# ---------------------------------------------------------------- JAX

def jax_forward(params, heads):
    """The same operations in jax.numpy, compiled by XLA, once for each length."""
    import jax
    import jax.numpy as jnp
    jax.config.update("jax_platforms", "cpu")

    def norm(x, gain, bias):
        x = x - x.mean(-1, keepdims=True)
        return gain * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) + bias

    def block(x, b):
        n, width = x.shape
        y = norm(x, *b.norm_1) @ b.qkv.weight + b.qkv.bias
        q, k, v = (z.reshape(n, heads, -1).transpose(1, 0, 2) for z in jnp.split(y, 3, -1))
        scores = q @ k.transpose(0, 2, 1) * q.shape[-1]**-0.5
        mask = jnp.where(jnp.tri(n, dtype=bool), 0, -jnp.inf).astype(x.dtype)
        y = jax.nn.softmax(scores + mask, axis=-1) @ v
        x = x + y.transpose(1, 0, 2).reshape(n, width) @ b.out.weight + b.out.bias
        y = norm(x, *b.norm_2) @ b.up.weight + b.up.bias
        return x + jax.nn.gelu(y, approximate=True) @ b.down.weight + b.down.bias

    @jax.jit
    def forward(p, ids):
        x = p.words[ids] + p.positions[:len(ids)]
        for b in p.blocks:
            x = block(x, b)
        return norm(x[-1], *p.norm) @ p.words.T

    there = jax.tree.map(jnp.asarray, params)
    return lambda ids: np.asarray(forward(there, ids))


# ---------------------------------------------------------------- llama.cpp

def gguf_file(params, heads, folder):
    """The weights as llama.cpp wants them: float32, matrices as (outputs, inputs)."""
    import gguf
    file = Path(folder, "model.gguf")
    out = gguf.GGUFWriter(str(file), "gpt2")
    words, context = len(params.words), len(params.positions)
    width, up = params.blocks[0].up.weight.shape
    for add, value in ((out.add_context_length, context), (out.add_embedding_length, width),
                       (out.add_block_count, len(params.blocks)), (out.add_head_count, heads),
                       (out.add_feed_forward_length, up), (out.add_vocab_size, words),
                       (out.add_layer_norm_eps, EPSILON), (out.add_file_type, 0),
                       (out.add_tokenizer_model, "no_vocab")):
        add(value)
    tensors = {"token_embd.weight": params.words, "position_embd.weight": params.positions,
               "output_norm.weight": params.norm.gain, "output_norm.bias": params.norm.bias}
    for i, b in enumerate(params.blocks):
        for name, norm in (("attn_norm", b.norm_1), ("ffn_norm", b.norm_2)):
            tensors[f"blk.{i}.{name}.weight"] = norm.gain
            tensors[f"blk.{i}.{name}.bias"] = norm.bias
        for name, linear in (("attn_qkv", b.qkv), ("attn_output", b.out),
                             ("ffn_up", b.up), ("ffn_down", b.down)):
            tensors[f"blk.{i}.{name}.weight"] = linear.weight.T
            tensors[f"blk.{i}.{name}.bias"] = linear.bias
    for name, value in tensors.items():
        out.add_tensor(name, np.array(value, np.float32, order="C"))
    for step in (out.write_header_to_file, out.write_kv_data_to_file,
                 out.write_tensors_to_file, out.close):
        step()
    return file


def llama(params, heads, threads, folder):
    """A function from new ids, and whether to forget those before, to the logits."""
    from llama_cpp import Llama
    context, words = len(params.positions), len(params.words)
    model = Llama(str(gguf_file(params, heads, folder)), n_ctx=context, n_batch=context,
                  n_ubatch=512, n_threads=threads, n_threads_batch=threads, type_k=0,
                  type_v=0, verbose=False)

    def run(ids, fresh=True):
        if fresh:
            model.reset()
        model.eval([int(x) for x in ids])
        logits = model._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(logits, (words,)).copy()

    return run


def llama_decoder(params, heads, threads):
    run = llama(params, heads, threads, tempfile.mkdtemp())

    def step(ids, past):
        fresh = bool(past) and isinstance(past[0], np.ndarray)
        return run(ids, fresh), [True]

    return step


def decoders(params, heads, threads):
    """Name -> function from ids and a list of keys and values to logits and that list."""
    found = {}
    if installed("onnx"):
        file = onnx_file(params, heads, tempfile.mkdtemp(), cached=True)
        if installed("onnxruntime"):
            found["ONNX Runtime"] = onnxruntime_decoder(file, threads)
        if installed("openvino"):
            found["OpenVINO"] = openvino_decoder(file, threads)
    if installed("llama_cpp", "gguf"):
        found["llama.cpp"] = llama_decoder(params, heads, threads)
    return found


def engines(params, heads, threads):
    """Name -> function from ids to logits, for what is installed."""
    found = {}
    folder = tempfile.mkdtemp()
    if installed("onnx"):
        file = onnx_file(params, heads, folder)
        if installed("onnxruntime"):
            found["ONNX Runtime"] = onnxruntime_forward(file, threads)
        if installed("openvino"):
            found["OpenVINO"] = openvino_forward(file, threads)
    if installed("torch"):
        found["PyTorch"] = torch_forward(params, heads, threads)
    if installed("jax") and threads == os.cpu_count():  # it takes all of them
        found["JAX"] = jax_forward(params, heads)
    if installed("llama_cpp", "gguf"):
        found["llama.cpp"] = llama(params, heads, threads, folder)
    return found
