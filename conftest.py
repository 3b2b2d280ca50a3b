"""How the notebooks are tested: every stored output must come out again (nbval)."""
import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path
from queue import Empty
from time import monotonic

import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell, IPyNbFile

from tinymlir.weave import has_gpu

ROOT = Path(__file__).parent
NO_GPU = "needs an NVIDIA GPU; "
STORED, NOT_STORED = "the stored output comes from one", "it has not run on one yet"

# inherited by the kernels: a cell that is not in the tangled file is an error, and this
# checkout is what they import
os.environ["TINYMLIR_STRICT"] = "1"
# a new cache for each run: everything is compiled at least once, and nothing stays behind
os.environ["TINYMLIR_CACHE"] = tempfile.mkdtemp(prefix="tinymlir-cache-")
atexit.register(shutil.rmtree, os.environ["TINYMLIR_CACHE"], ignore_errors=True)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])


def named_cells(self, collect=IPyNbFile.collect):
    """Give each cell the name of its first line, and skip those that need a GPU."""
    self.sanitize_patterns[re.escape(f"{ROOT}/")] = ""
    for item in collect(self):
        lines = [s.strip() for s in item.cell.source.splitlines() if s.strip() and s[0] != "#"]
        cell = IPyNbCell.from_parent(
            self, name=f"{item.name}: {lines[0][:60] if lines else ''}",
            cell_num=item.cell_num, cell=item.cell, options=item.options)
        if "gpu" in item.cell.metadata.get("tags", []) and not has_gpu():
            why = NO_GPU + (STORED if item.cell.outputs else NOT_STORED)
            cell.add_marker(pytest.mark.skip(reason=why))
        yield cell


IPyNbFile.collect = named_cells


def await_reply(self, msg_id, timeout=None, wait=RunningKernel.await_reply):
    """Notice at once, not when the cell's time is up, that native code killed the kernel."""
    end = monotonic() + (timeout or 1e9)
    while True:
        try:
            return wait(self, msg_id, timeout=max(0, min(2, end - monotonic())))
        except Empty:
            if not self.is_alive():
                raise RuntimeError("this cell killed its kernel") from None
            if monotonic() >= end:
                raise


RunningKernel.await_reply = await_reply
