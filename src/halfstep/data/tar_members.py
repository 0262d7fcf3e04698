"""Walk the members of a plain tar file: bounded memory, every header checked, nothing unpacked.

Names and offsets are those that Python's tarfile gives, at a tenth of its processor time. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK = 512
"""Bytes of a header; every member starts at a multiple of it."""
MOST_MEMBERS = 2_000_000
LONGEST_NAME = 2**16
"""Bytes of a long name or of pax records before a member."""
AT_ONCE, FEW = 2**22, 2**13
"""Bytes per read: for all members, and for the name of one."""
_ZEROS = bytes(BLOCK)
_FILES, _LINKS_AND_FOLDERS = b"0\x007", b"123456"
_LONG_NAME, _LONG_LINK, _SPARSE = b"LKS"
_HEADERS = b"LKxgX"
"""Members that describe the next one: a long name, and pax records; those for all members have no names or sizes."""
_MOST_HEADERS = 8
ReadAt = Callable[[int, int], bytes]
"""Returns the bytes at an offset, as many as are requested or as there are."""


class DamagedTar(Exception):
    """A tar file that cannot be used, with the reason."""


class Member(NamedTuple):
    """A file in a tar."""

    begin: int
    """Where its headers start: a long name has a separate one."""
    name: bytes
    at: int
    """Where its content starts."""
    size: int


class TarReader:
    """An open tar file, read in blocks."""

    def __init__(self, read_at: ReadAt, size: int, at_once: int = AT_ONCE) -> None:
        self._read_at, self.size, self._at_once = read_at, size, at_once
        self._base, self._buffer = 0, b""
        self._headers: list[int] = []

    def members(self, start: int = 0) -> Iterator[Member]:
        """Yield the files from the header at byte `start` on; raise DamagedTar if there is anything unreadable."""
        if self.size < BLOCK:
            raise DamagedTar("empty file" if not self.size else "shorter than a header")
        try:
            yield from self._members(start)
        except DamagedTar:
            self._check_headers()  # the first damage is the cause of the rest
            raise
        self._check_headers()

    def _members(self, at: int) -> Iterator[Member]:
        begin, count, extra = at, 0, 0
        name, size_before = b"", -1
        while at + BLOCK <= self.size:
            place = at - self._base
            if place + BLOCK > len(self._buffer) or place < 0:
                self._fill(at)
                place = 0
            buffer = self._buffer
            if not buffer[place] and buffer[place : place + BLOCK] == _ZEROS:
                break
            self._headers.append(place)
            kind, content = buffer[place + 156], at + BLOCK
            size = _parse_header_number(buffer[place + 124 : place + 136], at)
            is_file = kind in _FILES
            if is_file and size_before >= 0:
                size = size_before
            if kind in _LINKS_AND_FOLDERS:
                size = 0  # as tarfile has it: some writers give links the size of their target
            after = self._end_of(content, size)
            if kind in _HEADERS:
                if (extra := extra + 1) > _MOST_HEADERS or size > LONGEST_NAME:
                    raise DamagedTar(f"a header of {size:,} bytes at byte {at:,}, more than {LONGEST_NAME:,}")
                name, size_before = _parse_extended_header(kind, self.read(content, size), at, name, size_before)
                at = after
                continue
            if kind == _SPARSE:
                raise DamagedTar(f"a sparse member at byte {at:,}")
            if (count := count + 1) > MOST_MEMBERS:
                raise DamagedTar(f"more than {MOST_MEMBERS:,} members")
            if is_file:
                name = name or _parse_member_name(buffer, place)
                # Before ustar, a folder was a file whose name ends with a slash.
                if kind or not name.endswith(b"/"):
                    yield Member(begin, name, content, size)
            at = begin = after
            name, size_before, extra = b"", -1, 0
        else:
            if at < self.size:
                raise DamagedTar(f"the file ends within a header, at byte {at:,}")
        if begin < at:
            raise DamagedTar(f"no member follows its headers at byte {begin:,}")

    def _end_of(self, content: int, size: int) -> int:
        after = content - -size // BLOCK * BLOCK
        if size < 0 or after > self.size:
            raise DamagedTar(f"the file ends before the member at byte {content - BLOCK:,} does")
        return after

    def read(self, at: int, size: int) -> bytes:
        """Return the content at an offset; raise DamagedTar if the file has become shorter."""
        place = at - self._base
        if place >= 0 and place + size <= len(self._buffer):
            return self._buffer[place : place + size]
        content = self._read_at(at, size)
        if len(content) < size:
            raise DamagedTar(f"the file ends before byte {at + size:,}")
        return content

    def digest(self, at: int, size: int, person: bytes = b"") -> int:
        """Return 64 bits of the BLAKE2b of the content at an offset."""
        place = at - self._base
        if place >= 0 and place + size <= len(self._buffer):
            return compute_bytes_digest(memoryview(self._buffer)[place : place + size], person)
        found = blake2b(digest_size=8, person=person)
        for start in range(at, at + size, self._at_once):
            found.update(self.read(start, min(self._at_once, at + size - start)))
        return int.from_bytes(found.digest(), "little")

    def _fill(self, at: int) -> None:
        self._check_headers()
        self._base, self._buffer = at, self._read_at(at, self._at_once)
        if len(self._buffer) < BLOCK:
            raise DamagedTar(f"the file ends within a header, at byte {at:,}")

    def _check_headers(self) -> None:
        """Compare the checksums of the headers of this block, all at once."""
        if not self._headers:
            return
        places, self._headers = np.array(self._headers), []
        whole = len(self._buffer) // BLOCK * BLOCK
        headers = np.frombuffer(self._buffer, np.uint8, whole).reshape(-1, BLOCK)[places // BLOCK]
        headers[:, 148:156], given = 32, headers[:, 148:156].copy()
        sums, signed = headers.sum(1, dtype=np.int64), headers.view(np.int8).sum(1, dtype=np.int64)
        for place, field, one, other in zip(places, given, sums, signed, strict=True):
            if _parse_header_number(field.tobytes(), at := self._base + int(place)) not in (one, other):
                raise DamagedTar(f"a damaged header at byte {at:,}")


def compute_bytes_digest(content: bytes | memoryview, person: bytes = b"") -> int:
    """Return 64 bits of the BLAKE2b of some bytes."""
    return int.from_bytes(blake2b(content, digest_size=8, person=person).digest(), "little")


def _parse_member_name(buffer: bytes, place: int) -> bytes:
    name = buffer[place : place + 100].split(b"\0", 1)[0]
    if buffer[place + 345]:
        return buffer[place + 345 : place + 500].split(b"\0", 1)[0] + b"/" + name
    return name


def _parse_header_number(field: bytes, at: int) -> int:
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    try:
        return int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        raise DamagedTar(f"a damaged header at byte {at:,}") from None


def _parse_extended_header(kind: int, content: bytes, at: int, name: bytes, size_before: int) -> tuple[bytes, int]:
    """Return the name and the size that a header gives the next member; those from before where it gives none."""
    if kind == _LONG_NAME:
        return content.split(b"\0", 1)[0], size_before
    content, place = content.rstrip(b"\0"), 0
    while kind != _LONG_LINK and place < len(content):
        length, _, _ = content[place : place + 10].partition(b" ")
        end = place + int(length) if length.isdigit() else 0
        word, equals, value = content[place + len(length) + 1 : max(end - 1, 0)].partition(b"=")
        is_size = word == b"size"
        if not equals or end > len(content) or (is_size and not (value.isdigit() and len(value) < 19)):
            raise DamagedTar(f"a damaged pax header at byte {at:,}")
        if word.startswith(b"GNU.sparse"):
            raise DamagedTar(f"a sparse member at byte {at:,}")
        name = value.rstrip(b"/") if word == b"path" else name
        size_before = int(value) if is_size else size_before
        place = end
    return name, size_before


@contextmanager
def open_tar(path: Path, at_once: int = AT_ONCE) -> Iterator[TarReader]:
    """Open a tar file; raise OSError if it cannot be opened."""
    # Opening a FIFO would otherwise wait for a writer.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        yield TarReader(lambda at, size: os.pread(handle, size, at), os.fstat(handle).st_size, at_once)
    finally:
        os.close(handle)
