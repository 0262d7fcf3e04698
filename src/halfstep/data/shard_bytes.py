"""Read the bytes of samples from shards by offset and size, and announce chunks of them to the system."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from halfstep.data.file_state import FileState
from halfstep.errors import BadSample

NEAR = 4096
"""Bytes between parts, such as tar headers, that are read along with them."""
Part = tuple[int, int]
"""Offset and size."""


def read_parts(
    path: str | Path, parts: Sequence[Part], name: Callable[[], str], check: Callable[[FileState], None]
) -> list[bytes]:
    """Read parts of a shard, after a `check` of its state.

    Raise BadSample, with the name that `name` gives, where they cannot be read.
    """
    try:
        # Opened each time: a set may have more shards than a process may have open files.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            check(FileState.of(os.fstat(handle)))
            return _read_parts(handle, parts)
        finally:
            os.close(handle)
    except OSError as error:
        raise BadSample(name(), error.strerror or type(error).__name__) from error
    except EOFError:
        raise BadSample(name(), "the shard ends before the sample does") from None


def _read_parts(handle: int, parts: Sequence[Part]) -> list[bytes]:
    """Read parts of a file, in one go where they lie side by side; raise EOFError where it ends before."""
    first, end = min(start for start, _ in parts), max(start + size for start, size in parts)
    if end - first <= sum(size for _, size in parts) + NEAR:
        content = os.pread(handle, end - first, first)
        found = [content[start - first : start - first + size] for start, size in parts]
    else:
        found = [os.pread(handle, size, start) for start, size in parts]
    if any(len(part) < size for part, (_, size) in zip(found, parts, strict=True)):
        raise EOFError
    return found


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return the parts in order, those that lie side by side as one."""
    found: list[list[int]] = []
    for start, size in sorted(parts):
        if found and start <= found[-1][0] + found[-1][1] + NEAR:
            found[-1][1] = max(found[-1][1], start + size - found[-1][0])
        else:
            found.append([start, size])
    return [(start, size) for start, size in found]


class Announcer:
    """Announces parts of shards to the system in a thread, so that they are in the page cache when they are read."""

    def __init__(self, parts_of: Callable[[tuple[int, int]], dict[Path, list[Part]]]) -> None:
        self._parts_of = parts_of
        """Returns where the samples of a chunk are, which has its first sample and one past its last."""
        self._waiting: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, chunks: Iterable[tuple[int, int]]) -> None:
        if not hasattr(os, "posix_fadvise"):  # macOS and Windows
            return
        for chunk in chunks:
            self._waiting.put(chunk)
        if not self._waiting.empty() and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._announce, daemon=True)
            self._thread.start()

    def _announce(self) -> None:
        with suppress(Empty):
            while True:
                chunk = self._waiting.get_nowait()
                # A chunk that cannot be announced is read all the same, and its samples report the error.
                with suppress(Exception):
                    for path, parts in self._parts_of(chunk).items():
                        announce_parts(path, parts)


def announce_parts(path: Path, parts: Iterable[Part]) -> None:
    """Tell the system that these parts of a file will be read."""
    handle = os.open(path, os.O_RDONLY)
    try:
        for start, size in parts:
            os.posix_fadvise(handle, start, size, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(handle)
