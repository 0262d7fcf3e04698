"""Read the bytes of samples from shards by offset and size, and announce chunks of them to the system."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from halfstep.data.file_bytes import READ
from halfstep.data.file_state import FileState
from halfstep.errors import BadSample

NEAR = 4096
"""Bytes between parts, such as tar headers, that are read along with them."""
AT_ONCE = 4
"""Chunks that are announced at a time."""
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
        handle = os.open(path, READ)
        try:
            check(FileState.of(os.fstat(handle)))
            return read_handle_parts(handle, parts)
        finally:
            os.close(handle)
    except OSError as error:
        raise BadSample(name(), error.strerror or type(error).__name__) from error
    except EOFError:
        raise BadSample(name(), "the shard ends before the sample does") from None


def read_handle_parts(handle: int, parts: Sequence[Part]) -> list[bytes]:
    """Read parts of a file, in one go where they lie side by side; raise EOFError if it ends before."""
    first, total = parts[0]
    end = first + total
    found: list[bytes] = []
    for start, size in parts[1:]:  # min, max and sum take twice as long
        if start < first:
            first = start
        if start + size > end:
            end = start + size
        total += size
    apart = end - first > total + NEAR
    content = b"" if apart else os.pread(handle, end - first, first)
    for start, size in parts:
        found.append(os.pread(handle, size, start) if apart else content[start - first : start - first + size])
        if len(found[-1]) < size:
            raise EOFError
    return found


def merge_near_parts(parts: Iterable[Part], near: int = NEAR, most: int = sys.maxsize) -> list[Part]:
    """Return the parts in order, those that lie at most `near` bytes apart as one, of at most `most` bytes."""
    found: list[list[int]] = []
    for start, size in sorted(parts):
        if found and start <= found[-1][0] + found[-1][1] + near and start + size - found[-1][0] <= most:
            found[-1][1] = max(found[-1][1], start + size - found[-1][0])
        else:
            found.append([start, size])
    return [(start, size) for start, size in found]


class Announcer:
    """Announces chunks in a thread, a few at a time, so that they are in memory or on the disk when they are read."""

    def __init__(self, announce: Callable[[Sequence[tuple[int, int]]], None], most: int | None = None) -> None:
        self._announce = announce
        """Takes chunks, each its first sample and one past its last."""
        self._waiting: deque[tuple[int, int]] = deque(maxlen=most)
        self._thread: threading.Thread | None = None

    def __call__(self, chunks: Iterable[tuple[int, int]]) -> None:
        self._waiting.extend(chunks)
        if self._waiting and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._announce_all, daemon=True)
            self._thread.start()

    def _announce_all(self) -> None:
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
            try:
                self._announce(some)
            except Exception:
                # A chunk that cannot be announced is read all the same, and its samples report the error: soon, also
                # where each attempt takes as long as a store is waited for.
                self._waiting.clear()


def announce_parts(path: Path, parts: Iterable[Part]) -> None:
    """Tell the system that these parts of a file will be read."""
    handle = os.open(path, os.O_RDONLY)
    try:
        for start, size in parts:
            os.posix_fadvise(handle, start, size, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(handle)
