"""Where the benchmarks keep what they measured, for chapter 11: results.json."""
import datetime
import json
from pathlib import Path

from per_sublayer import machine

FILE = Path(__file__).with_name("results.json")


def record(name, found, **conditions):
    """Store one benchmark's figures with the machine and the day."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    known[name] = {"machine": machine(), "date": str(datetime.date.today()),
                   **conditions, "found": found}
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def rounded(value):
    """Three digits: more would be noise."""
    return float(f"{value:.3g}")
