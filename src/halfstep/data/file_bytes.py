"""Read a file by offset without a map of it: a file that shrinks ends a mapped read by SIGBUS. Imports no torch."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from halfstep.errors import StorageFailed

READ = os.O_RDONLY | getattr(os, "O_BINARY", 0)


class FileBytes:
    """The bytes of an open file. Raises StorageFailed, with its name, if it becomes shorter or cannot be read.

    Safe to use from several threads, and after a fork.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what
        """What the file is, in words that precede its path: `the index`."""
        self._handle = os.open(path, READ)
        weakref.finalize(self, os.close, self._handle)
        self.size = os.fstat(self._handle).st_size

    def __reduce__(self) -> tuple[object, ...]:
        return FileBytes, (self.path, self.what)

    def read(self, at: int, size: int) -> bytes:
        """Return the bytes at an offset."""
        try:
            content = os.pread(self._handle, size, at)
            # One call returns at most 2 GiB.
            while 0 < len(content) < size:
                if not (more := os.pread(self._handle, size - len(content), at + len(content))):
                    break
                content += more
        except OSError as error:  # such as a stale handle, where another machine has replaced the file
            raise self.failed(error.strerror or type(error).__name__) from None
        if len(content) < size:
            raise self.failed(f"it ends before byte {at + size:,}, and had {self.size:,} bytes")
        return content

    def failed(self, why: str) -> StorageFailed:
        """Return the error for a file that has changed since it was opened."""
        return StorageFailed(
            f"{self.what} {self.path} was replaced or truncated in place during its use: {why}",
            allowed="a file that stays as it is, or that is replaced by a rename",
            do="wait until the copy is complete, and start the same command again",
        )
