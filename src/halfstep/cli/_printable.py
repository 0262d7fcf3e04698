"""Text for a terminal that holds names and words of others."""

from __future__ import annotations


def printable(text: object) -> str:
    """The same lines, with a visible code for each character that would move a cursor or colour a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))
