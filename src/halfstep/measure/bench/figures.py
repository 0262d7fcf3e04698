"""Figures over seeds: how much faster with which certainty, and how long until the loss of fp32."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from halfstep.measure.bench.results import RunResult
from halfstep.measure.parity import mean_interval
from halfstep.measure.timing import Speed, Verdict

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Gain:
    """Times as fast as strict fp32, with the 95 % interval where there is one."""

    times: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def verdict(self) -> Verdict:
        """None is given where the interval holds 1, and where there is no interval."""
        if self.low is None or self.high is None or self.low <= 1.0 <= self.high:
            return "can't tell"
        return "faster" if self.low > 1.0 else "slower"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def gain_of(base: Sequence[RunResult], arm: Sequence[RunResult]) -> Gain | None:
    """By seeds in pairs: a run's epochs share its luck, so each run counts once, however many epochs it has."""
    fast = {run.seed: run.samples_per_second for run in base}
    logs = [
        math.log(run.samples_per_second / there)
        for run in arm
        if run.samples_per_second and (there := fast.get(run.seed))
    ]
    if not logs:
        return None
    low, high = _interval(logs)
    ends = [None if end is None else math.exp(min(end, 700.0)) for end in (low, high)]
    return Gain(math.exp(statistics.mean(logs)), ends[0], ends[1], len(logs))


def gain_of_race(speed: Speed) -> Gain:
    return Gain(speed.speedup, speed.low, speed.high, speed.pairs)


@dataclass(frozen=True)
class Raced:
    """What timing arms beside one another came to."""

    gains: Mapping[str, Gain]
    interrupted: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
    """Arms that did not get through the race, and why."""


@dataclass(frozen=True)
class Average:
    """A mean over seeds."""

    mean: float
    sd: float | None
    low: float | None
    high: float | None


def average(values: Sequence[float | None]) -> Average | None:
    """Of those that are numbers; None where none is."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    low, high = _interval(known)
    return Average(statistics.mean(known), statistics.stdev(known) if len(known) > 1 else None, low, high)


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    return mean_interval(values, CONFIDENCE) if len(values) > 1 else (None, None)


@dataclass(frozen=True)
class TimeToLoss:
    """Until an arm first had the loss that fp32 with the same seed ended with."""

    seconds: float | None
    """The median of the runs that got there."""
    reached: int
    runs: int


def time_to_loss(base: Sequence[RunResult], arm: Sequence[RunResult]) -> TimeToLoss | None:
    """By seeds in pairs; None where no losses are known."""
    goals = {run.seed: run.curve[-1][1] for run in base if run.curve and math.isfinite(run.curve[-1][1])}
    found = [_first_time(run, goals[run.seed]) for run in arm if run.curve and run.seed in goals]
    if not found:
        return None
    times = [time for time in found if time is not None]
    return TimeToLoss(statistics.median(times) if times else None, len(times), len(found))


def _first_time(run: RunResult, goal: float) -> float | None:
    return next((time for time, loss in run.curve if loss <= goal), None)


def smoothed(curve: Sequence[tuple[float, float]], over: int) -> tuple[tuple[float, float], ...]:
    """Each loss the mean of the last `over`, and none before there are so many."""
    return tuple(
        (curve[end - 1][0], statistics.fmean(loss for _, loss in curve[end - over : end]))
        for end in range(over, len(curve) + 1)
    )
