"""Trials: one setting after another is opened, warmed up and raced against strict fp32, and becomes a cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.errors import HalfstepError, WrongUse, reason_in
from halfstep.measure.plan.arena import Arena
from halfstep.measure.plan.budget import Budget
from halfstep.measure.plan.cell import INTERRUPTED, NO_TIME, Cell
from halfstep.measure.plan.choice import by_speed
from halfstep.measure.plan.fp32 import fails_in_fp32, no_step_in_time, refuse_broken_fp32
from halfstep.measure.plan.probe import UPDATES
from halfstep.measure.plan.room import Room
from halfstep.measure.process import ArmFailed, ArmTooSlow
from halfstep.measure.setting import Setting
from halfstep.measure.timing import Speed

TOO_SLOW = 5.0
"""A first step, or a warm one, that takes this many times as long as strict fp32's is not waited for."""
SHORTEST_LIMIT = 2.0
"""Seconds that every first step gets: small models prepare for longer than they compute."""
SHORT_PAIRS, HOPELESS_PAIRS, LEAST_FINAL, FINAL_PAIRS = FEWEST_FOR_INTERVAL, 3, FEWEST_FOR_INTERVAL, 31
HOPELESS = 1.5
"""Times as long as the fastest: such a setting is measured, but not for long."""
WARM_UP, WARM_CALLS = 4, 20
"""Updates that a warm-up takes when it is planned for, and those that it may take."""
COMPILE_SHARE, LEAST_COMPILE = 0.7, 5.0
"""A compiler gets this share of the time that can be spared, and is not begun with fewer seconds than these."""


@contextmanager
def _too_slow(why: str) -> Iterator[None]:
    """Say in these words that an arm was not waited for."""
    try:
        yield
    except ArmTooSlow:
        raise ArmTooSlow(why) from None


