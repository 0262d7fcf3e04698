"""Bytes as a person reads them."""

from __future__ import annotations


def size_in_words(size: float) -> str:
    """In the largest unit that there is one of."""
    for unit, words in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {words}" if size < 100 * unit else f"{size / unit:.0f} {words}"
    return f"{size:.0f} B"
