"""Trials: each setting is opened, warmed up and raced against strict fp32, and becomes a cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.errors import HalfstepError, NoStepInTime, WrongUse, format_error_reason
from halfstep.measure.plan.choice import PlanCell, sort_by_speed
from halfstep.measure.plan.not_measured import NotMeasuredReason
from halfstep.measure.plan.probe import UPDATES, choose_update_count
from halfstep.measure.plan.race import MemoryFit, Race, TimeBudget
from halfstep.measure.setting import StepSetting
from halfstep.measure.timing import Speed
from halfstep.measure.worker_process import CandidateFailed, CandidateTooSlow


def build_fp32_error(name: str, error: CandidateFailed) -> WrongUse:
    """Return the error for a case whose step raises in strict fp32."""
    return WrongUse(
        f"{name} does not train in strict fp32: {error}",
        allowed="a case or recipe whose step can run repeatedly",
        do="fix it first: a failing step has nothing to compare",
    )


def build_no_step_error(name: str, seconds: float) -> NoStepInTime:
    """Return the error for a case that takes no step within the time of the plan."""
    return NoStepInTime(
        f"{name} took no step in strict fp32 within the {seconds:g} s of the plan",
        allowed="time for at least a few steps; opening the case counts, too",
        do=f"give --seconds {60 * math.ceil(seconds / 20):.0f}, or a smaller batch",
    )


def check_fp32_losses(name: str, trail: Sequence[float]) -> None:
    """Raise `WrongUse` if a loss is non-finite or no update was applied: such steps have no meaningful speed."""
    broken = next((number for number, loss in enumerate(trail, 1) if not math.isfinite(loss)), None)
    if broken is None and trail:
        return
    found = f"the loss is {trail[broken - 1]} at update {broken}" if broken else "no update was applied"
    raise WrongUse(
        f"{name} does not train in strict fp32: {found}",
        allowed="finite losses and gradients in strict fp32: speeds of failing steps mean nothing",
        do="check the data for non-finite values, and whether the learning rate is too large",
    )


TOO_SLOW = 5.0
"""Multiple of strict fp32's time above which a first step or a warm one is given up."""
SHORTEST_LIMIT = 2.0
"""Seconds that every first step gets: small models take longer to initialize than to compute."""
SHORT_PAIRS, HOPELESS_PAIRS, LEAST_FINAL, FINAL_PAIRS = FEWEST_FOR_INTERVAL, 3, FEWEST_FOR_INTERVAL, 31
HOPELESS = 1.5
"""Multiple of the fastest time above which a setting gets only a few pairs."""
WARM_UP, WARM_CALLS = 4, 20
"""Updates planned for a warm-up, and the most that it may take."""
COMPILE_SHARE, LEAST_COMPILE = 0.7, 5.0
"""Share of the spare time for the compiler, and the fewest seconds with which it is started."""


@contextmanager
def _replace_too_slow_reason(why: str) -> Iterator[None]:
    """Replace the message of `CandidateTooSlow`."""
    try:
        yield
    except CandidateTooSlow:
        raise CandidateTooSlow(why) from None


