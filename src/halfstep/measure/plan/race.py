"""Race candidates: a few are open at a time, warmed up, and timed in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from halfstep.host_memory import read_free_memory
from halfstep.measure.conditions import Conditions
from halfstep.measure.setting import StepSetting
from halfstep.measure.timing import TimedRace, race_candidates, warm_up_candidate
from halfstep.measure.worker_process import CandidateFailed, CandidateInfo
from halfstep.numbers import format_bytes

MARGIN = 0.1
"""Share of the free memory that is left alone: allocators round up, and predictions are not exact."""

PredictPeak = Callable[[StepSetting], int]


class MemoryFit:
    """Free memory, and the predicted memory of settings. Without a prediction everything is assumed to fit."""

    def __init__(self, free: int | None, predict: PredictPeak | None = None) -> None:
        self.free = free
        self._predict = predict
        self._known: dict[StepSetting, int | None] = {}

    def peak(self, setting: StepSetting) -> int | None:
        """Return the bytes of one update, without compilation; None if they could not be predicted."""
        # Predictions are for eager code, so both settings share one.
        setting = replace(setting, compile=False)
        if setting not in self._known:
            self._known[setting] = self._predict_peak(setting)
        return self._known[setting]

    def fits(self, *settings: StepSetting) -> bool:
        """Return whether all settings fit at once."""
        peaks = [self.peak(setting) or 0 for setting in settings]
        return self.free is None or sum(peaks) <= self.free * (1 - MARGIN)

    def why_not(self, setting: StepSetting) -> str:
        """Return the required and the free memory as text."""
        return f"it would take {format_bytes(self.peak(setting) or 0)}, and {format_bytes(self.free or 0)} are free"

    def _predict_peak(self, setting: StepSetting) -> int | None:
        if self._predict is None:
            return None
        try:
            return self._predict(setting)
        except Exception:  # a model that cannot be predicted can still be measured
            return None


def find_free_memory(device: torch.device) -> int | None:
    """Return the free memory of a device; None if it is unknown."""
    if device.type == "cpu":
        return read_free_memory()
    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except (AttributeError, RuntimeError):  # an older torch, or a device without this query
        return None


class TimeBudget:
    """A time limit in seconds, counted from construction."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = seconds
        self.now, self._begin = now, now()

    @property
    def spent(self) -> float:
        return self.now() - self._begin

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.spent)


class RacingCandidate(Protocol):
    """The interface of `CandidateProcess`."""

    def open(self, limit: float | None = None) -> CandidateInfo: ...
    def seconds(self, steps: int = 1, limit: float | None = None) -> float: ...
    def trail(self, steps: int) -> list[float]: ...
    def losses(self, steps: int, limit: float | None = None) -> list[float]: ...
    def graphs(self) -> int: ...
    def nudge(self, share: float, seed: int = 1) -> None: ...
    def close(self) -> None: ...


MakeCandidate = Callable[[StepSetting], RacingCandidate]


SHORTEST_TURN = 0.05
"""Seconds. Shorter updates are timed several in a row, so that the clock's error is negligible."""
MOST_STEPS = 50

Tell = Callable[[], None]


class _LimitedCandidate:
    """A candidate whose answers are limited by the remaining time of the plan."""

    def __init__(self, candidate: RacingCandidate, budget: TimeBudget) -> None:
        self._candidate, self._budget = candidate, budget

    def seconds(self, steps: int = 1) -> float:
        return self._candidate.seconds(steps, self._budget.left)


