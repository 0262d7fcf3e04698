"""How fast arms are beside one another: warmed up until stable, interleaved, with an interval, or with no verdict."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Protocol

from halfstep import clock

Verdict = Literal["faster", "slower", "can't tell"]
Progress = Callable[[int, int], None]
STABLE = 0.05
"""Arms are warm when their last times differ by no more than this share."""
_IN_A_ROW = 3
_MOST_CALLS = 20


class Timed(Protocol):
    """An arm, in this process or in one of its own."""

    def seconds(self, steps: int = 1) -> float: ...


@dataclass(frozen=True)
class Speed:
    """How one arm compares with the baseline: medians over pairs, with the median's 95 % interval."""

    seconds: float
    """Of one update."""
    speedup: float
    """Times as fast as the baseline."""
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> Verdict:
        """None is given where the interval holds 1: the two may be equally fast."""
        if self.low > 1.0:
            return "faster"
        return "slower" if self.high < 1.0 else "can't tell"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def warm(arm: Timed, *, seconds: float = 30.0) -> float:
    """Step until three times in a row agree, or the time or the calls are used up; gives the last time."""
    deadline = time.perf_counter() + seconds
    last: list[float] = []
    for _ in range(_MOST_CALLS):
        last = [*last, arm.seconds()][-_IN_A_ROW:]
        stable = len(last) == _IN_A_ROW and max(last) - min(last) <= STABLE * statistics.median(last)
        if stable or time.perf_counter() >= deadline:
            break
    return last[-1]


def race(
    arms: Mapping[str, Timed],
    *,
    baseline: str,
    pairs: int = 60,
    seconds: float = float("inf"),
    steps: int = 1,
    progress: Progress | None = None,
) -> dict[str, Speed]:
    """Time warm arms against the baseline, in turns, until there are enough pairs or the time is up.

    Ctrl-C ends it with what there is, if there is anything.
    """
    deadline = time.perf_counter() + seconds
    rounds: list[dict[str, float]] = []
    try:
        for times in clock.interleaved({name: partial(arm.seconds, steps) for name, arm in arms.items()}, pairs):
            rounds.append(times)
            if progress is not None:
                progress(len(rounds), pairs)
            if time.perf_counter() >= deadline:
                break
    except KeyboardInterrupt:
        if not rounds:
            raise
    return {name: _speed(rounds, name, baseline) for name in arms}


def _speed(rounds: list[dict[str, float]], name: str, baseline: str) -> Speed:
    each = [times[baseline] / times[name] for times in rounds]
    low, high = clock.median_interval(each)
    own = statistics.median(times[name] for times in rounds)
    return Speed(own, statistics.median(each), low, high, len(each))
