"""Watches every step of a run: names what spoiled one, repairs what can be, and stops before the budget is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from halfstep.errors import Diverged, same_keys, unknown_name
from halfstep.guard.alarms.scale_collapse import ScaleCollapse
from halfstep.guard.alarms.skips import Skips
from halfstep.guard.alarms.spike import REFUSED, Spike
from halfstep.guard.examiner import Examiner
from halfstep.guard.farewell import farewell
from halfstep.guard.limits import Limits
from halfstep.guard.remedy.remedies import Remedies
from halfstep.guard.remedy.rewind import Rewind
from halfstep.guard.remedy.surgery import Surgery
from halfstep.guard.streak import Streak
from halfstep.guard.told import Kind, Level, Told, warn
from halfstep.guard.trouble import History, Trouble
from halfstep.guard.verdict import DATA
from halfstep.step.report import GUARD, StepReport
from halfstep.step.synchronise import LossFunction
from halfstep.step.transaction import Stepper

if TYPE_CHECKING:
    from halfstep.guard.meters.meters import Meters

Mode = Literal["watch", "repair"]
HOPELESS = 3
"""Skips in a row after which it is not the batch: in repair mode the run goes back to where it was good."""
LEVELS: dict[str, Level] = {"note": "info", "warning": "warning", "error": "error"}


class Guardian:
    """In place of `stepper.step`: the same step, with somebody who looks at what came of it.

    ```python
    guardian = halfstep.Guardian(stepper, mode="repair")
    for batch in loader:
        report = guardian.step(loss_fn, batch)
    ```
    """

    name = "guardian"

    def __init__(
        self,
        stepper: Stepper,
        *,
        mode: Mode = "watch",
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        tell: Callable[[Told], None] = warn,
        record: Callable[[Trouble], None] | None = None,
        meters: Meters | None = None,
    ) -> None:
        """`tell` hears what happens, `record` gets each step that was diagnosed, `meters` watch healthy steps."""
        if mode not in ("watch", "repair"):
            raise unknown_name("guard mode", mode, ("watch", "repair"))
        self.stepper, self.mode, self.limits = stepper, mode, limits
        self._tell, self._meters = tell, meters
        self._spike = next((g for g in stepper.guards if isinstance(g, Spike)), None) or Spike()
        # Last of all, so that what it keeps has passed every other guard.
        stepper.guards[:] = [g for g in stepper.guards if g is not self._spike] + [self._spike, self]
        self._skips = Skips(limits.skips_in_a_row, limits.skip_share)
        self._collapse, self._streak = ScaleCollapse(), Streak()
        self._surgery, self._rewind = Surgery(stepper, limits.islands), Rewind(stepper)
        self._examiner = Examiner(stepper, limits.diagnoses, record, self._say)
        self._optimizer = next(iter(stepper.optimizers.values()))
        self._rate: float | None = None
        self._good = 0
        """Applied steps since the last trouble."""
        self._rollbacks = 0

    @property
    def remedies(self) -> Remedies:
        """What is placed now."""
        return self._surgery.remedies

    @property
    def in_trouble(self) -> bool:
        """Whether the last step was skipped for a reason that is not normal."""
        return self._skips.in_a_row > 0

    # -- every step -----------------------------------------------------------------------------------------------

    def step(
        self, loss_fn: LossFunction, batch: Any, *, only: str | None = None, again: LossFunction | None = None
    ) -> StepReport:
        """`stepper.step`; `again` is the loss function to replay with, where loss_fn counts or draws something."""
        if self._meters is not None:
            self._meters.before()
        report = self.stepper.step(loss_fn, batch, only=only)
        self._after(report, again)
        return report

    def look(self, report: StepReport) -> None:
        """For loops that call the stepper themselves, after each `step` or `apply`."""
        self._after(report, None)
        if self._meters is not None:
            self._meters.before()

    def passes(self, report: StepReport) -> bool:
        """Nothing is refused here; but these weights have just shown that they are good."""
        rate = self._optimizer.param_groups[0]["lr"]
        self._rate = rate if isinstance(rate, (float, int)) else None  # a tensor is not waited for
        if self.mode == "repair":
            self._rewind.keep_if_due(self.limits.keep_every)
        return True

    def _after(self, report: StepReport, again: LossFunction | None) -> None:
        if self._meters is not None:
            for finding in self._meters.after(report):
                self._say("alarm", LEVELS[finding.severity], str(finding), dict(finding.as_dict()))
        if report.applied:
            self._applied(report)
        elif report.reason == REFUSED or not (report.reason or "").startswith(GUARD):
            self._skipped(report, again)

    def _applied(self, report: StepReport) -> None:
        self._examiner.remember(report, self._rate)
        self._skips.applied()
        if self._streak.first is not None:
            self._collapse.applied()
            self._streak = Streak()
        self._good += 1
        if self._good >= self.limits.probation and self.remedies.placed:
            self._lift()

    # -- trouble --------------------------------------------------------------------------------------------------

    def _skipped(self, report: StepReport, again: LossFunction | None) -> None:
        streak = self._streak
        streak.first = streak.first or report.attempt
        normal = self._collapse.skipped(report)
        if report.reason == REFUSED:
            self._refused(report)
        else:
            self._examiner.examine(report, self._streak, self._collapse.overflows, again, last=self._is_last_chance)
        if normal and streak.excused:
            self._skips.excused()
            return
        self._good = 0
        self._skips.skipped()
        if self.mode == "repair" and self._repaired():
            return
        alarm = self._collapse.alarm() or self._skips.alarm()
        if alarm is not None:
            raise self._given_up(alarm, report)

    @property
    def _is_last_chance(self) -> bool:
        """A run is not given up without a word about why."""
        return self._skips.in_a_row + 1 >= self.limits.skips_in_a_row

    def _refused(self, report: StepReport) -> None:
        self._streak.refused = self._spike.words(report)
        text = f"spike: {self._streak.refused}; the update was refused"
        self._say("alarm", "warning", text, {"attempt": report.attempt, "loss": report.loss})

    def _repaired(self) -> bool:
        """Whether something was done that the next step may go on with."""
        verdict = self._streak.verdict
        remedy = None if verdict is None else self._surgery.treat(verdict)
        if remedy is not None:
            self._say("remedy", "warning", f"repaired: {remedy}, because of {remedy.culprit}", remedy.facts())
            self._fresh_start()
            return True
        hopeless = self._skips.in_a_row >= min(HOPELESS, self.limits.skips_in_a_row) or self._collapse.collapsed
        from_the_data = verdict is not None and verdict.cause == DATA
        if not hopeless or from_the_data or self._rollbacks >= self.limits.rollbacks or self._rewind.step is None:
            return False
        self._rollbacks += 1
        step = self._rewind.back()
        of = f"{self._rollbacks} of {self.limits.rollbacks}"
        self._say(
            "remedy",
            "warning",
            f"rolled back to step {step} ({of}), and on with the next batch",
            {"remedy": "rollback", "to": step},
        )
        self._fresh_start()
        return True

    def _fresh_start(self) -> None:
        self._skips.forgive()
        self._collapse, self._streak = ScaleCollapse(), Streak()

    def _given_up(self, alarm: str, report: StepReport) -> Diverged:
        """The last words, and where a good copy is kept, the weights with which to begin again."""
        streak, step = self._streak, None
        if streak.blames_weights and self._rewind.step is not None:
            step = self._rewind.back()
        error = farewell(alarm, streak, mode=self.mode, rates=self.history().rates, back_at=step, limits=self.limits)
        error.report = report
        self._say("alarm", "error", error.given, {"attempt": report.attempt, "do": error.do})
        return error

    def _lift(self) -> None:
        self._good = 0
        lifted = self._surgery.lift_newest()
        if lifted is not None:
            text = f"{self.limits.probation} steps without trouble: lifted the remedy by which {lifted}"
            self._say("probation", "info", text, lifted.facts())

    def _say(self, kind: Kind, level: Level, text: str, facts: dict[str, Any]) -> None:
        self._tell(Told(kind, level, text, facts))

    # -- state ----------------------------------------------------------------------------------------------------

    def history(self) -> History:
        """The last applied steps."""
        return self._examiner.history()

    def state_dict(self) -> dict[str, Any]:
        """Plain data. What a rollback goes back to is not part of it: a resumed run keeps its own first good step."""
        return {
            "remedies": self.remedies.as_dict(),
            "spike": self._spike.state_dict(),
            "skips": self._skips.state_dict(),
            "collapse": self._collapse.state_dict(),
            "streak": self._streak.as_dict(),
            "examiner": self._examiner.state_dict(),
            "good": self._good,
            "rollbacks": self._rollbacks,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what `load_state_dict` would stumble over; nothing is changed by it."""
        same_keys("a Guardian's state", self.state_dict(), state)
        Remedies.from_dict(state["remedies"])
        Spike().load_state_dict(state["spike"])
        Skips(1, 1.0).load_state_dict(state["skips"])
        ScaleCollapse().load_state_dict(state["collapse"])
        Streak.from_dict(state["streak"])
        self._examiner.check_state(state["examiner"])
        int(state["good"]), int(state["rollbacks"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; remedies that are not in place yet are placed."""
        self._surgery.resume(Remedies.from_dict(state["remedies"]))
        self._spike.load_state_dict(state["spike"])
        self._skips.load_state_dict(state["skips"])
        self._collapse.load_state_dict(state["collapse"])
        self._streak = Streak.from_dict(state["streak"])
        self._examiner.load_state_dict(state["examiner"])
        self._good, self._rollbacks = int(state["good"]), int(state["rollbacks"])
