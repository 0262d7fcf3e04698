"""A file with its size and its SHA-256: written in one go, and looked at with care before anything in it is used."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from halfstep.errors import Unsafe
from halfstep.train.checkpoint.disk import Disk
from halfstep.train.foreign import LOOKED_AT, runs_code

BLOCK = 2**22
"""Bytes that are hashed and written at a time."""
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
    """What a file must be."""

    name: str
    size: int
    sha256: str


def write_sealed(disk: Disk, path: Path, pieces: Iterable[bytes | memoryview]) -> Sealed:
    """A new file of these pieces, on the disk when this returns."""
    digest, size = hashlib.sha256(), 0
    file = disk.create(path)
    try:
        for block in _blocks(pieces):
            digest.update(block)
            disk.write(file, block)
            size += len(block)
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
    """What is wrong with a file, in words; OSError where it cannot be read now, which says nothing about it.

    Unsafe where it would run code if somebody read it with a pickle reader.
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
    """Whether a file could not be read for a reason that is not its own: another try may find it whole."""
    return isinstance(error, OSError) and error.errno in _PASSING


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a regular file, or OSError; at most `most` bytes are read."""
    with regular(path) as file:
        size = os.fstat(file).st_size
        if size > most:
            raise OSError(f"{size:,} bytes, more than {most:,}")
        content = b""
        while block := os.read(file, size - len(content)):
            content += block
    refuse_code(path, content[:LOOKED_AT])
    return content


@contextmanager
def regular(path: Path) -> Iterator[int]:
    """A file, open for reading; a link, a folder or a pipe is not one."""
    # Without blocking: a pipe in the file's place would wait for ever for somebody to write.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("not a regular file")
        yield file
    finally:
        os.close(file)


def _measured(file: int, path: Path, expected: int) -> tuple[int, str]:
    """Size and SHA-256; a file of another size is not worth hashing."""
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
    """Unsafe where a file that begins like this would run code if somebody read it with a pickle reader."""
    kind = runs_code(start)
    if kind is not None:
        raise Unsafe(
            f"{path} is {kind}, which can run code when it is read",
            allowed="checkpoints that halfstep wrote: safetensors and JSON",
            do="do not use this folder unless you know who put the file there; delete the file, or take another run",
        )
