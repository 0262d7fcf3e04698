"""Looks into a skipped step: runs it again where that can be done, and says what is left to see where it cannot."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from halfstep.errors import in_one_line
from halfstep.guard.last_step import diagnose
from halfstep.guard.streak import Streak
from halfstep.guard.told import Kind, Level
from halfstep.guard.trouble import History, Trouble
from halfstep.guard.verdict import PRECISION, WARM_UP, Cure, Verdict
from halfstep.precision.island import islands
from halfstep.step.attempt import Attempt
from halfstep.step.report import StepReport
from halfstep.step.synchronise import LossFunction
from halfstep.step.transaction import Stepper

REMEMBERED = 50
"""Applied steps in the history."""
NO_MORE = "steps made of forward() and backward() cannot be run again to see more; guardian.step() can"
LOWER = "a lower loss scale: StaticScale(...), or DynamicScale(), which finds one by itself"
Step = tuple[list[str], float, float, float | None]
"""Its optimizers, its loss, its gradient norm, its learning rate."""


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
        self._steps.append((list(report.parts), report.loss, report.grad_norm, rate))

    def history(self, report: StepReport | None = None) -> History:
        """The last applied steps; of the same optimizers as this one: the losses of others are no measure for it."""
        names = None if report is None else list(report.parts)
        steps = [step for step in self._steps if names in (None, step[0])]
        _, losses, norms, rates = zip(*steps, strict=True) if steps else ((), (), (), ())
        return History(losses, norms, tuple(rate for rate in rates if rate is not None))

    def examine(
        self, report: StepReport, streak: Streak, again: LossFunction | None, *, falling: bool, last: bool
    ) -> None:
        """Note in the streak what it was, unless that is known. The `last` step of a run is always looked into.

        `falling`: the loss scale is lower now than it was in the step.
        """
        attempt = self._stepper.attempt
        if attempt is None or not streak.calls_for_diagnosis(report.reason or ""):
            return
        if attempt.loss_fn is None:
            self._glimpse(report, streak)
        elif self._made < self._most or (last and self._most > 0):
            self._made += 1
            replayed = attempt if again is None else attempt._replace(loss_fn=again)
            verdict = diagnose(self._stepper, report, again=replayed.loss_fn, history=self.history(report))
            self._note(verdict if falling or verdict.cause != WARM_UP else _stays(verdict), report, streak, replayed)
            if self._made == self._most:
                self._say("alarm", "warning", self._no_more(), {"attempt": report.attempt, "diagnoses": self._made})

    def _note(self, verdict: Verdict, report: StepReport, streak: Streak, attempt: Attempt) -> None:
        known = streak.verdict is not None and streak.verdict.sentence == verdict.sentence
        streak.verdict, streak.diagnosed = verdict, report.reason or ""
        if verdict.cause != WARM_UP and self._record is not None:
            self._keep(self._record, verdict, report, attempt)
        if not known:
            level: Level = "info" if verdict.cause == WARM_UP else "warning"
            self._say("verdict", level, verdict.sentence, {"attempt": report.attempt, **verdict.as_dict()})

    def _keep(self, record: Callable[[Trouble], None], verdict: Verdict, report: StepReport, attempt: Attempt) -> None:
        placed = tuple(islands(self._stepper.model))
        trouble = Trouble(attempt, report, self._stepper.precision.name, placed, self.history(report), verdict)
        try:
            record(trouble)
        except Exception as error:
            text = f"attempt {report.attempt} could not be recorded: {in_one_line(error)}"
            self._say("alarm", "warning", text, {"attempt": report.attempt})

    def _no_more(self) -> str:
        return (
            f"{self._made} diagnoses were made, as many as a run may have: further skips are counted, not looked into"
        )

    def _glimpse(self, report: StepReport, streak: Streak) -> None:
        if streak.seen:
            return
        spoilt = next((lane.spoilt for lane in self._stepper._lanes if lane.spoilt is not None), None)
        names = (name for name, parameter in self._stepper.model.named_parameters() if parameter is spoilt)
        what = f"the loss is {report.loss}" if spoilt is None else f"the gradient of {next(names, '?')} is not finite"
        streak.seen = f"{what} ({NO_MORE})"
        self._say("verdict", "warning", streak.seen, {"attempt": report.attempt, "cause": None})

    def state_dict(self) -> dict[str, Any]:
        return {"made": self._made, "steps": [[list(names), *numbers] for names, *numbers in self._steps]}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what `load_state_dict` would stumble over; nothing is changed by it."""
        int(state["made"])
        _steps(state["steps"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made, self._steps = int(state["made"]), deque(_steps(state["steps"]), maxlen=REMEMBERED)


def _stays(verdict: Verdict) -> Verdict:
    """It would be over in a few steps if the scale fell; this one is as it was."""
    sentence = f"precision: {verdict.sentence.partition(': ')[2]}; this loss scale does not fall by itself"
    return Verdict(PRECISION, sentence, verdict.culprit, verdict.evidence, (Cure("fix_code", LOWER, None),))


def _steps(plain: Any) -> list[Step]:
    return [
        ([str(name) for name in names], float(loss), float(norm), None if rate is None else float(rate))
        for names, loss, norm, rate in plain
    ]
