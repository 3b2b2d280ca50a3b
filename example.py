"""Complete a prompt: python example.py PROMPT --tokens N [--model DIR] [--fused] [--gpu]."""
import sys

from tinymlir.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
