"""Keep a few hundred of any number of points: extremes, both ends, and a sample of what happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

BUCKETS = 200
"""Spans of equal length that an axis is divided in; each keeps its least and its greatest value."""
MOST_POINTS = 2 * BUCKETS + 2
MOST_NAMES = 32
"""Names that are told apart, of reasons and of metrics; a file of another program may have any number."""
OTHER = "other"

T = TypeVar("T")
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The words of the journal for numbers that JSON has no sign for."""


class Point(NamedTuple):
    """A number, and the attempt that it belongs to."""

    attempt: int
    value: float


class Axis(NamedTuple):
    """The attempts of a run from the first to the last, divided in at most `BUCKETS` spans."""

    first: int
    width: int

    @classmethod
    def of(cls, first: int, last: int) -> Axis:
        """Return the axis from one attempt to another."""
        return cls(first, max(1, -(-(last - first + 1) // BUCKETS)))

    def bucket(self, attempt: int) -> int:
        """Return the number of the span of an attempt; those before the first belong to the first span."""
        return (attempt - self.first) // self.width if attempt > self.first else 0

    def begin(self, attempt: int) -> int:
        """Return the first attempt of the span of an attempt."""
        return self.first + self.bucket(attempt) * self.width


def number(value: object) -> float:
    """Return a number of the journal, which may be a word; NaN for anything else, such as a missing field."""
    if type(value) is float:
        return value
    if type(value) is int:
        # An integer of any length is valid JSON.
        return float(value) if abs(value) < 2**1023 else math.nan
    return WORDS.get(value, math.nan) if isinstance(value, str) else math.nan


class Thinned:
    """A curve over attempts, at most `MOST_POINTS` of it: the extremes of every span, the first and the last point.

    Points are added from the last attempt to the first. Numbers that are not finite are counted, and are no points.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.count = 0
        self.not_finite = 0
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._extremes: dict[int, tuple[tuple[int, float], tuple[int, float]]] = {}

    def add(self, attempt: int, value: float) -> None:
        """Add a point."""
        if not math.isfinite(value):
            self.not_finite += 1
            return
        self.count += 1
        point = attempt, value
        self._first = point
        self._last = self._last or point
        bucket = self.axis.bucket(attempt)
        least, greatest = self._extremes.get(bucket, (point, point))
        # Of equal values the later attempt stays, which was added first.
        if value < least[1]:
            self._extremes[bucket] = point, greatest
        elif value > greatest[1] or least is point:
            self._extremes[bucket] = least, point

    def add_span(self, attempts: Sequence[int], values: Sequence[float]) -> None:
        """Add points of one span, the last attempt first: faster than one by one."""
        finite = list(filter(math.isfinite, values))
        if len(finite) < len(values):
            self.not_finite += len(values) - len(finite)
            attempts = [attempt for attempt, value in zip(attempts, values, strict=True) if math.isfinite(value)]
        if not finite:
            return
        # These four are all that can stay of a span, in the order of the span.
        indices = {0, finite.index(min(finite)), finite.index(max(finite)), len(finite) - 1}
        for index in sorted(indices):
            self.add(attempts[index], finite[index])
        self.count += len(finite) - len(indices)

    @property
    def points(self) -> list[Point]:
        """Return the points that were kept, in the order of their attempts."""
        kept = {point for both in self._extremes.values() for point in both}
        kept |= {point for point in (self._first, self._last) if point is not None}
        return [Point(*point) for point in sorted(kept)]


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


class ByName(Generic[T]):
    """Values by name, at most `MOST_NAMES` of them; further names share the one of `OTHER`."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.values: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self.values:
            name = name if len(self.values) < MOST_NAMES - 1 else OTHER
        return self.values.setdefault(name, self._make())
