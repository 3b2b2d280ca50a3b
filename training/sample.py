"""Read a checkpoint back: its losses on the books, and how it tells a tale."""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from network import GPT2
from text import load_corpus
from train import measure

OPENINGS = [
    "Once upon a time",
    "The king said",
    "There was once a poor woodcutter",
    "In a deep forest",
    "The little girl",
    "One day the fox",
    "Alice was",
    '"Who are you?"',
    "The old woman had three sons",
    "The princess opened the door and",
]


def load_config(folder):
    """What config.json says."""
    return json.loads((Path(folder) / "config.json").read_text())


def load(folder):
    """The model, ready to evaluate, and its tokenizer."""
    folder, config = Path(folder), load_config(folder)
    keys = ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head"]
    model = GPT2(*(config[key] for key in keys))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.no_grad()
def go_on(model, ids, count, temperature=0.0, generator=None):
    """count more ids: the likeliest ones, or drawn at a temperature."""
    ids = list(ids)
    for _ in range(count):
        logits = model(torch.tensor([ids]))[0, -1]
        if temperature:
            chances = torch.softmax(logits / temperature, 0)
            ids.append(torch.multinomial(chances, 1, generator=generator).item())
        else:
            ids.append(logits.argmax().item())
    return ids


def show(model, tokenizer, count, temperature, seed):
    """Each opening, and what follows."""
    generator = torch.Generator().manual_seed(seed)
    for opening in OPENINGS:
        ids = tokenizer.encode(opening).ids
        ids = go_on(model, ids, count, temperature, generator)
        print(f"- {tokenizer.decode(ids)!r}")


def main():
    """Print the losses if there are books, then the samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="a folder that train.py wrote")
    parser.add_argument("--books", help="the folder it was trained on")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model, tokenizer = load(args.checkpoint)
    if args.books:
        context = model.wpe.num_embeddings
        corpus = load_corpus(args.books, tokenizer, context, 0.1)
        print(json.dumps(measure(model, corpus, context), indent=2))
    for temperature in (0.0, 0.8):
        print(f"\ntemperature {temperature}")
        show(model, tokenizer, args.tokens, temperature, args.seed)


if __name__ == "__main__":
    main()
