"""Bytes with a digest for each page of them, so that a few can be read from a file and compared without the others.

The content comes first, then the digests of its pages, then a seal of these digests. The seal has a key, such as the
name of the file: the file of another name is no valid one. Imports no torch.
"""

from __future__ import annotations

import os
from hashlib import blake2b

PAGE = 2**14
"""Bytes that are compared together: as many are hashed for a smaller part of them."""
_DIGEST, _SEAL = 8, 16


class DamagedPages(Exception):
    """A file that differs from what was sealed, is truncated, or is sealed for another key."""


def seal_pages(content: bytes, key: str) -> bytes:
    """Return the content with its digests."""
    view = memoryview(content)
    digests = b"".join(_compute_digest(view[at : at + PAGE]) for at in range(0, len(content), PAGE))
    return b"".join([content, digests, _compute_seal(digests, key)])


def read_sealed(handle: int, size: int, key: str, at: int, count: int) -> bytes:
    """Return `count` bytes at an offset of an open file with `size` bytes of content.

    Raises DamagedPages if the file differs in the pages that contain them.
    """
    pages = -(-size // PAGE)
    rest = os.pread(handle, pages * _DIGEST + _SEAL + 1, size)
    digests = rest[: pages * _DIGEST]
    if rest[pages * _DIGEST :] != _compute_seal(digests, key):
        raise DamagedPages
    first, stop = at // PAGE, -(-(at + count) // PAGE)
    content = os.pread(handle, min(stop * PAGE, size) - first * PAGE, first * PAGE)
    view = memoryview(content)
    for page in range(first, stop):
        found = _compute_digest(view[(page - first) * PAGE : (page + 1 - first) * PAGE])
        if found != digests[page * _DIGEST : (page + 1) * _DIGEST]:
            raise DamagedPages
    return content[at - first * PAGE : at - first * PAGE + count]


def _compute_digest(page: memoryview) -> bytes:
    return blake2b(page, digest_size=_DIGEST).digest()


def _compute_seal(digests: bytes, key: str) -> bytes:
    return blake2b(digests, digest_size=_SEAL, key=key.encode()[:64]).digest()
