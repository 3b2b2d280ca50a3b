"""Download GPT-2 (550 MB): python fetch_model.py [DIR]."""
import sys

from tinymlir.cli import main

if __name__ == "__main__":
    sys.exit(main(["fetch", *sys.argv[1:]]))
