"""The steps of a run under its guard: the recipe's settings go in, and what the guard says goes to the journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halfstep.errors import Diverged
from halfstep.guard.alarms.spike import REFUSED
from halfstep.guard.guardian import Guardian
from halfstep.guard.limits import Limits
from halfstep.guard.meters.meters import Meters
from halfstep.guard.remedy.remedies import Remedies
from halfstep.guard.told import Told
from halfstep.guard.verdict import DATA
from halfstep.step.report import GRADIENT_NOT_FINITE, GRADIENT_OVERFLOW, LOSS_NOT_FINITE, StepReport
from halfstep.step.synchronise import LossFunction
from halfstep.step.transaction import Stepper
from halfstep.step.window import Window
from halfstep.train.black_box.writing import recording
from halfstep.train.journal import journal as events
from halfstep.train.journal.journal import Journal
from halfstep.train.journal.numbers import few
from halfstep.train.recipe.schema import GuardOptions

OVERFLOWS = 3
"""In a row, from which on they are no longer a loss scale that finds its place."""
PROOF = 3
"""Applied steps in a row by which weights show that they are good, after some that failed."""
_ALARMING = (LOSS_NOT_FINITE, GRADIENT_NOT_FINITE, REFUSED)


class Guarding:
    """Takes the steps of a run; without a guard, as the Stepper does."""

    def __init__(
        self, stepper: Stepper, options: GuardOptions, journal: Journal, folder: Path, cures: Remedies | None = None
    ) -> None:
        """`cures` are in place already: those of an earlier launch."""
        self._stepper, self._journal = stepper, journal
        self.mode = options.mode
        self._placed = cures or Remedies()
        self._heard: list[Told] = []
        """During a step: its own event comes first."""
        self._notes: list[tuple[str, str]] = []
        self._meters: Meters | None = None
        self.guardian: Guardian | None = None
        if options.mode != "off":
            limits = Limits(**options.model_dump(exclude={"mode"}))
            self._meters = Meters(stepper)
            self.guardian = Guardian(
                stepper,
                mode=options.mode,
                limits=limits,
                tell=self._heard.append,
                record=recording(folder, stepper.model, lambda *note: self._notes.append(note)),
                meters=self._meters,
            )
        self.rolled_back: Callable[[int], object] = lambda attempt: None
        """Told the attempt that the weights were from which the run went back from."""
        self.applied_at = 0
        """The attempt that the weights are from."""
        self._applied = self._overflows = self._unproved = 0
        self._ended: Diverged | None = None
        self.guilty: list[int] = []
        """The samples that are not finite themselves, of the last step that had any."""

    def taken_up(self, attempt: int) -> None:
        """The run goes on from a checkpoint of this attempt: where no step is applied after it, its weights fail."""
        self.applied_at, self._applied = attempt, self._stepper.counts.applied
        if self.guardian is not None and self.guardian.in_trouble:
            self._unproved = PROOF

    def step(self, loss_fn: LossFunction, window: Window, again: LossFunction) -> StepReport:
        """One step; `again` is what a failed one is run again with."""
        if self.guardian is None:
            return self._stepper.step(loss_fn, window)
        try:
            return self.guardian.step(loss_fn, window, again=again)
        except Diverged as error:
            if error.report is None:
                raise
            self._ended = error
            report: StepReport = error.report
            return report

    def heed(self, report: StepReport, guilty: Sequence[int]) -> None:
        """After a step was told of; `guilty` are its samples that are not finite themselves.

        Diverged where the guard gave up.
        """
        self.guilty = list(guilty) or self.guilty
        if self._heard or self._notes:
            self._tell(in_the_data(guilty))
        if self._ended is not None:
            raise self._ended
        self._overflows = self._overflows + 1 if report.reason == GRADIENT_OVERFLOW else 0
        if report.applied:
            self._unproved, self.applied_at = max(0, self._unproved - 1), report.attempt
        elif self._overflows >= OVERFLOWS or (not guilty and report.reason in _ALARMING):
            self._unproved = PROOF
        applied = self._stepper.counts.applied
        if applied < self._applied:
            self.rolled_back(self.applied_at)
        self._applied = applied

    @property
    def alarmed(self) -> bool:
        """Whether the weights themselves may be spoilt: steps failed, and neither data nor a loss scale explains it."""
        return self.guardian is not None and self._unproved > 0

    @property
    def cures(self) -> Remedies:
        """What is placed now."""
        return self._placed if self.guardian is None else self.guardian.remedies

    @property
    def readings(self) -> dict[str, Any]:
        """The newest numbers of the meters."""
        return {} if self._meters is None else dict(self._meters.readings)

    def _tell(self, guilty: str) -> None:
        for told in self._heard:
            if "do" not in told.facts:  # the last words of a run that gives up are those of its end
                text = told.text + (guilty if told.facts.get("cause") == DATA else "")
                self._journal.tell(events.GUARD, kind=told.kind, level=told.level, text=text, facts=told.facts)
        for text, level in self._notes:
            self._journal.note(text, level)
        self._heard.clear()
        self._notes.clear()


def in_the_data(guilty: Sequence[int]) -> str:
    """Where in the data set the samples are that a verdict knows by their places in a batch."""
    if not guilty:
        return ""
    return f" (in the data set: {'sample' if len(guilty) == 1 else 'samples'} {few(guilty)})"
