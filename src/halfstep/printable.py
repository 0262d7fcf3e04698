"""Make foreign text safe to print: file names, classes, recipes, messages of other code.

An escape sequence would move the cursor or set the title, a bidirectional control character turns `exe.png` into
`gnp.exe`, and a line break fakes a line of output.
"""

from __future__ import annotations

_BLANK = frozenset("\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029\xa0")


def escape_unprintable(text: object) -> str:
    """Return the same lines with a visible code for each character that is not printable."""
    return "".join(c if c == "\n" or c.isprintable() else _escape_character(c) for c in str(text))


def escape_to_one_line(text: object) -> str:
    """Return the same on one line, with spaces for line breaks."""
    return "".join(c if c.isprintable() else " " if c in _BLANK else _escape_character(c) for c in str(text))


def truncate_text(text: str, longest: int) -> str:
    """Return the text, or its beginning and an ellipsis where it is longer."""
    return text if len(text) <= longest else text[: max(longest - 1, 0)] + "…"


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