class Race:
    """The open candidates by setting. A candidate stays open until `leave`."""

    def __init__(self, make_candidate: MakeCandidate, budget: TimeBudget, tell: Tell = lambda: None) -> None:
        self._make_candidate, self._budget, self._tell = make_candidate, budget, tell
        self._open: dict[StepSetting, RacingCandidate] = {}
        self._updates: dict[StepSetting, float] = {}
        self.conditions: Conditions = {}

    def enter(self, setting: StepSetting, limit: float | None = None) -> None:
        """Open a candidate within `limit` seconds; it is closed if that fails."""
        candidate = self._open[setting] = self._make_candidate(setting)
        self._tell()
        opened = self._or_leave(setting, lambda: candidate.open(limit))
        self.conditions = self.conditions or opened["conditions"]

    def first_step(self, setting: StepSetting, limit: float | None = None) -> float:
        """Take the first update within `limit` seconds, including compilation; return its seconds.

        Raises `CandidateFailed` if torch.compile compiled nothing.
        """
        candidate = self._open[setting]
        self._tell()
        seconds = float(self._or_leave(setting, lambda: candidate.seconds(1, limit)))
        # torch.compile silently skips some models, such as a bare nn.Sequential in torch 2.13.
        if setting.compile and not candidate.graphs():
            self.leave(setting)
            raise CandidateFailed("torch.compile silently skipped the model")
        return seconds

    def _or_leave(self, setting: StepSetting, work: Callable[[], Any]) -> Any:
        try:
            return work()
        # Also for Ctrl-C: no process may be left behind.
        except BaseException:
            self.leave(setting)
            raise

    def warm(self, setting: StepSetting, seconds: float) -> float:
        """Step until times agree; return the last one. A candidate that times out is closed."""
        self._tell()
        candidate = _LimitedCandidate(self._open[setting], self._budget)
        found = float(
            self._or_leave(setting, lambda: warm_up_candidate(candidate, seconds=seconds, now=self._budget.now))
        )
        self._updates[setting] = found
        return found

    def turn_seconds(self, *updates: float) -> float:
        """Return the seconds of one turn of candidates with these update times."""
        return _choose_steps_per_turn(max(updates)) * sum(updates)

    def race(self, settings: Sequence[StepSetting], *, baseline: StepSetting, pairs: int) -> TimedRace[StepSetting]:
        """Time open and warm candidates in turns until there are enough pairs or the time is up; close the failed."""
        entered = {setting: _LimitedCandidate(self._open[setting], self._budget) for setting in (baseline, *settings)}
        found = race_candidates(
            entered,
            baseline=baseline,
            pairs=pairs,
            seconds=self._budget.left,
            steps=_choose_steps_per_turn(max(self._updates[setting] for setting in entered)),
            progress=lambda *_: self._tell(),
            now=self._budget.now,
        )
        for setting in found.failed:
            self.leave(setting)
        return found

    def trail(self, setting: StepSetting, steps: int) -> tuple[float, ...]:
        """Return the losses of its first `steps` updates."""
        return tuple(self._open[setting].trail(steps))

    def take_updates(self, setting: StepSetting, steps: int) -> None:
        """Take up to `steps` more updates of an open candidate, as long as there is time."""
        for _ in range(steps):
            if self._budget.left:
                self._tell()
                self._open[setting].losses(1, self._budget.left)

    def nudged_losses(self, setting: StepSetting, *, share: float, steps: int, seed: int) -> list[float]:
        """Return up to `steps` losses of a new candidate with perturbed weights, which is then closed."""
        candidate = self._make_candidate(setting)
        try:
            candidate.open(self._budget.left)
            candidate.nudge(share, seed)
            losses: list[float] = []
            # One update at a time, to check the time left in between.
            while len(losses) < steps and self._budget.left:
                self._tell()
                losses += candidate.losses(1, self._budget.left)
            return losses
        finally:
            candidate.close()

    def is_open(self, setting: StepSetting) -> bool:
        """Return whether the candidate is open."""
        return setting in self._open

    def leave(self, setting: StepSetting) -> None:
        """Close the candidate, if it is open."""
        candidate = self._open.pop(setting, None)
        if candidate is not None:
            candidate.close()

    def close(self) -> None:
        """Close all candidates."""
        for setting in list(self._open):
            self.leave(setting)


def _choose_steps_per_turn(slowest: float) -> int:
    """Return the updates per turn, the same for all candidates. The slowest decides, or turns would take too long."""
    return min(MOST_STEPS, max(1, math.ceil(SHORTEST_TURN / max(slowest, 1e-9))))
