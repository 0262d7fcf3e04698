"""The word that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 80
"""Nobody mistypes a word longer than this; comparing one would only cost time."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word with the fewest edits to `word`, where that is few; the first of equals."""
    if len(word) > LONGEST:
        return None
    best = min(((edits(word.lower(), other.lower()), i, other) for i, other in enumerate(known)), default=None)
    return best[2] if best and best[0] <= allowed_edits(best[2]) else None


def allowed_edits(word: str) -> int:
    return max(1, len(word) // 3)


def edits(one: str, other: str) -> int:
    """Letters to insert, delete, replace or swap with a neighbour."""
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
