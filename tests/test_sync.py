"""The package, the chapters and the stored outputs say the same."""
from pathlib import Path

from tinymlir import literate

ROOT = Path(__file__).parents[1]


def test_nothing_is_stale():
    assert literate.check(ROOT) == []