class SettingTrials:
    """The cells by setting: measured ones, and others with the reason why they were not."""

    def __init__(self, runner: Race, budget: TimeBudget, room: MemoryFit) -> None:
        self.runner, self.budget, self.room = runner, budget, room
        self.cells: dict[StepSetting, PlanCell] = {}
        self.baseline = StepSetting()
        self.judged_after = 0
        """Updates after which losses are compared, the same for all cells; 0 if there is no time for that."""
        self._opening = self._first = 0.0
        self._name = ""

    def measure_baseline(self, name: str, candidates: Sequence[StepSetting]) -> None:
        """Measure the first candidate that fits: all are strict fp32, in more and more micro-batches.

        Raises `WrongUse` if none fits, or if strict fp32 does not train.
        """
        self._name = name
        for setting in candidates:
            if self._opens_as_baseline(setting):
                break
        else:
            raise WrongUse(
                f"strict fp32 does not fit here, not even with {candidates[-1].batch} samples at a time",
                allowed="a model whose update fits into the free memory",
                do=f"see its memory with `halfstep estimate {name}`",
            )
        try:
            seconds = self.runner.warm(setting, seconds=self.budget.seconds / 6)
        except CandidateTooSlow:  # time is up: only the first step is known
            seconds = self._first
        except CandidateFailed as error:
            raise build_fp32_error(name, error) from None
        # A placeholder of one pair, which the first race replaces.
        self.cells[setting] = replace(self.cells[setting], speed=Speed(seconds, 1.0, 1.0, 1.0, 1))
        self.judged_after = choose_update_count(self.budget.seconds, self._opening, seconds)
        self._record_losses(setting)

    def _opens_as_baseline(self, setting: StepSetting) -> bool:
        self.baseline = setting
        if not self.room.fits(setting):
            self.cells[setting] = PlanCell(setting, cut=self.room.why_not(setting), peak=self.room.peak(setting))
            return False
        self.cells[setting] = PlanCell(setting, cut=NotMeasuredReason.INTERRUPTED)
        before = self.budget.spent
        try:
            self.runner.enter(setting, self.budget.left)
            self._opening = self.budget.spent - before
            self._first = self.runner.first_step(setting, self.budget.left)
        except CandidateTooSlow:
            raise build_no_step_error(self._name, self.budget.seconds) from None
        except CandidateFailed as error:
            if not error.out_of_memory:
                raise build_fp32_error(self._name, error) from None
            self.cells[setting] = PlanCell(setting, cut=str(error))
            return False
        self.cells[setting] = PlanCell(setting, first_step=self._first, peak=self.room.peak(setting))
        return True

    def announce(self, settings: Iterable[StepSetting]) -> None:
        """Add cells that are going to be measured; if Ctrl-C comes first, that is their reason."""
        for setting in settings:
            self.cells.setdefault(setting, PlanCell(setting, cut=NotMeasuredReason.INTERRUPTED))

    def is_ready(self, setting: StepSetting) -> bool:
        """Return whether a finalist is open and warm; a closed one is reopened, if there is memory and time."""
        if self.runner.is_open(setting):
            return True
        known = self.cells[setting].first_step or 0.0
        if self.budget.left < self._opening + 2 * known + LEAST_FINAL * self.turn(setting):
            return False
        if not self.room.fits(setting, *self._open()):
            return False
        try:
            self.runner.enter(setting, self.budget.left)
            self.runner.first_step(setting, self.budget.left)
            self.runner.warm(setting, seconds=self.budget.left / 4)
        except (CandidateFailed, CandidateTooSlow, HalfstepError):
            self.runner.leave(setting)
            return False
        return True

    def measure(self, setting: StepSetting) -> None:
        """Measure one more cell, or record why not."""
        # Replaced below; it stays if Ctrl-C comes first.
        self.cells[setting] = cell = PlanCell(setting, cut=NotMeasuredReason.INTERRUPTED)
        if self._limit(setting, self._opening) <= 0:
            self.cells[setting] = replace(cell, cut=NotMeasuredReason.NO_TIME)
            return
        cell = replace(cell, peak=self.room.peak(setting))
        if not self.room.fits(setting):
            self.cells[setting] = replace(cell, cut=self.room.why_not(setting))
        elif not self._makes_room_for(setting):
            self.cells[setting] = replace(cell, cut=f"{self.room.why_not(setting)} together with strict fp32")
        else:
            self._time(cell)

    def _limit(self, setting: StepSetting, opening: float = 0.0) -> float:
        """Return the seconds for the first step; 0 or less if too little would be left for the rest and the final."""
        update = self._seconds(self.baseline)
        rest = WARM_UP * update + (HOPELESS_PAIRS + LEAST_FINAL) * self.turn(self.baseline)
        # Without any rival of the baseline yet, measuring one is worth all the remaining time.
        left = self.budget.left - opening - (rest if self._has_rivals() else 2 * update)
        if setting.compile:
            return COMPILE_SHARE * left if COMPILE_SHARE * left >= LEAST_COMPILE else 0.0
        return min(left, self._first_limit(setting))

    def _first_limit(self, setting: StepSetting) -> float:
        return max(TOO_SLOW * self._first * self._samples(setting), SHORTEST_LIMIT)

    def _samples(self, setting: StepSetting) -> float:
        """Return the samples of one update relative to the baseline; above 1 only for a larger batch."""
        ours, theirs = ((found.batch or 1) * found.microbatches for found in (setting, self.baseline))
        return ours / theirs

    def _time(self, cell: PlanCell) -> None:
        setting = cell.setting
        try:
            first, last = self._first_and_last(setting)
            trail = self.runner.trail(setting, UPDATES)
        except CandidateTooSlow as error:
            self.runner.leave(setting)
            self.cells[setting] = replace(cell, cut=str(error))
            return
        except (CandidateFailed, HalfstepError) as error:
            self.runner.leave(setting)
            verb = "compile" if setting.compile else "run"
            self.cells[setting] = replace(cell, cut=f"it does not {verb}: {format_error_reason(error)}")
            return
        self.cells[setting] = replace(cell, first_step=first, trail=trail)
        hopeless = last > HOPELESS * self._seconds(self._fastest()) * self._samples(setting)
        self.race([setting], HOPELESS_PAIRS if hopeless else self._count_short_pairs(last))
        self._complete(setting, 0.1 if hopeless else 1.0)
        self._complete(self.baseline)
        self._keep_the_fastest()

    def _first_and_last(self, setting: StepSetting) -> tuple[float, float]:
        """Return the seconds of the first update and of a warm one; raise `CandidateTooSlow` with the reason."""
        with _replace_too_slow_reason(NotMeasuredReason.NO_TIME):
            self.runner.enter(setting, self.budget.left)
        limit = self._limit(setting)
        with _replace_too_slow_reason(self._too_slow_reason(setting, limit)):
            first = self.runner.first_step(setting, limit)
        slowest = TOO_SLOW * self._seconds(self.baseline) * self._samples(setting)
        with _replace_too_slow_reason(NotMeasuredReason.NO_TIME):
            last = self.runner.warm(
                setting, seconds=min(self.budget.left / 4, max(WARM_CALLS * slowest, SHORTEST_LIMIT))
            )
            if last > slowest:  # once more: other work may have delayed it
                last = min(last, self.runner.warm(setting, seconds=0.0))
        if last > slowest:
            base = self._seconds(self.baseline)
            raise CandidateTooSlow(f"an update takes {last:.3g} s once it is warm; strict fp32's takes {base:.3g} s")
        return first, last

    def _has_rivals(self) -> bool:
        return any(cell.speed for setting, cell in self.cells.items() if setting != self.baseline)

    def _count_short_pairs(self, update: float) -> int:
        """Return the number of pairs: more if they are cheap relative to opening the candidate."""
        turn = self.runner.turn_seconds(self._seconds(self.baseline), update)
        affordable = int(min(self._opening / 4, self.budget.left / 10) / max(turn, 1e-9))
        return max(SHORT_PAIRS, min(FINAL_PAIRS, affordable))

    def _too_slow_reason(self, setting: StepSetting, limit: float) -> str:
        if setting.compile and limit >= 1.0:
            return f"compiling took more than the {limit:.0f} s that were left for it"
        if limit < self._first_limit(setting):
            return NotMeasuredReason.NO_TIME
        return f"its first step took more than {limit:.3g} s; strict fp32's took {self._first:.3g} s"

    def race(self, settings: list[StepSetting], pairs: int) -> None:
        """Race open candidates against the baseline; Ctrl-C keeps the measurements and is raised again."""
        try:
            found = self.runner.race(settings, baseline=self.baseline, pairs=pairs)
        except CandidateFailed as error:
            raise build_fp32_error(self._name, error) from None
        for setting, speed in found.speeds.items():
            before = self.cells[setting].speed
            if before is None or before.pairs <= speed.pairs:  # an interrupted race has fewer pairs
                self.cells[setting] = replace(self.cells[setting], speed=speed, cut="")
        for setting, why in found.failed.items():
            if isinstance(why, CandidateFailed):
                self._exclude_failed(setting, why)
            elif self.cells[setting].speed is None:
                self.cells[setting] = replace(self.cells[setting], cut=NotMeasuredReason.NO_TIME)
        if found.interrupted:
            raise KeyboardInterrupt
        for setting in found.speeds:
            self._record_losses(setting)

    def has_time_for(self, setting: StepSetting, updates: int) -> bool:
        """Return whether another candidate can be opened and take `updates`, with time left for the final."""
        rest = 2 * LEAST_FINAL * self.turn(self.baseline)
        return self._opening + updates * self._seconds(setting) + rest <= self.budget.left

    def _complete(self, setting: StepSetting, share: float = 1.0) -> None:
        """Take the updates that are missing for the comparison, within `share` of the time left."""
        cell, base = self.cells[setting], self.baseline
        # Candidates were timed for different numbers of updates, but are compared after the same number.
        lacking = self.judged_after - len(cell.trail)
        # Other micro-batches see other samples, so their losses are not compared.
        same = (setting.batch, setting.microbatches) == (base.batch, base.microbatches)
        if not same or not cell.trail or lacking <= 0 or not self.runner.is_open(setting):
            return
        rest = (WARM_UP + LEAST_FINAL) * self.turn(base)
        if lacking * self._seconds(setting) <= share * (self.budget.left - rest):
            self._take_updates(setting, lacking)

    def _take_updates(self, setting: StepSetting, updates: int) -> None:
        try:
            self.runner.take_updates(setting, updates)
        except CandidateTooSlow:
            return
        except CandidateFailed as error:
            self._give_up(setting, error)
            return
        self._record_losses(setting)

    def _give_up(self, setting: StepSetting, error: CandidateFailed) -> None:
        """Close a candidate that failed; raise `WrongUse` if it is strict fp32."""
        if setting == self.baseline:
            raise build_fp32_error(self._name, error) from None
        self.runner.leave(setting)
        self._exclude_failed(setting, error)

    def _exclude_failed(self, setting: StepSetting, error: CandidateFailed) -> None:
        self.cells[setting] = replace(self.cells[setting], cut=f"it failed while it was timed: {error}")

    def _record_losses(self, setting: StepSetting) -> None:
        """Read the losses of an open candidate; raise `WrongUse` if strict fp32's are missing or non-finite."""
        if not self.runner.is_open(setting):
            return
        try:
            trail = self.runner.trail(setting, UPDATES)
        except CandidateFailed as error:
            self._give_up(setting, error)
            return
        if setting == self.baseline:
            check_fp32_losses(self._name, trail)
        self.cells[setting] = replace(self.cells[setting], trail=trail)

    def _makes_room_for(self, setting: StepSetting) -> bool:
        """Close candidates until the setting fits into memory with the baseline; return whether it does."""
        for other in [setting for setting in self._open() if setting != self.baseline]:
            if not self.room.fits(self.baseline, other, setting):
                self.runner.leave(other)
        return self.room.fits(self.baseline, setting)

    def _keep_the_fastest(self) -> None:
        fastest = self._fastest()
        for setting in self._open():
            if setting not in (self.baseline, fastest):
                self.runner.leave(setting)

    def _open(self) -> list[StepSetting]:
        return [setting for setting in self.cells if self.runner.is_open(setting)]

    def _fastest(self) -> StepSetting:
        ranked = sort_by_speed(self.cells.values())
        return ranked[0].setting if ranked else self.baseline

    def turn(self, *settings: StepSetting) -> float:
        """Return the seconds of one turn of these settings and the baseline."""
        return self.runner.turn_seconds(*(self._seconds(setting) for setting in (self.baseline, *settings)))

    def _seconds(self, setting: StepSetting) -> float:
        speed = self.cells[setting].speed
        return speed.seconds if speed else 0.0
