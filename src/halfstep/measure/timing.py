"""Compare the speed of candidates: warmed up until stable, interleaved, with an interval or without a verdict."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

import torch

from halfstep import clock
from halfstep.json_data import JsonResult
from halfstep.measure.worker_process import CandidateFailed, CandidateTooSlow
from halfstep.status_line import OnProgress


class Stopwatch:
    """A timer for one device. Accelerators run asynchronously, so they are timed with events recorded on the device."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type in ("cuda", "xpu", "mps")
        self._device = device

    def seconds(self, call: Callable[[], object], calls: int = 1) -> float:
        """Return the seconds of one call, averaged over `calls` in a row."""
        if not self._events:
            return clock.measure_call_seconds(call, calls)
        begin, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        # Work queued earlier must not be counted.
        torch.accelerator.synchronize(self._device)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / calls


Verdict = Literal["faster", "slower", "can't tell"]
STABLE = 0.05
"""A candidate is warm when its last times differ by no more than this share of their median."""
_IN_A_ROW = 3
_MOST_CALLS = 20


Name = TypeVar("Name")
"""The key of a candidate: its name, or its setting."""


class TimedCandidate(Protocol):
    """A candidate in this process or in a separate one."""

    def seconds(self, steps: int = 1) -> float: ...


@dataclass(frozen=True)
class Speed(JsonResult):
    """The speed of a candidate relative to the baseline: medians over pairs, with the median's 95 % interval.

    With fewer than `clock.FEWEST_FOR_INTERVAL` pairs, `low` and `high` are the range.
    """

    json_keys: ClassVar[tuple[str, ...]] = ("seconds", "speedup", "low", "high", "pairs", "verdict")
    seconds: float
    """Seconds of one update."""
    speedup: float
    """Throughput relative to the baseline."""
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> Verdict:
        """Return "can't tell" if the interval contains 1 or there are too few pairs for an interval."""
        if self.pairs < clock.FEWEST_FOR_INTERVAL:
            return "can't tell"
        if self.low > 1.0:
            return "faster"
        return "slower" if self.high < 1.0 else "can't tell"


def warm_up_candidate(
    candidate: TimedCandidate, *, seconds: float = 30.0, now: Callable[[], float] = time.perf_counter
) -> float:
    """Step until three times in a row agree, or the time or the calls run out; return the last time."""
    deadline = now() + seconds
    last: list[float] = []
    # Calls are capped: a candidate that never settles, as on a busy machine, is timed all the same.
    for _ in range(_MOST_CALLS):
        last = [*last, candidate.seconds()][-_IN_A_ROW:]
        stable = len(last) == _IN_A_ROW and max(last) - min(last) <= STABLE * statistics.median(last)
        if stable or now() >= deadline:
            break
    return last[-1]


@dataclass(frozen=True)
class TimedRace(Generic[Name]):
    """The result of a race."""

    speeds: dict[Name, Speed]
    """The speed of every candidate timed at least once against the baseline."""
    interrupted: bool = False
    """Whether Ctrl-C ended it."""
    failed: dict[Name, CandidateFailed | CandidateTooSlow] = field(default_factory=dict)
    """Candidates that failed, and why; they may have a speed from earlier turns."""


def race_candidates(
    candidates: Mapping[Name, TimedCandidate],
    *,
    baseline: Name,
    pairs: int = 60,
    seconds: float = float("inf"),
    steps: int = 1,
    progress: OnProgress | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> TimedRace[Name]:
    """Time warm candidates against the baseline, interleaved, until there are enough pairs or the time is up.

    Ctrl-C ends the race with the turns so far and sets `interrupted`; a candidate that times out ends it too. A
    candidate that fails leaves the race. If the baseline fails, its error is raised.
    """
    running = _RunningRace(candidates, baseline, steps)
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
    return TimedRace(
        {name: speed for name in candidates if (speed := running.speed(name))}, interrupted, running.failed
    )


class _RunningRace(Generic[Name]):
    """A race in progress."""

    def __init__(self, candidates: Mapping[Name, TimedCandidate], baseline: Name, steps: int) -> None:
        self._candidates, self._baseline, self._steps = dict(candidates), baseline, steps
        self._turns: list[dict[Name, float]] = []
        self.failed: dict[Name, CandidateFailed | CandidateTooSlow] = {}
        self.is_over = False

    def take_turn(self, turn: int) -> None:
        """Time every candidate once; an incomplete turn is not counted."""
        times: dict[Name, float] = {}
        # The order changes from turn to turn, so that a drift of the machine affects all candidates equally.
        for name in clock.choose_turn_order(list(self._candidates), turn):
            try:
                times[name] = self._candidates[name].seconds(self._steps)
            except CandidateTooSlow as error:
                # A timeout means that the common time is up, so the race ends for all.
                self.failed[name], self.is_over = error, True
                return
            except CandidateFailed as error:
                if name == self._baseline:
                    raise
                self.failed[name] = error
                del self._candidates[name]
                self.is_over = len(self._candidates) == 1
        self._turns.append(times)

    def speed(self, name: Name) -> Speed | None:
        both = [times for times in self._turns if name in times]
        if not both:
            return None
        # Ratios within a turn first, then their median: what slows the machine down in a turn cancels out.
        each = [times[self._baseline] / times[name] for times in both]
        low, high = clock.compute_median_interval(each)
        own = statistics.median(times[name] for times in both)
        return Speed(own, statistics.median(each), low, high, len(each))
