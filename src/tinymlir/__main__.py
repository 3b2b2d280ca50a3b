"""`python -m tinymlir` is the command `tinymlir`."""
import sys

from tinymlir.cli import main

if __name__ == "__main__":
    sys.exit(main())
