"""Keep a few hundred points of a curve of any length: the extremes of every span, and both ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from halfstep.page import is_drawable

BUCKETS = 200
"""Spans of equal length that an axis is divided in; each keeps its least and its greatest value."""
MOST_POINTS = 2 * BUCKETS + 2


class AttemptPoint(NamedTuple):
    """A number, and the attempt that it belongs to."""

    attempt: int
    value: float


class AttemptSpans(NamedTuple):
    """The attempts of a run from the first to the last, divided in spans of equal length."""

    first: int
    width: int

    @classmethod
    def of(cls, first: int, last: int, most: int = BUCKETS) -> AttemptSpans:
        """Return at most `most` spans of equal length, from one attempt to another."""
        return cls(first, max(1, -(-(last - first + 1) // most)))

    def bucket(self, attempt: int) -> int:
        """Return the number of the span of an attempt; those before the first belong to the first span."""
        return (attempt - self.first) // self.width if attempt > self.first else 0

    def begin(self, attempt: int) -> int:
        """Return the first attempt of the span of an attempt."""
        return self.first + self.bucket(attempt) * self.width


class ThinnedCurve:
    """A curve over attempts, at most `MOST_POINTS` of it: the extremes of every span, the first and the last point.

    Points are added from the last attempt to the first. Numbers that are not finite are counted, and are no points.
    """

    def __init__(self, axis: AttemptSpans) -> None:
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
    def points(self) -> list[AttemptPoint]:
        """Return the points that were kept, in the order of their attempts."""
        kept = {point for both in self._extremes.values() for point in both}
        kept |= {point for point in (self._first, self._last) if point is not None}
        return [AttemptPoint(*point) for point in sorted(kept)]


def thin_curve_points(x: Sequence[float], y: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """Return the points that a chart can draw; of more than `2 * most`, the extremes of `most` spans and both ends."""
    # Steps with a non-finite loss are marked as skipped; a gap for each would hide the points between them.
    points = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if is_drawable(b)]
    if len(points) > 2 * most:
        values = [value for _, value in points]
        kept = ThinnedCurve(AttemptSpans.of(0, len(points) - 1, most))
        width = kept.axis.width
        for begin in reversed(range(0, len(points), width)):
            indices = range(begin, min(begin + width, len(points)))[::-1]
            kept.add_span(indices, values[begin : begin + width][::-1])
        points = [points[point.attempt] for point in kept.points]
    return [a for a, _ in points], [b for _, b in points]
