"""Train a small GPT-2 on a folder of text files, and write it as GPT-2 is written.

The files that come out (config.json, model.safetensors, tokenizer.json) have the
names, shapes and layouts of openai-community/gpt2, so whatever reads that
checkpoint reads this one.  Not here: a GPU, several machines, fine-tuning.
"""

import argparse
import csv
import json
import math
import os
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import swa_utils

from network import GPT2, evaluate, loss_of
from text import END, draw, load_corpus, refuse


# ---------------------------------------------------------------- the files

def config_of(args, tokenizer):
    """What config.json says; every key as in openai-community/gpt2."""
    end = tokenizer.token_to_id(END)
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.0,
        "bos_token_id": end,
        "embd_pdrop": args.dropout,
        "eos_token_id": end,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": args.context,
        "n_embd": args.width,
        "n_head": args.heads,
        "n_layer": args.layers,
        "n_positions": args.context,
        "resid_pdrop": args.dropout,
        "tie_word_embeddings": True,
        "vocab_size": tokenizer.get_vocab_size(),
    }


def replace(path, write):
    """Write a file beside its place, then move it there: never half a file."""
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)


def save_checkpoint(folder, state, config, tokenizer):
    """config.json, model.safetensors and tokenizer.json, in float32."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().float().contiguous() for name, t in state.items()}
    text = json.dumps(config, indent=2) + "\n"
    replace(folder / "model.safetensors",
            lambda path: save_file(tensors, path, {"format": "pt"}))
    replace(folder / "config.json", lambda path: path.write_text(text))
    replace(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))


# ---------------------------------------------------------------- the loop

def make_optimizers(model, lr):
    """Muon for the matrices of the blocks, AdamW for everything else.

    Muon turns each update into a matrix with equal singular values, which learns
    more from a token; scaled to AdamW's size, both take the same rate.
    """
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    tables = [model.wte.weight, model.wpe.weight]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": tables, "weight_decay": 0.1},
              {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1,
                         adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True),
    ]


def rate(progress, peak, warm=0.02):
    """Up along a line, then down along a cosine; progress runs from 0 to 1."""
    if progress < warm:
        return peak * progress / warm
    fall = (progress - warm) / (1 - warm)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * fall)))


def update(model, optimizers, lr, batch):
    """One step: loss, gradient, clip, move.  Returns the loss."""
    loss = loss_of(model, *batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


class Run:
    """What must survive a stop: weights, their average, optimisers, counters."""

    def __init__(self, args, vocab):
        shape = (vocab, args.context, args.width, args.layers, args.heads)
        self.model = GPT2(*shape, args.dropout)
        self.average = swa_utils.AveragedModel(
            self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(args.average)
        )
        self.optimizers = make_optimizers(self.model, args.lr)
        self.generator = torch.Generator().manual_seed(args.seed)
        self.step, self.minutes = 0, 0.0

    def progress(self, args):
        """From 0 to 1: by steps, or by the clock if that ends sooner."""
        return max(self.step / args.steps, self.minutes / args.minutes)

    def parts(self):
        """Everything that has a state_dict."""
        return [self.model, self.average, *self.optimizers]

    def save(self, path):
        """Into one file, which stays outside the repository."""
        state = {
            "parts": [part.state_dict() for part in self.parts()],
            "random": [self.generator.get_state(), torch.get_rng_state()],
            "counters": [self.step, self.minutes],
        }
        replace(path, lambda part: torch.save(state, part))

    def load(self, path):
        """What save wrote, with the same options."""
        if not path.exists():
            refuse(f"expected a run to resume in {path}, but there is none")
        state = torch.load(path)
        for part, saved in zip(self.parts(), state["parts"]):
            part.load_state_dict(saved)
        self.generator.set_state(state["random"][0])
        torch.set_rng_state(state["random"][1])
        self.step, self.minutes = state["counters"]


class Log:
    """A line on the screen and a row in a CSV file, every now and then."""

    columns = ["step", "minutes", "tokens", "rate", "train", "held_out"]

    def __init__(self, path, resume):
        self.path, self.losses = Path(path), []
        if not resume:
            self.write(self.columns, "w")

    def write(self, row, mode="a"):
        """One row, in both places."""
        with self.path.open(mode, newline="") as file:
            csv.writer(file).writerow(row)
        print("  ".join(f"{cell:>10}" for cell in row), flush=True)

    def report(self, run, tokens, lr, held_out):
        """The mean training loss since the last report, and the held-out loss."""
        train = sum(self.losses) / len(self.losses)
        self.losses = []
        self.write([run.step, f"{run.minutes:.1f}", tokens, f"{lr:.2e}",
                    f"{train:.3f}", f"{held_out:.3f}"])


def train(run, args, corpus, save):
    """The loop: draw, update, average; report and save when it is time."""
    log, saved = Log(args.log, args.resume), run.minutes
    while run.progress(args) < 1:
        begin = time.perf_counter()
        lr = rate(run.progress(args), args.lr)
        batch = draw(corpus, args.batch, args.context, run.generator)
        log.losses.append(update(run.model, run.optimizers, lr, batch))
        run.average.update_parameters(run.model)
        run.step += 1
        if run.step % args.every == 0:
            tokens = run.step * args.batch * args.context
            held = evaluate(run.average.module, corpus.held, args.context, 20)
            log.report(run, tokens, lr, held)
        run.minutes += (time.perf_counter() - begin) / 60
        if run.minutes - saved > args.save_minutes:
            saved = run.minutes
            save(run)
    save(run)


def measure(model, corpus, context):
    """Nats a token: every tenth training window, and all that is held out."""
    nats = evaluate(model, corpus.held, context)
    count = len(corpus.held) - 1
    return {
        "train_nats_per_token": evaluate(model, corpus.trained, context, 10),
        "held_out_nats_per_token": nats,
        "held_out_bits_per_byte": nats * count / math.log(2) / corpus.held_bytes,
    }


OPTIONS = {
    "--width": (192, "E, the width of the residual stream"),
    "--layers": (6, "blocks"),
    "--heads": (6, "H, which divides the width"),
    "--context": (256, "T, tokens in a window"),
    "--vocab": (4096, "V, tokens in the vocabulary"),
    "--batch": (16, "B, windows in a step"),
    "--steps": (10000, "updates of the weights"),
    "--minutes": (math.inf, "end by this time, whatever --steps says"),
    "--lr": (3e-3, "learning rate at its highest"),
    "--dropout": (0.0, "part of what enters the residual stream to drop"),
    "--average": (0.998, "decay of the running average of the weights"),
    "--held-out": (0.1, "part of each book, at its end, not trained on"),
    "--seed": (0, "of the weights and of the batches"),
    "--threads": (2, "cores to use"),
    "--every": (250, "steps between two reports"),
    "--save-minutes": (5.0, "time between two checkpoints"),
}


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where the .txt files are")
    parser.add_argument("--out", required=True, help="where the checkpoint goes")
    parser.add_argument("--work", required=True, help="where a run can be resumed")
    parser.add_argument("--log", default="log.csv", help="where the losses go")
    parser.add_argument("--resume", action="store_true", help="go on from --work")
    for name, (value, text) in OPTIONS.items():
        text = f"{text} ({value})"
        parser.add_argument(name, type=type(value), default=value, help=text)
    args = parser.parse_args()
    if args.width % args.heads:
        refuse(f"expected heads that divide width {args.width}, got {args.heads}")
    return args


def main():
    """Read, train, measure."""
    args = parse()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    work = Path(args.work)
    corpus = load_corpus(args.folder, args.vocab, args.context, args.held_out)
    config = config_of(args, corpus.tokenizer)
    run = Run(args, config["vocab_size"])
    if args.resume:
        run.load(work / "run.pt")

    def save(run):
        average, last = run.average.module.state_dict(), run.model.state_dict()
        save_checkpoint(args.out, average, config, corpus.tokenizer)
        save_checkpoint(work / "last", last, config, corpus.tokenizer)
        run.save(work / "run.pt")

    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters,",
          f"{len(corpus.trained):,} training tokens, {len(corpus.held):,} held out")
    train(run, args, corpus, save)
    numbers = measure(run.average.module, corpus, args.context)
    numbers |= {"steps": run.step, "minutes": round(run.minutes, 1)}
    print(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()
