"""Bytes with a digest for each page of them, so that a few can be read from a file and compared without the others.

The content comes first, then the digests of its pages, then a seal of these digests. The seal has a key, such as the
name of the file: the file of another name is no valid one. The form of every cache of samples: chunks of a store,
latents, and the share for validation. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from halfstep.data.file_bytes import FileBytes

PAGE = 2**14
"""Bytes that are compared together: as many are hashed for a smaller part of them."""
_DIGEST, _SEAL = 8, 16


class DamagedPages(Exception):
    """A file that differs from the sealed one, is truncated, or is sealed for another key."""


def seal_pages(content: bytes, key: str) -> bytes:
    """Return the content with its digests."""
    view = memoryview(content)
    digests = b"".join(_compute_digest(view[at : at + PAGE]) for at in range(0, len(content), PAGE))
    return b"".join([content, digests, _compute_seal(digests, key)])


class SealedPages:
    """Sealed content that is read by offset; a page is compared with its digest when it is first read.

    `read` returns the bytes at an offset of a file of so many bytes. Raises DamagedPages where they differ.
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int, key: str) -> None:
        pages = -(-max(length - _SEAL, 0) // (PAGE + _DIGEST))
        self.size = length - _SEAL - pages * _DIGEST
        """Bytes of the content."""
        if self.size < 0:
            raise DamagedPages
        self._read = read
        rest = read(self.size, length - self.size)
        self._digests = rest[:-_SEAL]
        if rest[-_SEAL:] != _compute_seal(self._digests, key):
            raise DamagedPages
        self._is_compared = bytearray(pages)

    def __getstate__(self) -> dict[str, object]:
        # The file is opened again, and may be another one by then.
        return {**vars(self), "_is_compared": bytearray(len(self._is_compared))}

    @classmethod
    def open(cls, path: Path, what: str, key: str) -> SealedPages:
        """Open a file; raise OSError where it cannot be opened."""
        file = FileBytes(path, what)
        return cls(file.read, file.size, key)

    def read(self, at: int, count: int) -> bytes:
        """Return bytes of the content."""
        first, stop = at // PAGE, -(-(at + count) // PAGE)
        if all(self._is_compared[first:stop]):
            return self._read(at, count)
        start = first * PAGE
        content = self._read(start, min(stop * PAGE, self.size) - start)
        view = memoryview(content)
        for page in range(first, stop):
            found = _compute_digest(view[page * PAGE - start : (page + 1) * PAGE - start])
            if found != self._digests[page * _DIGEST : (page + 1) * _DIGEST]:
                raise DamagedPages
        self._is_compared[first:stop] = bytes([1]) * (stop - first)
        return content[at - start : at - start + count]


def _compute_digest(page: memoryview) -> bytes:
    return blake2b(page, digest_size=_DIGEST).digest()


def _compute_seal(digests: bytes, key: str) -> bytes:
    return blake2b(digests, digest_size=_SEAL, key=key.encode()[:64]).digest()
