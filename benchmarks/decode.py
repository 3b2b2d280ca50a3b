"""GPT-2 (124M, random weights), token after token with a key/value cache, in float32.

    python benchmarks/decode.py [--prompt 16] [--tokens 48] [--rounds 3] [--threads N]

The limit is memory: every weight is read once a token. So the first line is how fast this
machine reads, measured in the same run, and what that allows. Engines take turns, and all
have to choose the same tokens as NumPy. Not here: sampling, batches, quantised weights.
"""
import argparse
import datetime
import statistics
import sys
import time

import forward as common  # sets the threads first
import numpy as np
import peers
from per_sublayer import GPT2, machine, make_params, random_tensors, warn
from record import record, rounded

from tinymlir.cache import CachedModel, compiled


def ours(params):
    """A fresh model, so that no token is known; it returns the logits itself."""
    model = CachedModel(GPT2, params, compiled("cpu", "float32", "float32"), "float32")
    seen = []

    def run(ids, past):
        if not past:
            seen.clear()
        seen.extend(int(x) for x in ids)
        return model(seen)[0], [True]

    return run


def generate(run, prompt, tokens, empty):
    """The new tokens, and the seconds of each step after the prompt."""
    logits, past = run(np.asarray(prompt), empty)
    found, times = [int(np.argmax(logits))], []
    for _ in range(tokens - 1):
        begin = time.perf_counter()
        logits, past = run(np.asarray(found[-1:]), past)
        found.append(int(np.argmax(logits)))
        times.append(time.perf_counter() - begin)
    return found, times


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     parents=[common.THREADS])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="into results.json")
    args = parser.parse_args()
    warn()
    params = make_params(GPT2, random_tensors(GPT2))
    prompt = np.random.default_rng(0).integers(0, GPT2.vocabulary, args.prompt)
    size = GPT2.width // GPT2.heads
    nothing = [np.zeros((1, GPT2.heads, 0, size), np.float32)] * (2 * GPT2.blocks)
    runs = {"tinymlir": (ours(params), [])}
    runs |= {name: (run, nothing) for name, run in
             peers.decoders(params, GPT2.heads, common.asked).items()}
    plain = common.numpy32(params, GPT2.heads)
    want = list(map(int, prompt))
    for _ in range(args.tokens):
        want.append(int(np.argmax(plain(np.array(want)))))
    times = {name: [] for name in runs}
    rates = []
    for _ in range(args.rounds):
        rates.append(common.probe()[0])
        for name, (run, empty) in runs.items():
            time.sleep(common.REST)
            found, steps = generate(run, prompt, args.tokens, empty)
            if found != want[len(prompt):]:
                sys.exit(f"{name} chose other tokens than NumPy")
            times[name] += steps
    read = statistics.median(rates)
    weights = sum(x.nbytes for b in params.blocks for pair in b for x in pair)
    weights += params.words.nbytes
    print(f"{datetime.date.today()}, {machine()}; {common.asked} threads; reads "
          f"{read:.1f} GB/s; {weights / 1e6:.0f} MB of weights a token, so at most "
          f"{read * 1e9 / weights:.1f} tokens/s\n")
    print("| engine | tokens/s | of the limit |\n|---|---|---|")
    for name, steps in times.items():
        rate = 1 / statistics.median(steps)
        print(f"| {name} | {rate:.1f} | {rate * weights / read / 1e9:.0%} |")
    if args.save:
        rates = {name: rounded(1 / statistics.median(x)) for name, x in times.items()}
        record(f"decode, {common.asked} threads", rates, read=rounded(read),
               bytes=weights, prompt=args.prompt)


if __name__ == "__main__":
    main()
