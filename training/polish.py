"""A few minutes more, against loops: teach a model not to repeat itself.

Greedy text of a small model soon runs in circles.  Here the model writes, and where
it writes four tokens in a row for the second time, the fourth becomes less likely
(unlikelihood training: Welleck and others, 2020).  Every such step is followed by a
step on the books, so that nothing is forgotten.
"""

import argparse
import time

import torch
from torch.nn import functional as F

from network import loss_of
from sample import load, load_config
from text import draw, load_corpus
from train import save_checkpoint


def write(model, ids, count):
    """Greedy continuations of a batch of prompts (B, T): (B, T + count)."""
    with torch.no_grad():
        for _ in range(count):
            best = model(ids)[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, best], 1)
    return ids


def repeats(ids, n=4):
    """Where a run of n tokens ends that was there before: a mask (B, T)."""
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, marks in zip(ids.tolist(), mask):
        seen = set()
        for end in range(n, len(row) + 1):
            gram = tuple(row[end - n:end])
            marks[end - 1] = gram in seen
            seen.add(gram)
    return mask


def unlikelihood(model, ids, prompt):
    """-log(1 - p) of the tokens that repeat, over all that the model wrote."""
    logits = model(ids[:, :-1])
    chances = F.softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
    mask = repeats(ids)[:, 1:]
    mask[:, :prompt - 1] = False  # what the books repeat is no fault
    costs = -torch.log1p(-chances[mask].clamp(max=0.9999))
    return costs.sum() / (len(ids) * (ids.shape[1] - prompt)), mask


def polish(model, corpus, args):
    """Alternate the two losses until the time is over."""
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(args.seed)
    context, step = model.wpe.num_embeddings, 0
    begin, left = time.monotonic(), 1.0
    while left > 0:
        optimizer.param_groups[0]["lr"] = args.lr * left
        prompts, _ = draw(corpus, 2 * args.batch, args.prompt, generator)
        ids = write(model, prompts[:args.batch], args.tokens)
        against, mask = unlikelihood(model, ids, args.prompt)
        books = loss_of(model, *draw(corpus, args.batch, context, generator))
        (books + args.weight * against).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        left = 1 - (time.monotonic() - begin) / (60 * args.minutes)
        if step % 10 == 0:
            part = mask.sum().item() / (len(ids) * args.tokens)
            print(f"{step:5}  books {books:.3f}  repeated {part:.3f}", flush=True)


def main():
    """Read, polish, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("checkpoint", help="a folder that train.py wrote")
    add("books", help="the folder of .txt files it was trained on")
    add("--out", required=True, help="where the new checkpoint goes")
    add("--minutes", type=float, default=5.0)
    add("--lr", type=float, default=6e-4)
    add("--weight", type=float, default=3.0, help="of the loss against repeats")
    add("--batch", type=int, default=16)
    add("--prompt", type=int, default=8, help="tokens of a book to go on from")
    add("--tokens", type=int, default=56, help="tokens to write")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    model, tokenizer = load(args.checkpoint)
    corpus = load_corpus(args.books, tokenizer, model.wpe.num_embeddings, 0.1)
    polish(model, corpus, args)
    config = load_config(args.checkpoint)
    save_checkpoint(args.out, model.state_dict(), config, tokenizer)


if __name__ == "__main__":
    main()
