"""Name, list, set aside and remove the folders of checkpoints: one folder per save, with a number that is never reused.

`step-00000120.0007` is save number 7, taken after 120 attempted updates. After a rollback the same step is saved again
in a new folder; the save with the higher number is the newer one. A name ending in `.tmp` is not committed, or is being
removed. A name ending in `.bad` was found damaged, and is kept so that the user can inspect it.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from halfstep.files import check_ownership, flush

CHECKPOINTS = "checkpoints"
"""The name of the folder with the checkpoints in a run's folder."""
DRAFT, BAD = ".tmp", ".bad"
# The save number is hexadecimal. The lengths are bounded, so that a made-up name cannot become a huge integer.
_NAME = re.compile(r"step-([0-9]{8,15})\.([0-9a-f]{4,12})")


class CheckpointDir(NamedTuple):
    """A committed checkpoint; it may have been damaged since."""

    path: Path
    attempt: int
    number: int

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def draft(self) -> Path:
        """Return the path under which it is written, or removed."""
        return self.path.with_name(self.path.name + DRAFT)


def name_generation(folder: Path, attempt: int, number: int) -> CheckpointDir:
    """Return the generation of a step and a save number; nothing is created."""
    return CheckpointDir(folder / f"step-{attempt:08d}.{number:04x}", attempt, number)


def list_generations(folder: Path) -> list[CheckpointDir]:
    """Return the committed generations, newest first; an empty list if the folder does not exist."""
    # By save number, not by step: after a rollback a newer save has a lower step.
    return sorted(_list_matching(folder, ""), key=lambda one: one.number, reverse=True)


def name_next_generation(folder: Path, attempt: int) -> CheckpointDir:
    """Return the next generation; its number is above all existing ones, including drafts and damaged ones."""
    # A reused name could mix files of two saves after a crash; with a new name per save that cannot happen.
    taken = [one.number for suffix in ("", DRAFT, BAD) for one in _list_matching(folder, suffix)]
    return name_generation(folder, attempt, max(taken, default=0) + 1)


def list_drafts(folder: Path) -> list[Path]:
    """Return the drafts: saves that were not committed, and generations that were only partly removed."""
    return [one.path for one in _list_matching(folder, DRAFT)]


def list_set_aside(folder: Path) -> list[Path]:
    """Return the checkpoints that were set aside and are no longer used."""
    return sorted(one.path for one in _list_matching(folder, BAD))


def _list_matching(folder: Path, suffix: str) -> list[CheckpointDir]:
    try:
        entries = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for path in entries:
        match = _NAME.fullmatch(path.name.removesuffix(suffix)) if path.name.endswith(suffix) else None
        if match:
            found.append(CheckpointDir(path, int(match[1]), int(match[2], 16)))
    return found


# -- disk -------------------------------------------------------------------------------------------------------------
# Every file system operation of a save is in one class, so that tests can simulate a crash after each of them.


class Disk:
    """The real file system; a crash can occur before, after or within each method.

    Methods that change names raise FolderLost in a run folder that is no longer the run's own.
    """

    def make_folder(self, path: Path) -> None:
        """Create a folder; its parent must exist."""
        check_ownership(path)
        path.mkdir()

    def create(self, path: Path) -> int:
        """Create a file and return its descriptor.

        Raises FileExistsError if it exists, so nothing is ever overwritten.
        """
        check_ownership(path)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)

    def write(self, file: int, content: bytes | memoryview) -> None:
        """Write all of `content`."""
        left = memoryview(content).cast("B")
        # os.write may write less than it was given, on a nearly full disk for example.
        while left:
            left = left[os.write(file, left) :]

    def flush(self, file: int) -> None:
        """Flush written data to the disk."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Close a descriptor."""
        os.close(file)

    def flush_folder(self, path: Path) -> None:
        """Force the names in a folder to the disk; fsync of a file does not include its name."""
        flush(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically."""
        check_ownership(new)
        os.rename(old, new)

    def remove(self, file: Path) -> None:
        """Remove a file, if it exists."""
        check_ownership(file)
        file.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        check_ownership(path)
        path.rmdir()


# -- removal ----------------------------------------------------------------------------------------------------------


def remove_unfinished_saves(folder: Path, disk: Disk) -> None:
    """Remove the drafts that interrupted saves left behind; only to be called by the holder of the run's lock."""
    # Without the lock, a draft may belong to a save that is still running in another process.
    for path in list_drafts(folder):
        with contextlib.suppress(OSError):
            remove_checkpoint_folder(path, disk)


def remove_checkpoint_folder(path: Path, disk: Disk) -> None:
    """Remove a folder and the files directly in it; do nothing if it is a link or does not exist."""
    if path.is_dir() and not path.is_symlink():
        for file in sorted(path.iterdir()):
            disk.remove(file)
        disk.remove_folder(path)


MOST_ASIDE = 2
"""The number of unused checkpoints that are kept for inspection."""


def remove_old_set_aside(folder: Path, disk: Disk) -> None:
    """Remove all but the newest few checkpoints that were set aside; only for the holder of the run's lock."""
    # By save number: steps repeat after a rollback.
    newest_last = sorted(_list_matching(folder, BAD), key=lambda one: one.number)
    for one in newest_last[:-MOST_ASIDE]:
        with contextlib.suppress(OSError):
            # Rename first: if the removal is interrupted, the next sweep removes the rest.
            draft = one.path.with_name(one.name.removesuffix(BAD) + DRAFT)
            disk.rename(one.path, draft)
            remove_checkpoint_folder(draft, disk)
