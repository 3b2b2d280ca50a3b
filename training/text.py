"""The text: from a folder of .txt files to rows of token ids, and to batches.

Each book is cut in two, and its end is held out: the model never sees it, so the
loss there tells what it learnt rather than what it remembers.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"


class Corpus(NamedTuple):
    """The texts, as rows of token ids."""
    tokenizer: Tokenizer
    trained: torch.Tensor   # the ids of the part that is trained on
    held: torch.Tensor      # the ids of the part that is held out
    held_bytes: int         # how many bytes of UTF-8 those are
    starts: torch.Tensor    # where in `trained` paragraphs begin


def load_corpus(folder, tokenizer, context, held_out):
    """Read the books, cut each in two, encode.

    tokenizer is one, or the number of tokens of a new one.
    """
    pairs = [split(book, held_out) for book in read_books(folder)]
    trained, held = zip(*pairs)
    if isinstance(tokenizer, int):
        tokenizer = train_tokenizer(trained, tokenizer)
    train_ids, held_ids = encode(tokenizer, trained), encode(tokenizer, held)
    if min(len(train_ids), len(held_ids)) < context + 2:
        refuse(f"expected more text than a window of {context} tokens in {folder}")
    held_bytes = sum(len(text.encode()) for text in held)
    starts = paragraph_starts(train_ids, tokenizer, context)
    return Corpus(tokenizer, train_ids, held_ids, held_bytes, starts)


def read_books(folder):
    """The text of every .txt file of a folder, in the order of their names."""
    books = [read(path) for path in sorted(Path(folder).glob("*.txt"))]
    books = [book for book in books if book]
    if not books:
        refuse(f"expected a folder with .txt files, but found no text in {folder}")
    return books


def read(path):
    """The text of a file, without the space around it."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        refuse(f"expected UTF-8 in {path}, but {error.reason} at {error.start}")


def refuse(message):
    """One line, and exit code 1."""
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")


def split(book, held_out):
    """Cut a book in two: what is trained on, and its end, which is held out."""
    cut = round(len(book) * (1 - held_out))
    return book[:cut], book[cut:]


def train_tokenizer(texts, size):
    """A byte-level BPE in the manner of GPT-2: 256 bytes, then the best merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ))
    return tokenizer


def encode(tokenizer, texts):
    """One long row of token ids, with an end-of-text before each text."""
    end = tokenizer.token_to_id(END)
    ids = [[end] + e.ids for e in tokenizer.encode_batch(texts)]
    return torch.tensor([i for row in ids for i in row] + [end])


def paragraph_starts(ids, tokenizer, context):
    """Where paragraphs begin: the positions after a line feed or an end-of-text."""
    breaks = [tokenizer.token_to_id(END), tokenizer.token_to_id("Ċ")]
    starts = 1 + torch.isin(ids, torch.tensor(breaks)).nonzero().flatten()
    return starts[starts < len(ids) - context - 1]


def draw(corpus, batch, context, generator):
    """A batch (B, T) and its targets; half of it begins where a paragraph does.

    A prompt is the beginning of a paragraph, so the model should have seen many.
    """
    ids, starts, half = corpus.trained, corpus.starts, batch // 2
    aligned = starts[torch.randint(len(starts), (half,), generator=generator)]
    last = len(ids) - context - 1
    anywhere = torch.randint(last, (batch - half,), generator=generator)
    places = torch.cat([aligned, anywhere])[:, None] + torch.arange(context + 1)
    window = ids[places]
    return window[:, :-1], window[:, 1:]
