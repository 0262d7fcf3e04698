"""Decide when a save is due by time, and propose how often to save: from what saves cost, and how often runs fail."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from halfstep.numbers import format_counted_noun

MINUTE, HOUR = 60.0, 3600.0
FIRST = 10.0
"""Minutes to the first save by time with `auto`, before any save was timed."""


class FailureRate(NamedTuple):
    """How often a large run stopped, and where that was reported."""

    name: str
    stops: int
    days: int
    gpus: int
    source: str


PUBLISHED = (
    FailureRate(
        "Llama 3 405B",
        stops=419,
        days=54,
        gpus=16384,
        source="The Llama 3 Herd of Models, arXiv 2407.21783, 3.3.4: unexpected interruptions",
    ),
    FailureRate(
        "OPT-175B", stops=40, days=14, gpus=992, source="metaseq, OPT-175B chronicles: 40+ restarts in two weeks"
    ),
)
"""Rates of failure that large runs reported, taken as proportional to the number of GPUs."""
STATED = PUBLISHED[1]
"""The rate that a run is proposed for: the higher one, since a save too many costs less than an hour's work lost."""


def estimate_failure_interval(rate: FailureRate, world: int) -> float:
    """Return the mean seconds between two failures of so many ranks."""
    return rate.days * 24 * HOUR * rate.gpus / rate.stops / world


def compute_save_interval(stall: float, between: float) -> float:
    """Return the seconds from save to save with which the least time is lost (Young, Daly).

    Saves cost `stall` an interval, and a failure costs half an interval on average: the sum is least at
    sqrt(2 x stall x mean time between failures).
    """
    return math.sqrt(2 * stall * between)


class SaveClock:
    """The time since the last save. Rank 0's clock decides for all ranks; its answer travels with the step's votes."""

    def __init__(
        self, minutes: float | Literal["auto"] | None, world: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._minutes, self._world, self._clock = minutes, world, clock
        self._began = self._last = clock()
        self._blocked: list[float] = []

    def saved(self) -> None:
        """Restart the timer: a save was started, for any reason."""
        self._last = self._clock()

    def timed(self, blocked: float) -> None:
        """Record for how long a save kept the training waiting."""
        self._blocked.append(blocked)

    @property
    def is_due(self) -> bool:
        """Whether a save is due by the time that has passed."""
        return self._minutes is not None and self._clock() - self._last >= self._every()

    @property
    def interval(self) -> float | None:
        """The seconds from save to save that lose the least; None before a save was timed."""
        if not self._blocked:
            return None
        return compute_save_interval(self._stall, estimate_failure_interval(STATED, self._world))

    def proposal(self) -> str | None:
        """Return a sentence with the interval, for a run that has been longer than it and does not choose it itself."""
        interval = self.interval
        if interval is None or self._minutes == "auto" or self._clock() - self._began < interval:
            return None
        hours = estimate_failure_interval(STATED, self._world) / HOUR
        return (
            f"saves kept the training waiting for {self._stall:.2g} s each: with a failure in {hours:,.0f} h, the rate "
            f"of {STATED.name} on {format_counted_noun(self._world, 'rank')}, the least time is lost "
            f"with checkpoint.every_minutes={interval / MINUTE:.2g} (Young, Daly)"
        )

    def _every(self) -> float:
        if isinstance(self._minutes, str):
            # A minute at the least: below it, small states would be written all the time.
            return FIRST * MINUTE if self.interval is None else max(MINUTE, self.interval)
        return (self._minutes or math.inf) * MINUTE

    @property
    def _stall(self) -> float:
        # The first save allocates the buffers of all later ones.
        return statistics.median(self._blocked[1:] or self._blocked)
