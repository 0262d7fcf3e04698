"""Examine a skipped step: run it again if possible, otherwise report what can be observed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from halfstep.errors import WrongUse, format_error_line
from halfstep.guard.streak import Streak
from halfstep.guard.verdict import (
    PRECISION,
    WARM_UP,
    FailedStep,
    Kind,
    Level,
    ProposedRemedy,
    StepHistory,
    Verdict,
    build_origin_key,
)
from halfstep.observe.reachable import collect_closure_variables, find_generators, find_reachable_instances
from halfstep.observe.recorder import has_compiled_code
from halfstep.precision.island import find_islands
from halfstep.step.experiment.rerun import OtherWeights
from halfstep.step.report import StepReport
from halfstep.step.step_inputs import StepInputs
from halfstep.step.stepper import Stepper
from halfstep.step.sync import LossFunction
from halfstep.user_code import warn_user

if TYPE_CHECKING:
    from halfstep.guard.diagnosis.bad_inputs import PriorSteps
    from halfstep.guard.diagnosis.diagnose import DiagnosisCost

_SEQUENCES, _ONLY_TENSORS = (tuple, list), {Tensor}
_PLAIN = (Tensor, int, float, str, bytes, type(None))


class GeneratorFinder:
    """A finder of torch's generators: the model and the loss function are searched once, the batch in every step."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._looked_at: Any = None
        self._last: Any = None
        """The loss function of the last step, if it has no closure."""
        self._of_loss: list[torch.Generator] = []
        self._model_version: int | None = None
        self._of_model: list[torch.Generator] = []

    def states(self, loss_fn: Any, batch: Any) -> Generators:
        """Return each generator with its current state."""
        version = self._stepper.model_version
        if loss_fn is not self._last or version != self._model_version:
            self._look(loss_fn, version)
        plain = (type(batch) in _SEQUENCES and set(map(type, batch)) == _ONLY_TENSORS) or _is_plain_batch(batch)
        if plain and not (self._of_model or self._of_loss):
            return ()
        of_batch = () if plain else find_reachable_instances(batch, torch.Generator)
        together = dict.fromkeys((*self._of_model, *self._of_loss, *of_batch))
        return [(generator, generator.get_state()) for generator in together]

    def _look(self, loss_fn: Any, version: int) -> None:
        key = self._key(loss_fn)
        if version != self._model_version:
            # Only torch's: reading Python's and NumPy's before each step would take many times as long.
            found = find_generators(self._stepper.model)
            self._of_model = [generator for generator in found if isinstance(generator, torch.Generator)]
            self._model_version = version
        if key != self._looked_at:
            self._looked_at, self._of_loss = key, find_reachable_instances(loss_fn, torch.Generator)
        self._last = loss_fn if getattr(loss_fn, "__closure__", ()) is None else None

    def _key(self, loss_fn: Any) -> Any:
        """Return a key that is the same for a lambda written inside a loop, which is a new object in every step."""
        held = tuple(map(id, collect_closure_variables(loss_fn).values()))
        return id(getattr(loss_fn, "__code__", loss_fn)), held


def _is_plain_batch(batch: Any, deep: int = 3) -> bool:
    """Return whether a batch consists of tensors, numbers and containers of these, as nearly all do."""
    # The general search visits every attribute; this test keeps it out of the usual step.
    if isinstance(batch, _PLAIN):
        return True
    items = batch.values() if isinstance(batch, dict) else batch
    return (
        deep > 0 and isinstance(batch, (dict, tuple, list)) and all(_is_plain_batch(item, deep - 1) for item in items)
    )


REMEMBERED = 50
"""The number of applied steps in the history."""
NO_MORE = "steps made of forward() and backward() cannot be rerun for a diagnosis; guardian.step() can"
NO_MORE_DIAGNOSES = "diagnoses were made, the maximum per run: further skips are counted, not diagnosed"
LOWER = "a lower loss scale: StaticScale(...), or DynamicScale(), which finds one by itself"
Step = tuple[list[str], float, float, float | None]
"""The names of the optimizers, the loss, the gradient norm and the learning rate of a step."""


