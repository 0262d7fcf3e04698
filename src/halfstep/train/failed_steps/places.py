"""Define where the failed steps of a run are: `failed_steps/000123` is attempt 123. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

FAILED_STEPS = "failed_steps"
"""The folder of failed steps in a run's folder."""
RECORD = "failed_step.json"
"""The description of a step; the last of its files to be written."""
EARLIER = "trouble"
"""The folder's name in form 1, which is no longer read."""
WEIGHTS = "tensors.safetensors"
DRAFT = ".tmp"
"""The suffix of a folder that is incomplete or being removed."""
_NAME = re.compile(r"[0-9]{6,15}")
_BATCH = re.compile(r"batch-[0-9]{5}\.safetensors")


def batch_of(rank: int) -> str:
    """Return the file name of a rank's batch."""
    return f"batch-{rank:05d}.safetensors"


def is_file_name(name: str) -> bool:
    """Return whether `name` is allowed: it is read from a file, and becomes a path."""
    return name == WEIGHTS or _BATCH.fullmatch(name) is not None


def place_of(run: Path, attempt: int) -> Path:
    """Return the folder of a failed step."""
    return run / FAILED_STEPS / f"{attempt:06d}"


def recorded_in(run: Path) -> list[Path]:
    """Return the failed steps of a run, oldest first; empty where there are none."""
    found = [path for path in _entries(run / FAILED_STEPS) if _NAME.fullmatch(path.name) and not path.is_symlink()]
    return sorted(found, key=lambda path: int(path.name))


def refuse_elsewhere(run: Path) -> None:
    """Raise OSError where the folder is a link or a file: its content was not written by the run."""
    place = run / FAILED_STEPS
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise OSError(f"{place} is {'a link' if place.is_symlink() else 'a file'}, where a folder belongs")


def leftovers(run: Path) -> list[Path]:
    """Return folders that were never completed, or are half removed."""
    return [path for path in _entries(run / FAILED_STEPS) if path.name.endswith(DRAFT)]


def _entries(folder: Path) -> list[Path]:
    try:
        return [] if folder.is_symlink() else list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
