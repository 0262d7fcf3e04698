"""How fast arms are beside one another: warmed up until stable, interleaved, with an interval, or with no verdict."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from halfstep import clock
from halfstep.measure.process import ArmFailed, ArmTooSlow

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
    """How one arm compares with the baseline: medians over pairs, with the median's 95 % interval, or their range."""

    seconds: float
    """Of one update."""
    speedup: float
    """Times as fast as the baseline."""
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> Verdict:
        """None is given where the interval holds 1, for the two may be equally fast; nor from too few pairs."""
        if self.pairs < clock.FEWEST_FOR_INTERVAL:
            return "can't tell"
        if self.low > 1.0:
            return "faster"
        return "slower" if self.high < 1.0 else "can't tell"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def warm(arm: Timed, *, seconds: float = 30.0, now: Callable[[], float] = time.perf_counter) -> float:
    """Step until three times in a row agree, or the time or the calls are used up; gives the last time."""
    deadline = now() + seconds
    last: list[float] = []
    for _ in range(_MOST_CALLS):
        last = [*last, arm.seconds()][-_IN_A_ROW:]
        stable = len(last) == _IN_A_ROW and max(last) - min(last) <= STABLE * statistics.median(last)
        if stable or now() >= deadline:
            break
    return last[-1]


@dataclass(frozen=True)
class Race:
    """What a race came to."""

    speeds: dict[str, Speed]
    """Of every arm that was timed beside the baseline at least once."""
    interrupted: bool = False
    """Ctrl-C ended it."""
    failed: dict[str, ArmFailed | ArmTooSlow] = field(default_factory=dict)
    """Arms that could not go on, and why; they may have a speed from before."""


def race(
    arms: Mapping[str, Timed],
    *,
    baseline: str,
    pairs: int = 60,
    seconds: float = float("inf"),
    steps: int = 1,
    progress: Progress | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Race:
    """Time warm arms against the baseline, in turns, until there are enough pairs or the time is up.

    Ctrl-C ends it with what there is, and the result says so; so does an arm that has no time left for its answer.
    An arm that fails leaves the race. There is no race without the baseline: where it fails, its error is raised.
    """
    running = _Running(arms, baseline, steps)
    deadline = now() + seconds
    interrupted = False
    try:
        for turn in range(pairs):
            running.take_turn(turn)
            if progress is not None:
                progress(turn + 1, pairs)
            if now() >= deadline or running.is_over:
                break
    except KeyboardInterrupt:
        interrupted = True
    return Race({name: speed for name in arms if (speed := running.speed(name))}, interrupted, running.failed)


class _Running:
    """A race under way."""

    def __init__(self, arms: Mapping[str, Timed], baseline: str, steps: int) -> None:
        self._arms, self._baseline, self._steps = dict(arms), baseline, steps
        self._turns: list[dict[str, float]] = []
        self.failed: dict[str, ArmFailed | ArmTooSlow] = {}
        self.is_over = False

    def take_turn(self, turn: int) -> None:
        """A turn that is broken off is not counted."""
        times: dict[str, float] = {}
        for name in clock.order(list(self._arms), turn):
            try:
                times[name] = self._arms[name].seconds(self._steps)
            except ArmTooSlow as error:
                self.failed[name], self.is_over = error, True
                return
            except ArmFailed as error:
                if name == self._baseline:
                    raise
                self.failed[name] = error
                del self._arms[name]
                self.is_over = len(self._arms) == 1
        self._turns.append(times)

    def speed(self, name: str) -> Speed | None:
        both = [times for times in self._turns if name in times]
        return _speed(both, name, self._baseline) if both else None


def _speed(rounds: list[dict[str, float]], name: str, baseline: str) -> Speed:
    each = [times[baseline] / times[name] for times in rounds]
    low, high = clock.median_interval(each)
    own = statistics.median(times[name] for times in rounds)
    return Speed(own, statistics.median(each), low, high, len(each))
