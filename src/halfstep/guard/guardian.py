"""Watches every step of a run: names what spoiled one, repairs what can be, and stops before the budget is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from halfstep.errors import Diverged, same_keys, unknown_name
from halfstep.guard.alarms.scale_collapse import FALLS, ScaleCollapse
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
from halfstep.step.report import GUARD, StepReport
from halfstep.step.synchronise import LossFunction
from halfstep.step.transaction import Stepper

if TYPE_CHECKING:
    from halfstep.guard.meters.meters import Meters

Mode = Literal["watch", "repair"]
HOPELESS = 3
"""Skips in a row after which it is not the batch: in repair mode the run goes back to where it was good."""
AND = "\n"
"""Between the names of optimizers that took a step together."""
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
        # Last of all, so that what it keeps has passed every other guard; and in place of a guardian from before.
        others = [g for g in stepper.guards if not isinstance(g, (Spike, Guardian))]
        stepper.guards[:] = [*others, *([self._spike] if limits.spikes else []), self]
        self._skips = Skips(limits.skips_in_a_row, limits.skip_share)
        self._collapse = ScaleCollapse()
        self._streaks: dict[str, Streak] = {}
        """By the names of the optimizers whose steps were skipped."""
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
        try:
            report = self.stepper.step(loss_fn, batch, only=only)
        except BaseException:
            if self._meters is not None:
                self._meters.abandon()
            raise
        self._after(report, again)
        return report

    def look(self, report: StepReport) -> None:
        """For loops that call the stepper themselves, after each `step` or `apply`."""
        self._after(report, None)
        if self._meters is not None:
            self._meters.between()

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
        else:
            self._turned_down(report)

    def _applied(self, report: StepReport) -> None:
        self._examiner.remember(report, self._rate)
        self._skips.applied()
        if self._streaks:
            self._collapse.applied(report)
            self._streaks = {n: s for n, s in self._streaks.items() if not set(n.split(AND)) <= report.parts.keys()}
        if self._spike.new_level:
            text = f"a new level: {self._spike.new_level}; losses like it have come again and again, and are usual now"
            self._say("alarm", "warning", text, {"attempt": report.attempt, "loss": report.loss})
        self._good += 1
        if self._good >= self.limits.probation and self.remedies.placed:
            self._lift()

    # -- trouble --------------------------------------------------------------------------------------------------

    def _streak_of(self, report: StepReport) -> Streak:
        names = AND.join(report.parts)
        streak = self._streaks.get(names)
        if streak is None:
            others = len(report.parts) < len(self.stepper.optimizers)
            streak = self._streaks[names] = Streak(
                first=report.attempt, of=" and ".join(report.parts) if others else ""
            )
        return streak

    def _skipped(self, report: StepReport, again: LossFunction | None) -> None:
        streak = self._streak_of(report)
        streak.guard = ""
        falling = self._collapse.skipped(report, {lane.name: lane.scale.value for lane in self.stepper._lanes})
        if report.reason == REFUSED:
            self._refused(report, streak)
        elif not falling or self._collapse.falls(report) >= FALLS:
            self._examiner.examine(report, streak, again, falling=falling, last=self._skips.next_is_too_much)
        if falling and streak.excused:
            self._skips.excused()
            return
        self._good = 0
        self._skips.skipped()
        if self.mode == "repair" and self._repaired(streak):
            return
        alarm = self._collapse.alarm() or self._skips.alarm()
        if alarm is not None:
            raise self._given_up(alarm, report, streak)

    def _turned_down(self, report: StepReport) -> None:
        """By a guard that is not ours, which has its reasons: only counted, until it is too much."""
        streak = self._streak_of(report)
        streak.guard = (report.reason or "").removeprefix(GUARD)
        self._skips.refused()
        alarm = self._skips.alarm()
        if alarm is not None:
            raise self._given_up(alarm, report, streak)

    def _refused(self, report: StepReport, streak: Streak) -> None:
        streak.refused = self._spike.words(report)
        text = f"spike: {streak.refused}; the update was refused"
        self._say("alarm", "warning", text, {"attempt": report.attempt, "loss": report.loss})

    def _repaired(self, streak: Streak) -> bool:
        """Whether something was done that the next step may go on with."""
        verdict = streak.verdict
        remedy = None if verdict is None else self._surgery.treat(verdict)
        if remedy is not None:
            self._say("remedy", "warning", f"repaired: {remedy}, because of {remedy.culprit}", remedy.facts())
            self._fresh_start()
            return True
        hopeless = self._skips.in_a_row >= min(HOPELESS, self.limits.skips_in_a_row) or self._collapse.collapsed
        if not hopeless or not streak.older_weights_may_help or self._rollbacks >= self.limits.rollbacks:
            return False
        step = self._rewind.back()
        if step is None:
            return False
        self._rollbacks += 1
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
        self._collapse, self._streaks = ScaleCollapse(), {}

    def _given_up(self, alarm: str, report: StepReport, streak: Streak) -> Diverged:
        """The last words, and where a good copy is kept, the weights with which to begin again."""
        step = self._rewind.back() if streak.blames_weights else None
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
            "streaks": {names: streak.as_dict() for names, streak in self._streaks.items()},
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
        _streaks(state["streaks"])
        self._examiner.check_state(state["examiner"])
        int(state["good"]), int(state["rollbacks"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; remedies that are not in place yet are placed."""
        self._surgery.resume(Remedies.from_dict(state["remedies"]))
        self._spike.load_state_dict(state["spike"])
        self._skips.load_state_dict(state["skips"])
        self._collapse.load_state_dict(state["collapse"])
        self._streaks = _streaks(state["streaks"])
        self._examiner.load_state_dict(state["examiner"])
        self._good, self._rollbacks = int(state["good"]), int(state["rollbacks"])


def _streaks(plain: Mapping[str, Any]) -> dict[str, Streak]:
    return {str(names): Streak.from_dict(streak) for names, streak in plain.items()}
