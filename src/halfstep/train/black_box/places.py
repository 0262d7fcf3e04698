"""Where the failed steps of a run lie: `trouble/000123` is the step of the 123rd attempt. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

TROUBLE = "trouble"
"""The folder of them in a run's folder."""
RECORD = "trouble.json"
"""What is known of a step; written last of its files."""
WEIGHTS = "tensors.safetensors"
DRAFT = ".tmp"
"""How the name of a folder ends that is not complete, or no longer."""
_NAME = re.compile(r"[0-9]{6,15}")
_BATCH = re.compile(r"batch-[0-9]{5}\.safetensors")


def batch_of(rank: int) -> str:
    return f"batch-{rank:05d}.safetensors"


def is_file_name(name: str) -> bool:
    """Names come from a file, and become paths."""
    return name == WEIGHTS or _BATCH.fullmatch(name) is not None


def place_of(run: Path, attempt: int) -> Path:
    return run / TROUBLE / f"{attempt:06d}"


def recorded_in(run: Path) -> list[Path]:
    """The failed steps of a run, the oldest first. A run that has none has no folder for them, either."""
    found = [path for path in _entries(run / TROUBLE) if _NAME.fullmatch(path.name) and not path.is_symlink()]
    return sorted(found, key=lambda path: int(path.name))


def refuse_elsewhere(run: Path) -> None:
    """OSError where something else has the place of the folder: what is in it was not written by the run."""
    place = run / TROUBLE
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise OSError(f"{place} is {'a link' if place.is_symlink() else 'a file'}, where a folder belongs")


def leftovers(run: Path) -> list[Path]:
    """Folders that were never completed, and old ones that are half removed."""
    return [path for path in _entries(run / TROUBLE) if path.name.endswith(DRAFT)]


def _entries(folder: Path) -> list[Path]:
    try:
        return [] if folder.is_symlink() else list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
