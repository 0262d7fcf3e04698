"""Looks into a skipped step: runs it again where that can be done, and says what is left to see where it cannot."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from halfstep.guard.last_step import diagnose
from halfstep.guard.streak import Streak
from halfstep.guard.told import Kind, Level
from halfstep.guard.trouble import History, Trouble
from halfstep.guard.verdict import WARM_UP
from halfstep.precision.island import islands
from halfstep.step.attempt import Attempt
from halfstep.step.report import StepReport
from halfstep.step.synchronise import LossFunction
from halfstep.step.transaction import Stepper

REMEMBERED = 50
"""Applied steps in the history."""
NO_MORE = "steps made of forward() and backward() cannot be run again to see more; guardian.step() can"
Step = tuple[float, float, float | None]


class Examiner:
    """`most`: diagnoses in a run, each of which costs several steps."""

    def __init__(
        self,
        stepper: Stepper,
        most: int,
        record: Callable[[Trouble], None] | None,
        say: Callable[[Kind, Level, str, dict[str, Any]], None],
    ) -> None:
        self._stepper, self._most, self._record, self._say = stepper, most, record, say
        self._made = 0
        self._steps: deque[Step] = deque(maxlen=REMEMBERED)

    def remember(self, report: StepReport, rate: float | None) -> None:
        """An applied step."""
        self._steps.append((report.loss, report.grad_norm, rate))

    def history(self) -> History:
        losses, norms, rates = zip(*self._steps, strict=True) if self._steps else ((), (), ())
        return History(losses, norms, tuple(rate for rate in rates if rate is not None))

    def examine(
        self, report: StepReport, streak: Streak, overflows: int, again: LossFunction | None, *, last: bool
    ) -> None:
        """Note in the streak what it was, unless that is known. The `last` step of a run is always looked into."""
        attempt = self._stepper.attempt
        if attempt is None or not streak.calls_for_diagnosis(report.reason or "", overflows):
            return
        if attempt.loss_fn is None:
            self._glimpse(report, streak)
        elif self._made < self._most or (last and self._most > 0):
            self._made += 1
            self._diagnose(report, streak, attempt if again is None else attempt._replace(loss_fn=again))

    def _diagnose(self, report: StepReport, streak: Streak, attempt: Attempt) -> None:
        model, precision, history = self._stepper.model, self._stepper.precision, self.history()
        verdict = diagnose(self._stepper, report, again=attempt.loss_fn, history=history)
        known = streak.verdict is not None and streak.verdict.sentence == verdict.sentence
        streak.verdict, streak.diagnosed = verdict, report.reason or ""
        if verdict.cause != WARM_UP and self._record is not None:
            self._record(Trouble(attempt, report, precision.name, tuple(islands(model)), history, verdict))
        if not known:
            level: Level = "info" if verdict.cause == WARM_UP else "warning"
            self._say("verdict", level, verdict.sentence, {"attempt": report.attempt, **verdict.as_dict()})

    def _glimpse(self, report: StepReport, streak: Streak) -> None:
        if streak.seen:
            return
        spoilt = next((lane.spoilt for lane in self._stepper._lanes if lane.spoilt is not None), None)
        names = (name for name, parameter in self._stepper.model.named_parameters() if parameter is spoilt)
        what = f"the loss is {report.loss}" if spoilt is None else f"the gradient of {next(names, '?')} is not finite"
        streak.seen = f"{what} ({NO_MORE})"
        self._say("verdict", "warning", streak.seen, {"attempt": report.attempt, "cause": None})

    def state_dict(self) -> dict[str, Any]:
        return {"made": self._made, "steps": [list(step) for step in self._steps]}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what `load_state_dict` would stumble over; nothing is changed by it."""
        int(state["made"])
        _steps(state["steps"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made, self._steps = int(state["made"]), deque(_steps(state["steps"]), maxlen=REMEMBERED)


def _steps(plain: Any) -> list[Step]:
    return [(float(loss), float(norm), None if rate is None else float(rate)) for loss, norm, rate in plain]
