"""Numbers of the journal, and a bounded sample of any number of events and names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

MOST_NAMES = 32
"""Maximum number of distinct reasons and metrics; a file of another program may have any number."""
OTHER = "other"

T = TypeVar("T")
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The words of the journal for numbers that JSON has no sign for."""


def parse_journal_number(value: object) -> float:
    """Return a number of the journal, which may be a word; NaN for anything else, such as a missing field."""
    if type(value) is float:
        return value
    if type(value) is int:
        # An integer of any length is valid JSON.
        return float(value) if abs(value) < 2**1023 else math.nan
    return WORDS.get(value, math.nan) if isinstance(value, str) else math.nan


class Subsample(Generic[T]):
    """Any number of things, all of them up to `most`, else at most so many, evenly over their order, and the last."""

    def __init__(self, most: int) -> None:
        self._most, self._every = most, 1
        self._kept: list[T] = []
        self._last: T | None = None
        self.count = 0

    def add(self, thing: T) -> None:
        """Add the next one."""
        if self.count % self._every == 0:
            self._kept.append(thing)
            if len(self._kept) > self._most:
                # From now on half as many are kept, and those that were are thinned to match.
                del self._kept[1::2]
                self._every *= 2
        self.count += 1
        self._last = thing

    @property
    def kept(self) -> list[T]:
        """Return the things that were kept, in order."""
        is_last_kept = not self.count or (self.count - 1) % self._every == 0
        return self._kept if is_last_kept else [*self._kept, self._last]  # type: ignore[list-item]


class ValuesByName(Generic[T]):
    """Values by name, at most `MOST_NAMES` of them; further names share the one of `OTHER`."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.values: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self.values:
            name = name if len(self.values) < MOST_NAMES - 1 else OTHER
        return self.values.setdefault(name, self._make())
