# Tangled from notebooks/05_gpt2.md: edit the chapter, not this file.

# %% 05_gpt2.md § Getting the real weights (1)
"""GPT-2 from the hub: resumed, verified, then moved into place (chapter 5)."""
from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from tinymlir.checkpoint import FILES, Checkpoint, is_checkpoint, read_checkpoint
from tinymlir.errors import CheckpointError

REPOSITORY = "openai-community/gpt2"
REVISION = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


def check_digest(path: Path, etag: str | None) -> None:
    """Compare a file with the SHA-256 that the hub keeps of a large one."""
    if etag is None or len(etag) != 64:
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != etag:
        path.unlink()
        raise CheckpointError(
            f"{path.stem}: expected SHA-256 {etag}, got {digest}; "
            f"it was thrown away, run the command again")


# %% 05_gpt2.md § Getting the real weights (2)
def download(name: str, target: Path) -> None:
    """One file of the pinned revision; what an earlier try left is continued."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    if target.exists():
        return
    endpoint = (os.environ.get("HF_ENDPOINT") or "").rstrip("/") or None
    url = hf_hub_url(REPOSITORY, name, revision=REVISION, endpoint=endpoint)
    facts = get_hf_file_metadata(url, token=False)
    part = target.with_name(f"{name}.part")
    if part.exists() and part.stat().st_size > (facts.size or 0):
        part.unlink()
    with part.open("ab") as file:
        http_get(facts.location, file, resume_size=file.tell(),
                 expected_size=facts.size, displayed_filename=name)
    check_digest(part, facts.etag)
    part.rename(target)


# %% 05_gpt2.md § Getting the real weights (3)
def fetch(directory: str | Path) -> Checkpoint:
    """Put GPT-2 into a folder, if no checkpoint is there yet, and open it.

    Raises CheckpointError if the hub cannot be reached or sends something else.
    What has arrived by then is kept aside, and the next call goes on from there.
    """
    directory = Path(directory)
    if is_checkpoint(directory) or all((directory / f).exists() for f in FILES):
        return read_checkpoint(directory)
    aside = directory / ".incomplete"
    aside.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        try:
            download(name, aside / name)
        except CheckpointError:
            raise
        except Exception as error:  # OSError, or the classes of an HTTP library
            told = str(error).partition("\nFor more information")[0]
            reason = " ".join(told.split()) or type(error).__name__
            raise CheckpointError(
                f"{name}: cannot be fetched ({reason}); check network and disk, "
                f"then run this again: it goes on where it stopped") from None
    return settle(aside, directory)


# %% 05_gpt2.md § Getting the real weights (4)
def settle(aside: Path, directory: Path) -> Checkpoint:
    """Open what was fetched, then move it to its names."""
    try:
        read_checkpoint(aside)
    except CheckpointError:
        shutil.rmtree(aside)
        raise
    for name in FILES:
        os.replace(aside / name, directory / name)
    aside.rmdir()
    return read_checkpoint(directory)
