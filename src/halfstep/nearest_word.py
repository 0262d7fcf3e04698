"""Find the known word that was most likely meant: the one with the fewest edits."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 80
"""The length above which words are not compared: edit distance is quadratic, and no setting has such a name."""


def find_nearest_word(word: str, known: Iterable[str]) -> str | None:
    """Return the known word with the fewest edits to `word`, or None if that is too many; the first of equals."""
    if len(word) > LONGEST:
        return None
    # The index breaks ties, so that the first of equals wins and words are never compared.
    best = min(((count_edits(word.lower(), other.lower()), i, other) for i, other in enumerate(known)), default=None)
    return best[2] if best and best[0] <= count_allowed_edits(best[2]) else None


def count_allowed_edits(word: str) -> int:
    """Return how many edits still count as a typing error."""
    return max(1, len(word) // 3)


def count_edits(one: str, other: str) -> int:
    """Return the number of letters to insert, delete, replace or swap with a neighbor."""
    before: list[int] = []
    above = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, against in enumerate(other, 1):
            cost = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == against:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, above = above, row
    return above[-1]
