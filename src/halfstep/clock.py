"""Measure time as ratios of paired, interleaved calls, with their noise."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

Name = TypeVar("Name")
FEWEST_FOR_INTERVAL = 6
"""The range of six values contains the median with 97 % probability, that of five with 94 %."""


@dataclass(frozen=True)
class TimeRatio:
    """The time of one candidate relative to the baseline, over paired measurements."""

    median: float
    low: float
    high: float
    pairs: int
    added_seconds: float
    """Median of the paired differences: the seconds that one call costs more than the baseline's."""


def measure_call_seconds(call: Callable[[], object], calls: int) -> float:
    """Return the wall time of one call, averaged over `calls` consecutive calls."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def read_queued_seconds() -> float:
    """Return how long this thread has been ready to run and had no core so far; 0 if the system does not count it.

    On a busy machine a call takes longer by this time, which is neither computing nor waiting for a disk.
    """
    try:
        # CPU time, time in the run queue, time slices; in nanoseconds.
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def read_clock_without_queue() -> float:
    """Return the seconds of a clock that stands still while this thread waits for a core."""
    return time.perf_counter() - read_queued_seconds()


def iterate_interleaved_times(timers: Mapping[str, Callable[[], float]], turns: int) -> Iterator[dict[str, float]]:
    """Run every timer once per turn, in alternating order, and yield the times of each turn by name."""
    for turn in range(turns):
        yield {name: timers[name]() for name in choose_turn_order(list(timers), turn)}


def choose_turn_order(names: Sequence[Name], turn: int) -> list[Name]:
    """Return the order of this turn: it rotates every two turns, and every second turn is reversed."""
    # Over a full cycle each candidate comes first equally often, and before and after each other one equally often: a
    # drifting clock speed or a warm cache then favors none of them.
    shift = turn // 2 % len(names)
    shifted = [*names[shift:], *names[:shift]]
    return shifted[::-1] if turn % 2 else shifted


def measure_time_ratios(
    arms: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    pairs: int = 60,
    calls: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, TimeRatio]:
    """Measure every candidate in `arms` against the baseline; each round times all of them once.

    `calls` calls are averaged for one time, and `progress` is called with (rounds done, rounds in total).
    """
    timers = {name: partial(measure_call_seconds, arm, calls) for name, arm in arms.items()}
    rounds = []
    for times in iterate_interleaved_times(timers, pairs):
        rounds.append(times)
        if progress is not None:
            progress(len(rounds), pairs)
    base = [times[baseline] for times in rounds]
    return {name: compare_paired_times([times[name] for times in rounds], base) for name in arms if name != baseline}


def compute_median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, from order statistics alone.

    With fewer values than `FEWEST_FOR_INTERVAL` it is their whole range, which has a lower confidence.
    """
    each = sorted(values)
    # The number of values below the median is binomial(n, 1/2): 0.98 sqrt(n) is 1.96 of its standard deviations.
    # Rounded outward: that many values lie outside on each side, so that the confidence is never below 95 %.
    cut = max(0, math.floor(len(each) / 2 - 0.98 * math.sqrt(len(each))) - 1)
    return each[cut], each[-1 - cut]


def compare_paired_times(arm: Sequence[float], base: Sequence[float]) -> TimeRatio:
    """Return the ratio of times that were measured in pairs."""
    # Ratios within a pair: a slow moment of the machine hits both of its calls and cancels out.
    each = sorted(a / b for a, b in zip(arm, base, strict=True))
    # low and high enclose the middle 80 % of the pairs.
    tail = len(each) // 10
    return TimeRatio(
        median=statistics.median(each),
        low=each[tail],
        high=each[-1 - tail],
        pairs=len(each),
        added_seconds=statistics.median(a - b for a, b in zip(arm, base, strict=True)),
    )