class Diagnoser:
    """The diagnoses of a run; `most` limits their number, since each costs several steps."""

    def __init__(
        self,
        stepper: Stepper,
        most: int,
        record: Callable[[FailedStep], None] | None,
        emit: Callable[[Kind, Level, str, Mapping[str, object]], None],
        earlier: Callable[[], OtherWeights] = tuple,
    ) -> None:
        self._stepper, self._most, self._record, self._emit = stepper, most, record, emit
        self._diagnoses = 0
        self._times: Counter[tuple[object, ...]] = Counter()
        """The verdicts of this process, by their cause and the place of the origin."""
        self._steps: deque[Step] = deque(maxlen=REMEMBERED)
        self._own = GeneratorFinder(stepper)
        self._generators: Generators = ()
        self._begun: float | None = None
        self._checkpoint, self._resumed_at = "", 0
        self._earlier = earlier

    def before(self, loss_fn: LossFunction, batch: Any) -> None:
        """Record what a rerun needs and a step does not: the states of the user's generators, and the time."""
        self._generators, self._begun = self._own.states(loss_fn, batch), time.perf_counter()

    def taken_up_from(self, checkpoint: str) -> None:
        """Record that the weights are those of this checkpoint."""
        self._checkpoint, self._resumed_at = checkpoint, self._stepper.counts.applied

    def remember(self, report: StepReport, rate: float | None) -> None:
        """Record an applied step."""
        self._steps.append((list(report.parts), report.loss, report.grad_norm, rate))

    def history(self, report: StepReport | None = None) -> StepHistory:
        """Return the last applied steps; with a report, only those of the same optimizers."""
        # The losses of other optimizers are on another scale.
        names = None if report is None else list(report.parts)
        steps = [step for step in self._steps if names in (None, step[0])]
        _, losses, norms, rates = zip(*steps, strict=True) if steps else ((), (), (), ())
        return StepHistory(losses, norms, tuple(rate for rate in rates if rate is not None))

    def examine(
        self, report: StepReport, streak: Streak, again: LossFunction | None, *, falling: bool, last: bool
    ) -> None:
        """Record in the streak the cause of a skip, unless it is known. The `last` step of a run is always examined.

        `falling` says whether the loss scale is lower now than it was in the step.
        """
        attempt = self._stepper.attempt
        if attempt is None or not streak.calls_for_diagnosis(report.reason or ""):
            return
        if attempt.loss_fn is None:
            self._observe_only(report, streak)
        elif self._diagnoses < self._most or (last and self._most > 0):
            self._diagnoses += 1
            replayed = attempt if again is None else attempt._replace(loss_fn=again)
            verdict = self._diagnose_step(report, replayed, streak)
            if verdict.cause == WARM_UP and not falling:
                # A skip is normal where the scale falls; this one will fail again.
                why = verdict.sentence.partition(": ")[2]
                sentence = f"precision: {why}; this loss scale does not fall by itself"
                remedies = (ProposedRemedy("fix_code", LOWER, None),)
                verdict = Verdict(PRECISION, sentence, verdict.culprit, verdict.evidence, remedies)
            self._note(verdict, report, streak, replayed)
            if self._diagnoses == self._most:
                text = f"{self._diagnoses} {NO_MORE_DIAGNOSES}"
                self._emit("alarm", "warning", text, {"attempt": report.attempt, "diagnoses": self._diagnoses})

    def _diagnose_step(self, report: StepReport, replayed: StepInputs, streak: Streak) -> Verdict:
        from halfstep.guard.diagnosis.bad_inputs import PriorSteps

        took = None if self._begun is None else time.perf_counter() - self._begun
        return diagnose(
            self._stepper,
            report,
            again=replayed.loss_fn,
            history=self.history(report),
            past=PriorSteps(report.step, self._checkpoint, self._resumed_at, *streak.earlier_skip(report.attempt)),
            generators=self._generators,
            seconds=took,
            earlier=self._earlier(),
            tell=lambda cost: self._emit("alarm", "warning", str(cost), {"attempt": report.attempt, **asdict(cost)}),
        )

    def _note(self, verdict: Verdict, report: StepReport, streak: Streak, attempt: StepInputs) -> None:
        known = streak.verdict is not None and streak.verdict.sentence == verdict.sentence
        streak.verdict, streak.diagnosed = verdict, report.reason or ""
        if verdict.cause != WARM_UP and self._record is not None:
            self._record_step(self._record, verdict, report, attempt)
        if not known:
            level: Level = "info" if verdict.cause == WARM_UP else "warning"
            # By cause and place: of a data set with many bad samples, each has another sentence.
            origin = build_origin_key(verdict)
            self._times[origin] += 1
            facts = {"attempt": report.attempt, "times": self._times[origin], **verdict.as_dict()}
            self._emit("verdict", level, verdict.sentence, facts)

    def _record_step(
        self, record: Callable[[FailedStep], None], verdict: Verdict, report: StepReport, attempt: StepInputs
    ) -> None:
        placed = tuple(find_islands(self._stepper.model))
        failed = FailedStep(attempt, report, self._stepper.precision.name, placed, self.history(report), verdict)
        try:
            record(failed)
        except Exception as error:
            # Recording writes to disk; a failure there must not end a run that the guard may still repair.
            text = f"attempt {report.attempt} could not be recorded: {format_error_line(error)}"
            self._emit("alarm", "warning", text, {"attempt": report.attempt})

    def _observe_only(self, report: StepReport, streak: Streak) -> None:
        if streak.seen:
            return
        bad = self._stepper.bad_parameter
        names = (name for name, parameter in self._stepper.model.named_parameters() if parameter is bad)
        what = f"the loss is {report.loss}" if bad is None else f"the gradient of {next(names, '?')} is not finite"
        streak.seen = f"{what} ({NO_MORE})"
        self._times[(streak.seen,)] += 1
        facts = {"attempt": report.attempt, "cause": None, "times": self._times[(streak.seen,)]}
        self._emit("verdict", "warning", streak.seen, facts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"diagnoses": self._diagnoses, "steps": [[list(names), *numbers] for names, *numbers in self._steps]}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error for a state that `load_state_dict` could not use; nothing is changed."""
        int(state["diagnoses"])
        _parse_remembered_steps(state["steps"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict()`."""
        self._diagnoses, self._steps = (
            int(state["diagnoses"]),
            deque(_parse_remembered_steps(state["steps"]), maxlen=REMEMBERED),
        )