class Trials:
    """Cells by their settings: those that were measured, and those that could not be, each with its reason."""

    def __init__(self, arena: Arena, budget: Budget, room: Room) -> None:
        self.arena, self.budget, self.room = arena, budget, room
        self.cells: dict[Setting, Cell] = {}
        self.baseline = Setting()
        self._opening = self._first = 0.0
        self._name = ""

    def measure_baseline(self, name: str, candidates: Sequence[Setting]) -> None:
        """The first of the candidates that fits: all are strict fp32, in more and more micro-batches."""
        self._name = name
        for setting in candidates:
            if self._opens_as_baseline(setting):
                break
        else:
            raise WrongUse(
                f"strict fp32 does not fit here, not even with {candidates[-1].batch} samples at a time",
                allowed="a model of which one update fits into the memory that is free",
                do=f"see what it takes with `halfstep estimate {name}`",
            )
        try:
            seconds = self.arena.warm(setting, seconds=self.budget.seconds / 6)
        except ArmTooSlow:  # the time is up, and one step is all that is known
            seconds = self._first
        except ArmFailed as error:
            raise fails_in_fp32(name, error) from None
        self.cells[setting] = replace(self.cells[setting], speed=Speed(seconds, 1.0, 1.0, 1.0, 1))
        self._follow(setting)

    def _opens_as_baseline(self, setting: Setting) -> bool:
        self.baseline = setting
        if not self.room.fits(setting):
            self.cells[setting] = Cell(setting, cut=self.room.why_not(setting), peak=self.room.peak(setting))
            return False
        self.cells[setting] = Cell(setting, cut=INTERRUPTED)
        before = self.budget.spent
        try:
            self.arena.enter(setting, self.budget.left)
            self._opening = self.budget.spent - before
            self._first = self.arena.first_step(setting, self.budget.left)
        except ArmTooSlow:
            raise no_step_in_time(self._name, self.budget.seconds) from None
        except ArmFailed as error:
            if "memory" not in str(error).lower():
                raise fails_in_fp32(self._name, error) from None
            self.cells[setting] = Cell(setting, cut=str(error))
            return False
        self.cells[setting] = Cell(setting, first_step=self._first, peak=self.room.peak(setting))
        return True

    def announce(self, settings: Iterable[Setting]) -> None:
        """Cells that are going to be measured; those that Ctrl-C comes before keep that as their reason."""
        for setting in settings:
            self.cells.setdefault(setting, Cell(setting, cut=INTERRUPTED))

    def is_ready(self, setting: Setting) -> bool:
        """Whether a finalist is open and warm; one that was closed is opened again, if there is room and time."""
        if self.arena.is_open(setting):
            return True
        known = self.cells[setting].first_step or 0.0
        if self.budget.left < self._opening + 2 * known + LEAST_FINAL * self.turn(setting):
            return False
        if not self.room.fits(setting, *self._open()):
            return False
        try:
            self.arena.enter(setting, self.budget.left)
            self.arena.first_step(setting, self.budget.left)
            self.arena.warm(setting, seconds=self.budget.left / 4)
        except (ArmFailed, ArmTooSlow, HalfstepError):
            self.arena.leave(setting)
            return False
        return True

    def measure(self, setting: Setting) -> None:
        """One more cell, or the reason why not."""
        self.cells[setting] = cell = Cell(setting, cut=INTERRUPTED)
        if self._limit(setting, self._opening) <= 0:
            self.cells[setting] = replace(cell, cut=NO_TIME)
            return
        cell = replace(cell, peak=self.room.peak(setting))
        if not self.room.fits(setting):
            self.cells[setting] = replace(cell, cut=self.room.why_not(setting))
        elif not self._makes_room_for(setting):
            self.cells[setting] = replace(cell, cut=f"{self.room.why_not(setting)} beside strict fp32")
        else:
            self._time(cell)

    def _limit(self, setting: Setting, opening: float = 0.0) -> float:
        """Seconds for the first step; none where too little would be left for the rest and for the final."""
        update = self._seconds(self.baseline)
        rest = WARM_UP * update + (HOPELESS_PAIRS + LEAST_FINAL) * self.turn(self.baseline)
        # Where nothing stands beside the baseline yet, seeing one rival is worth all the time there is.
        left = self.budget.left - opening - (rest if self._has_rivals() else 2 * update)
        if setting.compile:
            return COMPILE_SHARE * left if COMPILE_SHARE * left >= LEAST_COMPILE else 0.0
        return min(left, self._first_limit(setting))

    def _first_limit(self, setting: Setting) -> float:
        return max(TOO_SLOW * self._first * self._samples(setting), SHORTEST_LIMIT)

    def _samples(self, setting: Setting) -> float:
        """Times as many in one update as the baseline has: only a batch that was made larger has more."""
        ours, theirs = ((found.batch or 1) * found.microbatches for found in (setting, self.baseline))
        return ours / theirs

    def _time(self, cell: Cell) -> None:
        setting = cell.setting
        try:
            first, last = self._first_and_last(setting)
            trail = self.arena.trail(setting, UPDATES)
        except ArmTooSlow as error:
            self.arena.leave(setting)
            self.cells[setting] = replace(cell, cut=str(error))
            return
        except (ArmFailed, HalfstepError) as error:
            self.arena.leave(setting)
            verb = "compile" if setting.compile else "run"
            self.cells[setting] = replace(cell, cut=f"it does not {verb}: {reason_in(error)}")
            return
        self.cells[setting] = replace(cell, first_step=first, trail=trail)
        hopeless = last > HOPELESS * self._seconds(self._fastest()) * self._samples(setting)
        self.race([setting], HOPELESS_PAIRS if hopeless else self._short_pairs(last))
        self._keep_the_fastest()

    def _first_and_last(self, setting: Setting) -> tuple[float, float]:
        """Seconds of its first update and of a warm one; `ArmTooSlow` says why it is not waited for any longer."""
        with _too_slow(NO_TIME):
            self.arena.enter(setting, self.budget.left)
        limit = self._limit(setting)
        with _too_slow(self._why_too_slow(setting, limit)):
            first = self.arena.first_step(setting, limit)
        slowest = TOO_SLOW * self._seconds(self.baseline) * self._samples(setting)
        with _too_slow(NO_TIME):
            last = self.arena.warm(
                setting, seconds=min(self.budget.left / 4, max(WARM_CALLS * slowest, SHORTEST_LIMIT))
            )
            if last > slowest:  # one more: something else may have held it up
                last = min(last, self.arena.warm(setting, seconds=0.0))
        if last > slowest:
            base = self._seconds(self.baseline)
            raise ArmTooSlow(f"an update takes {last:.3g} s once it is warm; strict fp32's takes {base:.3g} s")
        return first, last

    def _has_rivals(self) -> bool:
        return any(cell.speed for setting, cell in self.cells.items() if setting != self.baseline)

    def _short_pairs(self, update: float) -> int:
        """More where they cost little beside what it took to open the arm."""
        turn = self.arena.turn_seconds(self._seconds(self.baseline), update)
        affordable = int(min(self._opening / 4, self.budget.left / 10) / max(turn, 1e-9))
        return max(SHORT_PAIRS, min(FINAL_PAIRS, affordable))

    def _why_too_slow(self, setting: Setting, limit: float) -> str:
        if setting.compile:
            return f"compiling took more than the {limit:.0f} s that were left for it"
        if limit < self._first_limit(setting):
            return NO_TIME
        return f"its first step took more than {limit:.3g} s; strict fp32's took {self._first:.3g} s"

    def race(self, settings: list[Setting], pairs: int) -> None:
        """Open arms beside the baseline; Ctrl-C keeps what was measured, and passes."""
        try:
            found = self.arena.race(settings, baseline=self.baseline, pairs=pairs)
        except ArmFailed as error:
            raise fails_in_fp32(self._name, error) from None
        for setting, speed in found.speeds.items():
            before = self.cells[setting].speed
            if before is None or before.pairs <= speed.pairs:  # a race that was broken off knows less
                self.cells[setting] = replace(self.cells[setting], speed=speed, cut="")
        for setting, why in found.failed.items():
            if isinstance(why, ArmFailed):
                self._cut_failed(setting, why)
            elif self.cells[setting].speed is None:
                self.cells[setting] = replace(self.cells[setting], cut=NO_TIME)
        if found.interrupted:
            raise KeyboardInterrupt
        for setting in found.speeds:
            self._follow(setting)

    def _cut_failed(self, setting: Setting, error: ArmFailed) -> None:
        self.cells[setting] = replace(self.cells[setting], cut=f"it failed while it was timed: {error}")

    def _follow(self, setting: Setting) -> None:
        """Read the losses of an arm that is still open; those of strict fp32 have to be some, and finite."""
        if not self.arena.is_open(setting):
            return
        try:
            trail = self.arena.trail(setting, UPDATES)
        except ArmFailed as error:
            if setting == self.baseline:
                raise fails_in_fp32(self._name, error) from None
            self.arena.leave(setting)
            self._cut_failed(setting, error)
            return
        if setting == self.baseline:
            refuse_broken_fp32(self._name, trail)
        self.cells[setting] = replace(self.cells[setting], trail=trail)

    def _makes_room_for(self, setting: Setting) -> bool:
        """Arms that are open at once have to fit together; whoever is open beside the baseline goes, if need be."""
        for other in [setting for setting in self._open() if setting != self.baseline]:
            if not self.room.fits(self.baseline, other, setting):
                self.arena.leave(other)
        return self.room.fits(self.baseline, setting)

    def _keep_the_fastest(self) -> None:
        fastest = self._fastest()
        for setting in self._open():
            if setting not in (self.baseline, fastest):
                self.arena.leave(setting)

    def _open(self) -> list[Setting]:
        return [setting for setting in self.cells if self.arena.is_open(setting)]

    def _fastest(self) -> Setting:
        ranked = by_speed(self.cells.values())
        return ranked[0].setting if ranked else self.baseline

    def turn(self, *settings: Setting) -> float:
        """Seconds of one turn of these and the baseline."""
        return self.arena.turn_seconds(*(self._seconds(setting) for setting in (self.baseline, *settings)))

    def _seconds(self, setting: Setting) -> float:
        speed = self.cells[setting].speed
        return speed.seconds if speed else 0.0
