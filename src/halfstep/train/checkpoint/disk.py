"""Every operation that a save does on a file system, in one place, so that tests can stop it after each of them."""

from __future__ import annotations

import os
from pathlib import Path

from halfstep.files import flush


class Disk:
    """The real one. Each method is one step that a crash can come before, after, or in the middle of."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> int:
        """A new file, open for writing; an existing one is refused, so nothing is ever overwritten."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)

    def write(self, file: int, content: bytes | memoryview) -> None:
        left = memoryview(content).cast("B")
        while left:
            left = left[os.write(file, left) :]

    def flush(self, file: int) -> None:
        """What was written is on the disk, and not only in its cache."""
        os.fsync(file)

    def close(self, file: int) -> None:
        os.close(file)

    def flush_folder(self, path: Path) -> None:
        """The names in the folder are on the disk."""
        flush(path)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()