def _parse_remembered_steps(plain: Any) -> list[Step]:
    return [
        ([str(name) for name in names], float(loss), float(norm), None if rate is None else float(rate))
        for names, loss, norm, rate in plain
    ]


Generators = Sequence[tuple[torch.Generator, Tensor]]
_NO_HISTORY = StepHistory()


def _warn_of_cost(cost: DiagnosisCost) -> None:
    warn_user(str(cost))


class DiagnosesReports(Protocol):
    """A step of another kind that can say why it was skipped, such as `halfstep.GradScaler` in a watched loop."""

    def diagnose_report(self, report: StepReport) -> Verdict:
        """Return the verdict on the last step, or raise WrongUse."""


def diagnose(
    stepper: Stepper | DiagnosesReports,
    report: StepReport,
    *,
    again: LossFunction | None = None,
    history: StepHistory = _NO_HISTORY,
    past: PriorSteps | None = None,
    generators: Generators = (),
    seconds: float | None = None,
    tell: Callable[[DiagnosisCost], None] = _warn_of_cost,
    earlier: OtherWeights = (),
) -> Verdict:
    """Rerun a skipped step in several ways, and return the cause of its failure.

    The model is not changed. Every rank must call this, and all get the same verdict.

    Args:
        stepper: The Stepper of the step, or the GradScaler of a loop that `halfstep.watch` watches.
        report: The report of its last step, which was skipped.
        again: The loss function for the reruns, if the step's own has side effects.
        history: Losses and learning rates of the steps before.
        past: The checkpoint that the run resumed from.
        generators: torch.Generators of the model or the data, with their states before the step.
        seconds: The duration of a step, for the cost.
        tell: A callback that gets the cost if the model is large.
        earlier: Parameters with their values from before the last update, to find an update that made the step fail.

    Returns:
        The cause, the evidence and the remedies.

    Raises:
        WrongUse: The step was not skipped, is not the last one, or cannot be rerun.
    """
    if not isinstance(stepper, Stepper):
        return _ask_for_verdict(stepper, report)
    attempt = stepper.attempt
    if report.reason is None or attempt is None or report.attempt != stepper.counts.attempted:
        raise WrongUse(
            f"diagnose(stepper, report) with {report}",
            allowed="the report of this Stepper's last step, which was skipped",
            do="call it before the next step: the batch is gone afterwards",
        )
    if attempt.loss_fn is None:
        raise WrongUse(
            "diagnose() after a step made of forward() and backward(), which cannot be rerun",
            allowed="a step from a loss function and a batch",
            do="stepper.step(loss_fn, batch)",
        )
    known = {id(generator): (generator, state) for generator, state in (*attempt.own_generators, *generators)}
    replayed = attempt._replace(own_generators=tuple(known.values()), loss_fn=again or attempt.loss_fn)
    # Here, because most runs never diagnose a step.
    from halfstep.guard.diagnosis.bad_inputs import PriorSteps
    from halfstep.guard.diagnosis.diagnose import diagnose_attempt

    return diagnose_attempt(
        stepper.model,
        replayed,
        precision=stepper.precision,
        reason=report.reason,
        history=history,
        compiled=has_compiled_code(stepper.model, attempt.loss_fn),
        past=past or PriorSteps(applied=report.step),
        optimizers=tuple(stepper.optimizers.values()),
        on_gradients=stepper.on_gradients,
        clip_norm=stepper.clip_norm,
        seconds=seconds,
        tell=tell,
        earlier=earlier,
    )


def _ask_for_verdict(other: DiagnosesReports, report: StepReport | None) -> Verdict:
    if not hasattr(other, "diagnose_report") or report is None or report.applied:
        raise WrongUse(
            f"diagnose({type(other).__name__}, {report})",
            allowed="a halfstep.Stepper and its report, or the halfstep.GradScaler of a watched loop and its report",
            do="halfstep.watch(model, optimizer, scaler) once, before the loop: it prints the cause by itself",
        )
    return other.diagnose_report(report)
