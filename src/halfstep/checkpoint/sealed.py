"""Write files with their size and SHA-256, and check files before anything in them is used."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from halfstep.checkpoint.paths import Disk
from halfstep.checkpoint.pickle_detection import LOOKED_AT, runs_code
from halfstep.errors import Unsafe

BLOCK = 2**22
"""The number of bytes that are hashed and written at a time."""
# Errors that are not the file's: too many open files, no memory, a network disk that is away, permissions. A checkpoint
# must not be declared damaged for one of these.
_PASSING = {
    getattr(errno, name, None)
    for name in (
        "EMFILE",
        "ENFILE",
        "ENOMEM",
        "ENOBUFS",
        "EIO",
        "EACCES",
        "EPERM",
        "ESTALE",
        "EAGAIN",
        "EINTR",
        "ETIMEDOUT",
    )
} - {None}


class Sealed(NamedTuple):
    """The name, size and digest that a file must have."""

    name: str
    size: int
    sha256: str


def write_sealed(disk: Disk, path: Path, pieces: Iterable[bytes | memoryview]) -> Sealed:
    """Write a new file from these pieces and return its size and digest; it is on the disk when this returns."""
    digest, size = hashlib.sha256(), 0
    file = disk.create(path)
    try:
        for block in _blocks(pieces):
            # The digest is of the bytes in memory, not of what is read back: damage on the way to the disk is detected
            # too.
            digest.update(block)
            disk.write(file, block)
            size += len(block)
        # SIGKILL keeps the page cache, a power loss does not: the file must be on the disk before the manifest names
        # it.
        disk.flush(file)
    finally:
        disk.close(file)
    return Sealed(path.name, size, digest.hexdigest())


def _blocks(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
        for begin in range(0, len(view), BLOCK):
            yield view[begin : begin + BLOCK]


def problem_with(folder: Path, sealed: Sealed) -> str | None:
    """Return what is wrong with a file, or None.

    Raises OSError if the file cannot be read at present; it may still be intact. Raises Unsafe if it could run code
    when read with a pickle reader.
    """
    try:
        with regular(folder / sealed.name) as file:
            size, sha256 = _measured(file, folder / sealed.name, sealed.size)
    except OSError as error:
        if is_passing(error):
            raise
        return f"{sealed.name}: {error.strerror or error}"
    if size != sealed.size:
        return f"{sealed.name} has {size:,} bytes, {sealed.size:,} were written"
    return None if sha256 == sealed.sha256 else f"{sealed.name} has the right size and another SHA-256 than was written"


def is_passing(error: Exception) -> bool:
    """Return whether an error is temporary or external, so that the file itself may be intact."""
    return isinstance(error, OSError) and error.errno in _PASSING


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a regular file.

    Raises OSError if it is larger than `most` bytes, and Unsafe if it could run code.
    """
    with regular(path) as file:
        size = os.fstat(file).st_size
        if size > most:
            raise OSError(f"{size:,} bytes, more than {most:,}")
        content = b""
        # Bounded by the size checked above, even if the file grows while it is read.
        while block := os.read(file, size - len(content)):
            content += block
    refuse_code(path, content[:LOOKED_AT])
    return content


@contextmanager
def regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor; raise OSError for a link, a folder or a pipe."""
    # O_NONBLOCK: opening a pipe would otherwise wait forever for a writer. O_NOFOLLOW, and fstat on the descriptor
    # instead of stat on the path: the file cannot be exchanged between the check and the read.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("not a regular file")
        yield file
    finally:
        os.close(file)


def _measured(file: int, path: Path, expected: int) -> tuple[int, str]:
    """Return the size and the SHA-256 of a file.

    The digest is empty if the size is wrong, since hashing is then wasted.
    """
    size = os.fstat(file).st_size
    refuse_code(path, os.pread(file, LOOKED_AT, 0))
    if size != expected:
        return size, ""
    digest = hashlib.sha256()
    block = bytearray(BLOCK)
    while read := os.readv(file, [block]):
        digest.update(memoryview(block)[:read])
    return size, digest.hexdigest()


def refuse_code(path: Path, start: bytes) -> None:
    """Raise Unsafe if a file that begins with these bytes could run code when read with a pickle reader."""
    kind = runs_code(start)
    if kind is not None:
        raise Unsafe(
            f"{path} is {kind}, which can run code when it is read",
            allowed="checkpoints that halfstep wrote: safetensors and JSON",
            do="do not use this folder unless you know who put the file there; delete the file, or take another run",
        )
