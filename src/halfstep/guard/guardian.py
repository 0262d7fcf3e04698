"""Watch every step of a run: find the cause of failures, apply remedies, and stop a run that cannot continue."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from halfstep.errors import Diverged, build_unknown_name_error, check_same_keys
from halfstep.guard.alarms.spike import DIVERGENCE, NEW_LEVEL, REFUSED, RISEN, Notice, SpikeGuard
from halfstep.guard.diagnosis.diagnoser import Diagnoser
from halfstep.guard.diagnosis.earlier_weights import EARLY, WeightsBeforeUpdate
from halfstep.guard.event_text import warn_of_event
from halfstep.guard.repair.advice import build_give_up_error
from halfstep.guard.repair.remedies import Remedies, RemedyApplier
from halfstep.guard.repair.snapshot import RollbackSnapshot
from halfstep.guard.streak import FALLS, Limits, OverflowCounter, SkipCounter, Streak
from halfstep.guard.verdict import FailedStep, GuardEvent, Kind, Level, StepHistory
from halfstep.step.experiment.rerun import OtherWeights
from halfstep.step.report import StepReport, parse_guard_name
from halfstep.step.stepper import Stepper
from halfstep.step.sync import LossFunction

if TYPE_CHECKING:
    from halfstep.guard.monitors.monitors import Meters

Mode = Literal["watch", "repair"]
HOPELESS = 3
"""The skips in a row after which the batch is not the cause; in repair mode the run then rolls back."""
AND = "\n"
"""The separator between the names of optimizers that took a step together."""
JUMP = 5.0
"""The ratio to the usual learning rate of the last fifty steps above which it may have ruined the weights."""
RUINED = "loss diverged: far above its range so far and not recovering"
LEVELS: dict[str, Level] = {"note": "info", "warning": "warning", "error": "error"}


class Guardian:
    """A wrapper of a Stepper: `step` takes the same step as `stepper.step`, and examines its outcome.

    ```python
    guardian = halfstep.Guardian(stepper, mode="repair")
    for batch in loader:
        report = guardian.step(loss_fn, batch)
    ```
    """

    name = "guardian"
    same_on_all_ranks = True

    def __init__(
        self,
        stepper: Stepper,
        *,
        mode: Mode = "watch",
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        tell: Callable[[GuardEvent], None] = warn_of_event,
        record: Callable[[FailedStep], None] | None = None,
        meters: Meters | None = None,
    ) -> None:
        """Add a guardian to the Stepper's guards.

        Args:
            stepper: The Stepper.
            mode: `watch` diagnoses and reports; `repair` also applies remedies.
            limits: The limits of skips, rollbacks and diagnoses.
            tell: A callback for events; by default a warning.
            record: A callback for each diagnosed step.
            meters: Meters that sample healthy steps.

        Raises:
            UnknownName: The mode is unknown.
        """
        if mode not in ("watch", "repair"):
            raise build_unknown_name_error("guard mode", mode, ("watch", "repair"))
        self.stepper, self.mode, self.limits = stepper, mode, limits
        # It names the operation, and repairs it or ends the run: more than a refusal by the start check.
        stepper.handles_non_finite = True
        self._tell, self._meters = tell, meters
        watching = next((g for g in stepper.guards if isinstance(g, SpikeGuard)), None)
        self._spike = SpikeGuard() if watching is None or limits.spikes == "off" else watching
        self._spike.refuses = limits.spikes == "refuse"
        # Last, so that a copy is only made of a step that has passed every other guard. An earlier guardian is
        # replaced.
        others = [g for g in stepper.guards if not isinstance(g, (SpikeGuard, Guardian))]
        stepper.guards[:] = [*others, *([] if limits.spikes == "off" else [self._spike]), self]
        self._skips = SkipCounter(limits.skips_in_a_row, limits.skip_share)
        self._collapse = OverflowCounter()
        self._streaks: dict[str, Streak] = {}
        """The current streaks, by the names of the optimizers whose steps were skipped."""
        self._applier, self._snapshot = RemedyApplier(stepper, limits.islands), RollbackSnapshot(stepper)
        self._before_update = WeightsBeforeUpdate(stepper)
        self._diagnoser = Diagnoser(stepper, limits.diagnoses, record, self._emit, self._list_earlier_weights)
        self._optimizer = next(iter(stepper.optimizers.values()))
        self._rate: float | None = None
        self._applied_since_failure = 0
        """The number of applied steps since the last failure."""
        self._rollbacks = 0

    @property
    def remedies(self) -> Remedies:
        """Return the remedies that are in place."""
        return self._applier.remedies

    def _list_earlier_weights(self) -> OtherWeights:
        """Return the weights from before an early update; in repair mode, those of the copy for rollbacks."""
        # Other code that writes weights is no matter of the learning rate.
        if not self._before_update.is_untouched:
            return ()
        if self.mode == "repair":
            return self._snapshot.list_weights() if self.stepper.counts.applied <= EARLY else ()
        return self._before_update.of_last_update()

    @property
    def in_trouble(self) -> bool:
        """Return whether the last step was skipped for an abnormal reason, or its loss was far above the usual."""
        return self._skips.in_a_row > 0 or self._above

    @property
    def _above(self) -> bool:
        """Return whether losses are above the usual for an unknown reason; never if spikes are off."""
        return self.limits.spikes != "off" and self._spike.open

    # -- every step -----------------------------------------------------------------------------------------------

    def step(
        self, loss_fn: LossFunction, batch: Any, *, only: str | None = None, again: LossFunction | None = None
    ) -> StepReport:
        """Take a step and examine its outcome; `again` is the loss function for reruns, if `loss_fn` has side effects.

        Raises Diverged if the run cannot continue.
        """
        if self._meters is not None:
            self._meters.before()
        self._diagnoser.before(loss_fn, batch)
        try:
            report = self.stepper.step(loss_fn, batch, only=only)
        except BaseException:
            # BaseException: a KeyboardInterrupt must not leave the meters' hooks on the model either.
            if self._meters is not None:
                self._meters.abandon()
            raise
        if self._is_uneventful(report):
            self._count_applied(report)
        else:
            self._after(report, again)
        return report

    def look(self, report: StepReport) -> None:
        """Examine a step that the caller took with the Stepper itself; call it after each `step` or `apply`.

        Raises Diverged if the run cannot continue.
        """
        self._after(report, None)
        if self._meters is not None:
            self._meters.between()

    def passes(self, report: StepReport) -> bool:
        """Accept every step; as the last guard, keep a copy of weights that have just given a good loss."""
        # Called before the update: the loss at hand is that of the current weights, so they are known to be good.
        rate = self._optimizer.param_groups[0]["lr"]
        # Reading a tensor would wait for the device.
        self._rate = rate if isinstance(rate, (float, int)) else None
        if self._above:
            rates = self.history().rates
            # The maximum also counts the past: one large step is enough, even if the learning rate is normal again.
            self._spike.rate_jumped = bool(rates) and max(self._rate or 0.0, *rates) > JUMP * statistics.median(rates)
        elif self.mode == "repair":
            self._snapshot.take_if_due(self.limits.keep_every)
        if self.mode == "watch" and self.limits.diagnoses:
            self._before_update.take_if_early()
        return True

    def _is_uneventful(self, report: StepReport) -> bool:
        """Return whether nothing is to be examined, as after nearly every step."""
        quiet = report.applied and not (self._streaks or self._spike.notices or self.remedies.placed)
        return quiet and (self._meters is None or not self._meters.has_sample)

    def _after(self, report: StepReport, again: LossFunction | None) -> None:
        # A diagnosis communicates between the ranks of this model, which may be fewer than all.
        with self.stepper.ranks.here():
            self._judge(report, again)

    def _judge(self, report: StepReport, again: LossFunction | None) -> None:
        if self._meters is not None:
            for finding in self._meters.after(report):
                self._emit("alarm", LEVELS[finding.severity], str(finding), dict(finding.as_dict()))
        if report.applied:
            self._applied(report)
        elif report.reason == REFUSED or (guard := parse_guard_name(report.reason)) is None:
            self._skipped(report, again)
        else:
            self._count_refusal(report, guard)

    def _count_applied(self, report: StepReport) -> None:
        self._diagnoser.remember(report, self._rate)
        if self.limits.diagnoses:
            self._before_update.note_result()
        self._skips.applied()
        self._applied_since_failure += 1

    def _applied(self, report: StepReport) -> None:
        self._count_applied(report)
        if self._streaks:
            self._collapse.applied(report)
            self._streaks = {n: s for n, s in self._streaks.items() if not set(n.split(AND)) <= report.parts.keys()}
        if self._spike.notices:
            self._handle_loss_spikes(report)
        if self._applied_since_failure >= self.limits.probation and self.remedies.placed:
            self._lift()

    # -- losses ---------------------------------------------------------------------------------------------------

    def _handle_loss_spikes(self, report: StepReport) -> None:
        """Report losses above the usual range; in repair mode, roll back ruined weights."""
        for notice in self._spike.notices:
            level: Level = "error" if notice.kind == DIVERGENCE else "warning" if notice.loud else "info"
            self._emit("alarm", level, _describe_notice(notice), {"attempt": report.attempt, "loss": report.loss})
        # The loss stayed high after the rollback, so the weights were not the cause and the rollback is not counted.
        if self._spike.cleared and self._rollbacks:
            self._rollbacks -= 1
        if self._spike.diverges and self.mode == "repair":
            self._roll_back_ruined(report)

    def _roll_back_ruined(self, report: StepReport) -> None:
        """Roll back after updates with losses of ruined weights; give up only if there are good weights to end with."""
        streak = self._streak_of(report)
        streak.refused = self._spike.words(report)
        if not self._try_rollback() and self._snapshot.step is not None:
            raise self._give_up(RUINED, report, streak)

    # -- trouble --------------------------------------------------------------------------------------------------

    def _streak_of(self, report: StepReport) -> Streak:
        names = AND.join(report.parts)
        streak = self._streaks.get(names)
        if streak is None:
            # A GAN's optimizers, for example, step in turns: each has its own streak, and the message names it.
            others = len(report.parts) < len(self.stepper.optimizers)
            streak = self._streaks[names] = Streak(
                first=report.attempt, of=" and ".join(report.parts) if others else ""
            )
        return streak

    def _skipped(self, report: StepReport, again: LossFunction | None) -> None:
        streak = self._streak_of(report)
        streak.guard = ""
        falling = self._collapse.skipped(report, self.stepper.loss_scales)
        if report.reason == REFUSED:
            self._refused(report, streak)
        elif not falling or self._collapse.falls(report) >= FALLS:
            # While a scale falls, two skips are normal; the third is worth a rerun, which costs several steps.
            self._diagnoser.examine(report, streak, again, falling=falling, last=self._skips.next_is_too_much)
        if falling and streak.excused:
            self._skips.excused()
            return
        self._applied_since_failure = 0
        if report.reason == REFUSED and not self._spike.diverges:
            # A bad batch, or a new level that is still to be learned: no failure of the run.
            self._skips.excused()
            return
        self._skips.skipped()
        if self.mode == "repair" and self._try_repair(streak):
            return
        # The collapse first: it names the reason, where the count of skips is only its symptom.
        alarm = RUINED if report.reason == REFUSED else self._collapse.alarm() or self._skips.alarm()
        if alarm is not None:
            raise self._give_up(alarm, report, streak)

    def _count_refusal(self, report: StepReport, guard: str) -> None:
        """Count a step that a user's own guard refused; give up once there are too many."""
        streak = self._streak_of(report)
        streak.guard = guard
        self._skips.refused()
        alarm = self._skips.alarm()
        if alarm is not None:
            raise self._give_up(alarm, report, streak)

    def _refused(self, report: StepReport, streak: Streak) -> None:
        streak.refused = self._spike.words(report)
        text = f"spike: {streak.refused}; the update was refused"
        self._emit("alarm", "warning", text, {"attempt": report.attempt, "loss": report.loss})

    def _try_repair(self, streak: Streak) -> bool:
        """Return whether a remedy or a rollback was applied, so that the next step may succeed."""
        verdict = streak.verdict
        # The smallest change first: a remedy that was tried in a rerun and worked, then a rollback.
        remedy = None if verdict is None else self._applier.apply_first(verdict)
        if remedy is not None:
            self._emit("remedy", "warning", f"repaired: {remedy}, because of {remedy.culprit}", remedy.facts())
            self._start_afresh()
            return True
        in_a_row = self._skips.in_a_row >= min(HOPELESS, self.limits.skips_in_a_row)
        hopeless = in_a_row or self._collapse.collapsed or self._spike.diverges
        return hopeless and streak.older_weights_may_help and self._try_rollback()

    def _try_rollback(self) -> bool:
        step = None if self._rollbacks >= self.limits.rollbacks else self._snapshot.restore()
        if step is None:
            return False
        self._rollbacks += 1
        of = f"{self._rollbacks} of {self.limits.rollbacks}"
        self._emit(
            "remedy",
            "warning",
            f"rolled back to step {step} ({of}), continuing with the next batch",
            {"remedy": "rollback", "to": step},
        )
        # The losses since are those of weights that no longer exist.
        self._spike.rewound()
        self._start_afresh()
        return True

    def _start_afresh(self) -> None:
        self._skips.forgive()
        self._collapse, self._streaks = OverflowCounter(), {}

    def _give_up(self, alarm: str, report: StepReport, streak: Streak) -> Diverged:
        """Return the error that ends the run; if the weights are the cause and a copy exists, restore it first."""
        step = self._snapshot.restore() if streak.blames_weights else None
        rates = self.history().rates
        error = build_give_up_error(alarm, streak, mode=self.mode, rates=rates, back_at=step, limits=self.limits)
        error.report = report
        self._emit("alarm", "error", error.given, {"attempt": report.attempt, "do": error.do})
        return error

    def _lift(self) -> None:
        self._applied_since_failure = 0
        lifted = self._applier.lift_newest()
        if lifted is not None:
            text = f"{self.limits.probation} steps without trouble: no longer applied: {lifted}"
            self._emit("probation", "info", text, lifted.facts())

    def _emit(self, kind: Kind, level: Level, text: str, facts: Mapping[str, object]) -> None:
        self._tell(GuardEvent(kind, level, text, facts))

    # -- state ----------------------------------------------------------------------------------------------------

    def history(self) -> StepHistory:
        """Return the losses, gradient norms and learning rates of the last applied steps."""
        return self._diagnoser.history()

    def taken_up_from(self, checkpoint: str) -> None:
        """Record that the run resumed from this checkpoint, to trace weights to it that were bad from the start."""
        self._diagnoser.taken_up_from(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, without the copy for rollbacks.

        A resumed run makes its own at its first good step.
        """
        return {
            "remedies": self.remedies.as_dict(),
            "spike": self._spike.state_dict(),
            "skips": self._skips.state_dict(),
            "collapse": self._collapse.state_dict(),
            "streaks": {names: streak.as_dict() for names, streak in self._streaks.items()},
            "diagnoser": self._diagnoser.state_dict(),
            "applied_since_failure": self._applied_since_failure,
            "rollbacks": self._rollbacks,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error for a state that `load_state_dict` could not use; nothing is changed."""
        check_same_keys("a Guardian's state", self.state_dict(), state)
        Remedies.from_dict(state["remedies"])
        SpikeGuard().load_state_dict(state["spike"])
        SkipCounter(1, 1.0).load_state_dict(state["skips"])
        OverflowCounter().load_state_dict(state["collapse"])
        _parse_streaks(state["streaks"])
        self._diagnoser.check_state(state["diagnoser"])
        int(state["applied_since_failure"]), int(state["rollbacks"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict()`; remedies that are not in place yet are placed."""
        self._applier.resume(Remedies.from_dict(state["remedies"]))
        self._spike.load_state_dict(state["spike"])
        self._skips.load_state_dict(state["skips"])
        self._collapse.load_state_dict(state["collapse"])
        self._streaks = _parse_streaks(state["streaks"])
        self._diagnoser.load_state_dict(state["diagnoser"])
        self._applied_since_failure, self._rollbacks = int(state["applied_since_failure"]), int(state["rollbacks"])


def _describe_notice(notice: Notice) -> str:
    if notice.kind == NEW_LEVEL:
        return f"a new level: {notice.text}; losses at this level keep coming and now count as usual"
    if notice.kind == RISEN:
        return f"the loss has risen: {notice.text}, without a jump"
    if notice.kind == DIVERGENCE:
        return (
            f"divergence: {notice.text}; such losses do not recover by themselves: continue from an earlier checkpoint"
        )
    return f"spike: {notice.text}"


def _parse_streaks(plain: Mapping[str, Any]) -> dict[str, Streak]:
    return {str(names): Streak.from_dict(streak) for names, streak in plain.items()}
