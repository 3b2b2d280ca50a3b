"""The network: GPT-2, with the names, shapes and layouts of its checkpoint.

Letters of the shape comments: B windows in a batch, T tokens in a window,
E width, H heads, D = E / H width of a head, V tokens in the vocabulary.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Conv1D(nn.Module):
    """y = x @ weight + bias: GPT-2 stores its matrices (inputs, outputs)."""

    def __init__(self, inputs, outputs, std=0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * std)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """Every token looks at itself and at the tokens before it."""

    def __init__(self, width, heads, std):
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(width, 3 * width)
        self.c_proj = Conv1D(width, width, std)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = (  # each (B, H, T, D)
            part.view(B, T, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(E, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, E))


class FeedForward(nn.Module):
    """Two projections around a GELU, on each token alone."""

    def __init__(self, width, std):
        super().__init__()
        self.c_fc = Conv1D(width, 4 * width)
        self.c_proj = Conv1D(4 * width, width, std)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x))."""

    def __init__(self, width, heads, std, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-5)
        self.attn = Attention(width, heads, std)
        self.ln_2 = nn.LayerNorm(width, eps=1e-5)
        self.mlp = FeedForward(width, std)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT2(nn.Module):
    """The names of the members are the names of the tensors in the file."""

    def __init__(self, vocab, context, width, layers, heads, dropout=0.0):
        super().__init__()
        std = 0.02 / math.sqrt(2 * layers)  # what is added 2 * layers times
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(
            Block(width, heads, std, dropout) for _ in range(layers)
        )
        self.ln_f = nn.LayerNorm(width, eps=1e-5)
        self.drop = nn.Dropout(dropout)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.01)

    def forward(self, ids):
        """The logits (B, T, V) of the token that follows each of ids (B, T)."""
        places = torch.arange(ids.shape[1])
        x = self.drop(self.wte(ids) + self.wpe(places))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


def loss_of(model, ids, targets, reduction="mean"):
    """Cross entropy in nats."""
    logits = model(ids).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model, ids, context, step=1, batch=32):
    """Nats a token over ids, in windows side by side; every step-th of them."""
    model.eval()
    size = (len(ids) - 1) // context * context
    inputs = ids[:size].view(-1, context)[::step].split(batch)
    targets = ids[1:size + 1].view(-1, context)[::step].split(batch)
    pairs = list(zip(inputs, targets))
    if step == 1 and size < len(ids) - 1:  # what is left after the last window
        pairs.append((ids[None, size:-1], ids[None, size + 1:]))
    total = sum(loss_of(model, x, y, "sum").item() for x, y in pairs)
    model.train()
    return total / sum(x.numel() for x, y in pairs)
