"""GPT-2 for other engines: an ONNX file made from the same weights, and PyTorch.

Every function here takes `params` and returns a function from token ids (N,) to the logits
(V,) of the next token, in float32. An engine that is not installed is left out.
"""
import importlib.util
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


def onnx_block(g, x, block, heads):
    """One block on (1, N, E), the operations as exporters write them."""
    width = len(block.norm_1.gain)
    size = width // heads
    y = g("LayerNormalization", x, *block.norm_1, axis=-1, epsilon=EPSILON)
    y = g("Add", g("MatMul", y, block.qkv.weight), block.qkv.bias)
    parts = []
    for i in range(3):
        part = g("Slice", y, *(np.array([at]) for at in (i * width, (i + 1) * width, 2)))
        part = g("Reshape", part, np.array([1, -1, heads, size]))
        parts.append(g("Transpose", part, perm=[0, 2, 3, 1] if i == 1 else [0, 2, 1, 3]))
    q, k, v = parts
    scores = g("Mul", g("MatMul", q, k), np.float32(size**-0.5))
    weights = g("Softmax", g("Add", scores, "mask"), axis=-1)
    y = g("Reshape", g("Transpose", g("MatMul", weights, v), perm=[0, 2, 1, 3]),
          np.array([1, -1, width]))
    x = g("Add", x, g("Add", g("MatMul", y, block.out.weight), block.out.bias))
    y = g("LayerNormalization", x, *block.norm_2, axis=-1, epsilon=EPSILON)
    y = g("Gelu", g("Add", g("MatMul", y, block.up.weight), block.up.bias),
          approximate="tanh")
    return g("Add", x, g("Add", g("MatMul", y, block.down.weight), block.down.bias))


def onnx_file(params, heads, folder):
    """GPT-2 as an ONNX file: ids (1, N) and a mask (N, N) to logits (1, V)."""
    import onnx
    from onnx import TensorProto, helper
    g = Onnx()
    words = g.array(params.words)
    x = g("Add", g("Gather", words, "ids"), g("Gather", params.positions, "places"))
    for block in params.blocks:
        x = onnx_block(g, x, block, heads)
    x = g("LayerNormalization", x, *params.norm, axis=-1, epsilon=EPSILON)
    last = g("Gather", x, np.array(-1), axis=1)
    g("Gemm", last, words, transB=1)
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "n"]),
              helper.make_tensor_value_info("places", TensorProto.INT64, [1, "n"]),
              helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", "n"])]
    vocabulary = len(params.words)
    output = helper.make_tensor_value_info(
        g.nodes[-1].output[0], TensorProto.FLOAT, [1, vocabulary])
    graph = helper.make_graph(g.nodes, "gpt2", inputs, [output], g.arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    file = Path(folder, "gpt2.onnx")
    onnx.save(model, file)
    return file


def feeds(ids):
    n = len(ids)
    return {"ids": np.asarray(ids, np.int64)[None], "places": np.arange(n)[None],
            "mask": np.triu(np.full((n, n), -np.inf, np.float32), 1)}


def onnxruntime_forward(file, threads):
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options,
                                           providers=["CPUExecutionProvider"])
    return lambda ids: session.run(None, feeds(ids))[0][0]


def openvino_forward(file, threads):
    import openvino
    core = openvino.Core()
    compiled = core.compile_model(str(file), "CPU", {
        "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    return lambda ids: request.infer(feeds(ids))[compiled.output(0)][0].copy()


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
    return found
