# Tangled from notebooks/08_gpu.md: edit the chapter, not this file.

# %% 08_gpu.md § How many warps at a time (1)
"""How many warps of a kernel a multiprocessor holds at a time (chapter 8)."""
from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tinymlir.errors import CompileError
from tinymlir.gpu import check_chip
from tinymlir.kernels import WARP


# %% 08_gpu.md § How many warps at a time (2)
@dataclass(frozen=True)
class Limits:
    """What a multiprocessor has room for."""

    warps: int
    blocks: int
    shared: int  # KiB
    unit: int = 128  # bytes: shared memory is given out in pieces of this size
    reserved: int = 1024  # bytes of it that every block needs besides its own


SM = {  # CUDA C++ Programming Guide, "Technical Specifications per Compute
    # Capability"; the rest from the header cuda_occupancy.h of the toolkit
    "sm_75": Limits(32, 16, 64, 256, 0), "sm_80": Limits(64, 32, 164),
    "sm_86": Limits(48, 16, 100), "sm_87": Limits(48, 16, 164),
    "sm_89": Limits(48, 24, 100), "sm_90": Limits(64, 32, 228),
    "sm_100": Limits(64, 32, 228), "sm_103": Limits(64, 32, 228),
    "sm_120": Limits(48, 24, 100), "sm_121": Limits(48, 24, 100),
}
PARTS = 4  # of a multiprocessor, each with its warps and its registers
REGISTERS, PIECE = 1 << 16, 256  # in all; given to a warp at once


def rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that are there at a time, and what there is no more of."""

    blocks: int
    warps: int
    of: int  # places for warps
    limit: str

    def __str__(self) -> str:
        return f"{self.warps} of {self.of} warps, limited by {self.limit}"


def occupancy(registers: int, shared: int, threads: int, chip: str) -> Occupancy:
    """For a kernel's registers per thread, and bytes and threads per block.

    The formula is that of NVIDIA's cuda_occupancy.h: registers are given to whole
    warps, in each of the four parts of a multiprocessor."""
    sm, warps = SM[check_chip(chip)], -(-threads // WARP)
    each = rounded(registers * WARP, PIECE)
    room = REGISTERS // PARTS // each * PARTS if each else sm.warps
    fits = {"warps": sm.warps // warps, "blocks": sm.blocks,
            "registers": room // warps}
    if used := rounded(shared + sm.reserved, sm.unit):
        fits["shared memory"] = sm.shared * 1024 // used
    limit = min(fits, key=lambda what: fits[what])
    return Occupancy(fits[limit], fits[limit] * warps, sm.warps, limit)


# %% 08_gpu.md § How many warps at a time (3)
@dataclass(frozen=True)
class Needs:
    """What ptxas says that a kernel needs."""

    registers: int  # of each thread
    shared: int  # bytes, of each block
    spilled: int  # bytes of registers that go to memory and back


def find_ptxas() -> str | None:
    """Where ptxas is: on the PATH, or in the package nvidia-cuda-nvcc."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    files = [str(file) for folder in folders or ()
             for file in Path(folder).glob("**/bin/ptxas")]
    return shutil.which("ptxas") or next(iter(files), None)


def needs(ptx: str, chip: str) -> dict[str, Needs]:
    """What each kernel needs, by name. Raises CompileError if ptxas refuses."""
    ptxas = find_ptxas()
    if ptxas is None:
        raise CompileError("there is no ptxas; pip install nvidia-cuda-nvcc")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "k.ptx").write_text(ptx)
        done = subprocess.run(
            [ptxas, "-v", f"-arch={check_chip(chip)}", "k.ptx", "-o", "k.cubin"],
            cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"ptxas refused the kernels: {done.stderr.strip()}")
    about = re.findall(r"entry function '(\w+)'(.*?)(?=entry function|\Z)",
                       done.stderr, re.DOTALL)
    return {name: needs_of(text) for name, text in about}


def needs_of(text: str) -> Needs:
    """From the lines about one kernel."""
    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, text)))

    return Needs(number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"),
                 number(r"(\d+) bytes spill"))
