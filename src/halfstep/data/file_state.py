"""Notice files that change while a run reads them: compare each with its state when it was indexed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from typing import NamedTuple

BLOCK, BLOCKS = 2**20, 4
"""Bytes per read, and blocks per sampled file."""


class FileState(NamedTuple):
    """What a file system records of a file's content."""

    size: int
    modified: int
    inode: int
    changed: int
    """The time of the last change of content, name or permissions; no program can set it."""

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """Return the state that `stat` or `fstat` found."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


class RecordedFile(NamedTuple):
    """The state of a file at the start of a run."""

    state: FileState
    content: str = ""
    """What `compute_block_digest` found; empty if the content was not read."""
    whole: bool = True
    """Whether all blocks were read, however large the file is."""


def describe_file_change(before: RecordedFile, now: FileState, path: str | os.PathLike[str]) -> str:
    """Return how a file has changed since it was recorded; empty if it is unchanged.

    Its content is read only if its state differs: a file with a new time or inode number is the same file.
    """
    state, size = before.state, now.size
    if state.size != size:
        return f"its file has changed since the run began: {state.size:,} -> {size:,} bytes"
    # Both: some network file systems number a file anew, and new permissions or links change the time alone.
    is_another = state.inode != now.inode and state.changed != now.changed
    if not is_another and state.modified == now.modified:
        return ""
    # A few blocks are evidence enough that a file was touched, and none that another one is the same.
    is_evidence = before.content and (not is_another or before.whole or size <= BLOCK * BLOCKS)
    with suppress(OSError):
        if is_evidence and compute_block_digest(path, list_block_offsets(size, before.whole)) == before.content:
            return ""
    if is_another:
        return "another file has taken the place of its file since the run began"
    return "its file has been written or touched since the run began"


def compute_block_digest(path: str | os.PathLike[str], starts: Iterable[int]) -> str:
    """Return 16 hex digits of the blocks of a file at these offsets; raise OSError if it cannot be read."""
    digest = sha256()
    with open(path, "rb") as file:
        for start in starts:
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()[:16]


def list_block_offsets(size: int, whole: bool) -> Iterable[int]:
    """Return the offsets of the blocks to read: all, or a few from the first byte to the last."""
    if whole or size <= BLOCK * BLOCKS:
        return range(0, size, BLOCK)
    return [(size - BLOCK) * number // (BLOCKS - 1) for number in range(BLOCKS)]
