"""Compare GPT-2 with a reference:

    python verify.py [--model DIR] [--reference DIR] [--fused] [--gpu]
"""
import sys

from tinymlir.cli import main

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
