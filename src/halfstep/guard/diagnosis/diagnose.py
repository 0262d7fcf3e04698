"""Diagnose a failed step: run it again in several ways, each of which rules something out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.formats import FP32
from halfstep.guard.diagnosis import bad_inputs, explain
from halfstep.guard.diagnosis.earlier_weights import measure_update
from halfstep.guard.diagnosis.trials import TrialOutcome, Trials, try_precision_remedies
from halfstep.guard.verdict import (
    CODE,
    COMPILER,
    DATA,
    DIVERGENCE,
    NOT_REPRODUCIBLE,
    PRECISION,
    STATE,
    WARM_UP,
    Culprit,
    ProposedRemedy,
    StepHistory,
    Verdict,
    locate_culprit,
)
from halfstep.numbers import format_bytes
from halfstep.observe.nonfinite_origin import BATCH, LITERAL, MINUS_INF, NAN, OTHERS
from halfstep.precision.precision import Precision, resolve_precision_name
from halfstep.step.experiment.rerun import HeldTensors, OnGradients, OtherWeights, ReplayConfig, collect_held_tensors
from halfstep.step.report import BUFFER_NOT_FINITE, GRADIENT_OVERFLOW, LOSS_NOT_FINITE, parse_guard_name
from halfstep.step.step_inputs import StepInputs


def agree_on_verdict(verdict: Verdict) -> Verdict:
    """Return the verdict of the first rank that has an origin, forward before backward; every rank must call this."""
    verdicts = [Verdict.from_dict(json.loads(text)) for text in distributed.gather_texts(json.dumps(verdict.as_dict()))]
    return min(verdicts, key=_build_verdict_order)


def _build_verdict_order(verdict: Verdict) -> tuple[bool, bool, bool]:
    culprit = verdict.culprit
    return culprit is None, culprit is not None and culprit.backward, verdict.cause == NOT_REPRODUCIBLE


LARGE = 1_000_000_000
"""The number of parameters above which a diagnosis is bounded."""
MOST_RERUNS = 4
"""The maximum number of reruns of a large model: unchanged, without a loss scale, in fp32, and the first remedy."""


@dataclass(frozen=True)
class DiagnosisCost:
    """The memory and time that a diagnosis takes."""

    parameters: int
    gradient_bytes: int
    """The size of one set of gradients, which every rerun makes, as a step does."""
    buffer_bytes: int
    """The size of the buffers, which are copied; weights are copied only if forward writes them."""
    seconds: float | None
    """The time of the failed step."""

    @property
    def is_large(self) -> bool:
        return self.parameters > LARGE

    @property
    def reruns(self) -> int | None:
        """Return the maximum number of reruns, or None for no limit."""
        return MOST_RERUNS if self.is_large else None

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", at least {MOST_RERUNS * self.seconds:.3g} s by the last step's time"
        return (
            f"starting a diagnosis: {self.parameters:,} parameters, so the step is rerun at most {MOST_RERUNS} times"
            f"{time}; it needs {format_bytes(self.gradient_bytes)} for gradients and "
            f"{format_bytes(self.buffer_bytes)} for copies of "
            "buffers, the activations of an fp32 step, and no copy of the weights"
        )


def estimate_diagnosis_cost(model: nn.Module, seconds: float | None = None) -> DiagnosisCost:
    """Return the cost of a diagnosis, from shapes alone."""
    parameters = list(model.parameters())
    return DiagnosisCost(
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() * parameter.itemsize for parameter in parameters if parameter.requires_grad),
        sum(buffer.numel() * buffer.itemsize for buffer in model.buffers()),
        seconds,
    )


_FORWARD = (LOSS_NOT_FINITE, BUFFER_NOT_FINITE)
"""The reasons that do not depend on the loss scale."""
_NO_HISTORY = StepHistory()
_NO_PAST = bad_inputs.PriorSteps()
_WRITTEN = "written"
_OTHER_LOSS = ProposedRemedy("fix_code", explain.OTHER_LOSS, None)
_CLONE_FIRST = ProposedRemedy("fix_code", explain.CLONE_FIRST, None)
_NORMALIZE = ProposedRemedy("fix_code", "normalize this batch like the others", None)
_SKIP = ProposedRemedy("skip", "skip this batch", None)
_SLOWER = ProposedRemedy("lower_rate", "lower the learning rate", None)


def diagnose_attempt(
    model: nn.Module,
    attempt: StepInputs,
    *,
    precision: Precision,
    reason: str,
    history: StepHistory = _NO_HISTORY,
    compiled: bool = False,
    past: bad_inputs.PriorSteps = _NO_PAST,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    on_gradients: OnGradients | None = None,
    clip_norm: float | None = None,
    seconds: float | None = None,
    tell: Callable[[DiagnosisCost], None] = lambda cost: None,
    earlier: OtherWeights = (),
) -> Verdict:
    """Return the cause of a skipped step. The model is not changed.

    Every rank must call this, and all get the same verdict. `compiled`: whether compiled code ran in the step.
    `earlier`: the weights from before the last update, if there is a copy. `seconds`: the time the step took. `tell`
    receives the cost in advance, if the model is large.
    """
    # All ranks make the same reruns, so they must decide from the same facts, and one alone may have noticed the write.
    # With a sharded model, each rank sees other weights and may find another origin.
    written = _WRITTEN in distributed.gather_texts(_WRITTEN if attempt.batch_changed else "")
    # Before the reruns, which may write to the batch as well.
    storages = bad_inputs.find_written_storages(attempt) if written else frozenset()
    cost = estimate_diagnosis_cost(model, seconds)
    if cost.is_large:
        tell(cost)
    trials = Trials(model, attempt, written=written, most=cost.reruns)
    case = _DiagnosisCase(
        trials,
        precision,
        reason,
        history,
        compiled,
        past,
        tuple(optimizers),
        on_gradients,
        clip_norm,
        storages,
        earlier,
    )
    verdict = agree_on_verdict(case.verdict())
    if not written or _CLONE_FIRST in verdict.remedies:
        return verdict
    # The batch was changed during the step, so the reruns are not quite the step that failed.
    return replace(verdict, evidence=(explain.BATCH_WRITTEN, *verdict.evidence))


def _add_path(culprit: Culprit | None, spot: bad_inputs.BatchSpot) -> Culprit | None:
    return None if culprit is None else replace(culprit, batch_path=spot.leaf)


@dataclass(frozen=True)
class _DiagnosisCase:
    """One failed step, and everything that was known about it before the reruns."""

    trials: Trials
    precision: Precision
    reason: str
    history: StepHistory
    compiled: bool
    past: bad_inputs.PriorSteps
    optimizers: tuple[torch.optim.Optimizer, ...]
    on_gradients: OnGradients | None
    clip_norm: float | None
    written: frozenset[int]
    """The storages of the batch that the step wrote to."""
    earlier: OtherWeights
    """The weights from before the last update; empty if there is no copy."""

    @property
    def attempt(self) -> StepInputs:
        return self.trials.attempt

    @property
    def scale(self) -> float:
        return max(factor.scale for factor in self.attempt.factors.values())

    @property
    def _own_scale(self) -> float | None:
        # Forward has no loss scale. With one, gradients that overflow could hide what forward itself overflows by.
        return 1.0 if self.reason in _FORWARD else None

    @property
    def _applied(self) -> int:
        """Return the number of steps applied before this one, as far as it is known."""
        return self.past.applied or len(self.history.losses)

    @cached_property
    def _held(self) -> HeldTensors:
        return collect_held_tensors(self.trials.model, self.attempt.loss_fn, self.attempt.microbatches)

    @cached_property
    def _update_share(self) -> float | None:
        """Return the size of the newest updates as a part of the weights' norm, as the ranks agree on it."""
        model, reaches = self.trials.model, self.attempt.reaches
        weights = [p for reach in reaches.values() for p in reach.parameters] if reaches else list(model.parameters())
        known = set(map(id, weights))
        taking_part = [
            each for each in self.optimizers if any(id(p) in known for g in each.param_groups for p in g["params"])
        ]
        mine = explain.estimate_update_share(self.history, weights, taking_part, self.clip_norm)
        found = [float(text) for text in distributed.gather_texts("" if mine is None else repr(mine)) if text]
        return max(found, default=None)

    @cached_property
    def _grown(self) -> str:
        """Return how losses or norms have grown; empty if they have not, or if it is not the weights' doing."""
        found = explain.describe_growth(self.history)
        return found if found and self._weights_moved else ""

    @cached_property
    def _ruined_by_update(self) -> str:
        """Return that the last update made the step fail; empty if it fails without that update, too."""
        shares = [float(text) for text in distributed.gather_texts(repr(self._measured_share))]
        # A number that is just out of range may come back into it with any other weights.
        if not max(shares) > explain.LARGE_UPDATE or min(shares) < 0.0:
            return ""
        before = self.trials.run(self._fp32_config, weights=self.earlier)
        return explain.describe_ruinous_update(max(shares)) if before.finite else ""

    @property
    def _measured_share(self) -> float:
        """The size of the last update as a part of the weights' norm; -1 if there is no copy from before it."""
        return measure_update(self.earlier) if self.earlier else -1.0

    @property
    def _fp32_config(self) -> ReplayConfig:
        own = self.precision.computes is FP32
        return ReplayConfig(self.precision if own else resolve_precision_name("fp32"), scale=1.0)

    @cached_property
    def _weights_moved(self) -> bool:
        """Return whether the weights may have moved enough to make a loss a thousand times as large."""
        share = self._update_share
        largest = max(
            float(text) for text in distributed.gather_texts(repr(explain.find_largest_weight(self.trials.model)[0]))
        )
        return share is None or share > explain.LARGE_UPDATE or largest > explain.LARGE_WEIGHT

    def verdict(self) -> Verdict:
        """Return the verdict; each test assumes that those before it failed."""
        as_it_was = self._run(self._own_scale)
        if as_it_was.error:
            return Verdict(DATA, explain.explain_not_rerun(as_it_was), None, (), (_OTHER_LOSS, _SKIP))
        if as_it_was.finite:
            return self._verdict_not_rerun()
        # Forward does not depend on the scale; if the step is finite without it, the scale alone is too high.
        if self.reason not in _FORWARD and self.scale > 1.0:
            unscaled = self._run(1.0)
            if unscaled.finite:
                return self._scale_too_high(as_it_was)
            as_it_was = unscaled
        return self._verdict_in_fp32(as_it_was)

    def _run(self, scale: float | None, *, compiled: bool = False) -> TrialOutcome:
        return self.trials.run(ReplayConfig(self.precision, scale=scale, compiled=compiled))

    # -- the scale ----------------------------------------------------------------------------------------------

    def _scale_too_high(self, at_scale: TrialOutcome) -> Verdict:
        sentence = explain.explain_high_scale(self.scale, at_scale)
        if self.reason == GRADIENT_OVERFLOW:
            fits = ProposedRemedy("skip", "the loss scale falls by itself", True)
            return Verdict(WARM_UP, f"warm_up: {sentence}", at_scale.culprit, (), (fits,))
        sentence += ", and the scale cannot fall below its floor"
        remedies = try_precision_remedies(
            self.trials, self.precision, at_scale.culprit, self._run_in_fp32(), scale=None
        )
        return Verdict(PRECISION, f"precision: {sentence}", at_scale.culprit, (), remedies)

    # -- what does not happen again -----------------------------------------------------------------------------

    def _verdict_not_rerun(self) -> Verdict:
        if (guard := parse_guard_name(self.reason)) is not None:
            return self._divergence(explain.explain_refused_step(guard), None)
        if self.on_gradients is not None and self.reason not in _FORWARD:
            edited = self.trials.run(ReplayConfig(self.precision, on_gradients=self.on_gradients))
            if not edited.finite and not edited.error:
                fix = ProposedRemedy("fix_code", explain.suggest_gradient_hook_change(edited), None)
                return Verdict(CODE, explain.explain_gradient_hook(edited), edited.culprit, (), (fix,))
        if self.trials.written:
            sentence = f"data: {explain.BATCH_WRITTEN}; a rerun with its current values is finite"
            return Verdict(DATA, sentence, None, (), (_CLONE_FIRST,))
        # The scale may be just at the limit, so that rounding decides. Twice the scale shows whether it is.
        if self.reason == GRADIENT_OVERFLOW and not (above := self._run(2 * self.scale)).finite:
            return self._scale_too_high(above)
        if self.compiled:
            as_compiled = self._run(self._own_scale, compiled=True)
            if not as_compiled.finite:
                return self._verdict_compiled_only(as_compiled)
        # A third result: finite now and failing then is a nondeterministic operation, not a single event.
        once_more = self._run(self._own_scale)
        return self._verdict_not_reproducible(
            explain.NOT_NOW if once_more.finite or once_more.error else explain.NOW_AND_THEN
        )

    def _verdict_not_reproducible(self, evidence: str) -> Verdict:
        known = {id(generator) for generator, _ in self.attempt.own_generators}
        # Of the others, no state before the step is recorded in any case.
        held = [generator for generator in self._held.generators if isinstance(generator, torch.Generator)]
        unknown = any(id(generator) not in known for generator in held)
        told = (evidence, *((explain.OWN_GENERATOR,) if unknown else ()))
        return Verdict(NOT_REPRODUCIBLE, explain.NOT_AGAIN, None, told, (_SKIP,))

    def _verdict_compiled_only(self, as_compiled: TrialOutcome) -> Verdict:
        if self.reason == GRADIENT_OVERFLOW and self._run(1.0, compiled=True).finite:
            return self._scale_too_high(as_compiled)
        bad = as_compiled.bad_parameters
        evidence = (f"compiled, the gradient of {bad[0]} is not finite",) if bad else ()
        eager = ProposedRemedy("eager", "run it without torch.compile", True)
        return Verdict(COMPILER, explain.ONLY_COMPILED, None, evidence, (eager,))

    # -- what happens again -------------------------------------------------------------------------------------

    def _verdict_in_fp32(self, as_it_was: TrialOutcome) -> Verdict:
        # The order matters: bad values that came into the step, impossible state and a bad batch are ruled out first.
        # A bad batch, for example, is often finite in fp32, and would be taken for a lack of precision.
        culprit = as_it_was.culprit
        outside = "" if culprit is None else culprit.outside or ""
        if outside.startswith(BATCH):
            spots = bad_inputs.find_nonfinite_spots(self.attempt.microbatches, outside, self.written)
            if spots and spots[0].written:
                return self._verdict_batch_written(as_it_was, spots)
            if spots:
                others = tuple(map(explain.describe_batch_spot, spots[1:]))
                return Verdict(DATA, f"data: {explain.describe_batch_spot(spots[0])}", culprit, others, (_SKIP,))
        elif outside and outside != OTHERS:
            return self._came_from_outside(as_it_was, outside)
        if broken := bad_inputs.find_negative_variance(self.trials.model, self._held, as_it_was):
            return self._verdict_state(as_it_was, broken, f"{broken} has negative numbers")
        return self._verdict_batch(as_it_was) or self._precision_or_not(as_it_was)

    def _verdict_batch_written(self, as_it_was: TrialOutcome, spots: Sequence[bad_inputs.BatchSpot]) -> Verdict:
        """Return the verdict on a batch that is non-finite now, and that the step wrote to."""
        kinds = {spot.value for spot in spots if spot.written}
        for zeros in (False, True):
            with bad_inputs.replace_written_tensors(self.attempt, self.written, zeros=zeros):
                outcome = self._run(1.0)
                # Ordinary numbers that fail prove that the code makes them. Zeros that fail prove it only for
                # infinities: NaN in a batch stays NaN in every operation.
                same = outcome.culprit is not None and kinds <= set(outcome.culprit.kinds) - {NAN}
                if not outcome.finite and not outcome.error and (same or not zeros):
                    verdict = self._precision_or_not(outcome)
                    return replace(verdict, evidence=(explain.describe_batch_spot(spots[0]), *verdict.evidence))
        return Verdict(DATA, explain.explain_written_batch(spots[0]), as_it_was.culprit, (), (_CLONE_FIRST, _SKIP))

    def _came_from_outside(self, as_it_was: TrialOutcome, name: str) -> Verdict:
        """Return the verdict on values that came neither from an operation of the step nor from the batch."""
        culprit, tensor = as_it_was.culprit, bad_inputs.find_named_tensor(name, self.trials.model, self._held)
        assert culprit is not None, "it has a name"
        if name == LITERAL:
            return self._verdict_code(as_it_was, as_it_was)
        rows = bad_inputs.describe_bad_rows(tensor)
        if (attempt := self.past.left_by_skip(name)) is not None:
            keep = ProposedRemedy("fix_code", explain.suggest_state_to_keep(name), None)
            return Verdict(STATE, explain.explain_left_state(culprit, attempt), culprit, (), (keep,))
        if not name.startswith((bad_inputs.WEIGHT, bad_inputs.BUFFER)):
            # No skip restores it, so the step that is diagnosed may have written it itself.
            cause = self._cause_next_to(name, tensor)
            if cause is not None:
                return replace(cause, evidence=(*cause.evidence, explain.describe_left_state(culprit)))
        if bad_inputs.is_module_tensor(name):
            kinds = " and ".join(culprit.kinds)
            where = f" in {rows}" if rows else ""
            what = f"{name} contains {kinds}{where} before the first operation"
            return self._verdict_state(
                as_it_was, name, what, bool(rows) and bad_inputs.is_embedding_weight(name, self.trials.model)
            )
        return Verdict(DATA, explain.explain_outside_tensor(culprit, rows), culprit, (), (_SKIP,))

    def _cause_next_to(self, name: str, tensor: Tensor | None) -> Verdict | None:
        """Return the verdict on a step that also fails with finite values in this tensor; None if it does not."""
        writable = tensor is not None and not tensor.is_inference() and tensor.layout is torch.strided
        # All ranks make the same reruns.
        everywhere = all(distributed.gather_texts(_WRITTEN if writable else ""))
        if tensor is None or not everywhere:
            spots = bad_inputs.find_nonfinite_spots(self.attempt.microbatches, None, self.written)
            if not spots or spots[0].value == MINUS_INF:
                return None
            return Verdict(DATA, f"data: {explain.describe_batch_spot(spots[0])}", None, (), (_SKIP,))
        with bad_inputs.zero_nonfinite_values(tensor):
            outcome = self._run(1.0)
            culprit = outcome.culprit
            if outcome.finite or outcome.error or (culprit is not None and culprit.outside == name):
                return None
            return self._verdict_in_fp32(outcome)

    def _verdict_state(self, as_it_was: TrialOutcome, name: str, what: str, looked_up: bool = False) -> Verdict:
        # Losses that had grown before explain a bad weight: an update made it, nothing overwrote it.
        if why := self._grown:
            evidence = (why, *explain.describe_rate_evidence(self.history))
            return Verdict(DIVERGENCE, f"divergence: {what}, and {why}", as_it_was.culprit, evidence, (_SLOWER,))
        tensor = bad_inputs.find_named_tensor(name, self.trials.model, self._held)
        evidence = bad_inputs.describe_optimizer_evidence(tensor, self.optimizers)
        culprit = as_it_was.culprit
        if culprit is not None and culprit.outside is None:
            culprit, evidence = replace(culprit, outside=name), (explain.describe_failure(as_it_was), *evidence)
        if fault := self._update_fault(name):
            sentence = explain.explain_bad_update(what, self._applied, fault)
            return Verdict(STATE, sentence, culprit, evidence, (self.past.remedy_of_update(fault),))
        sentence = explain.explain_bad_state(what, self.past.since(looked_up))
        return Verdict(STATE, sentence, culprit, evidence, (self.past.remedy(name),))

    def _update_fault(self, name: str) -> str:
        """Return why the last update made a weight non-finite; empty if the optimizer's state does not show it."""
        tensor = bad_inputs.find_named_tensor(name, self.trials.model, self._held)
        known = tensor is not None and self._applied and name.startswith(bad_inputs.WEIGHT)
        from halfstep.step.bad_update import describe_update_fault

        mine = describe_update_fault(tensor, self.optimizers) if known and tensor is not None else ""
        return next(filter(None, distributed.gather_texts(mine)), "")

    def _verdict_batch(self, as_it_was: TrialOutcome) -> Verdict | None:
        """Return the verdict on one sample that is far from the others, or a batch far from anything.

        Returns None if neither explains the failure.
        """
        culprit, microbatches = as_it_was.culprit, self.attempt.microbatches
        far = bad_inputs.find_outlier_sample(microbatches)
        # Only if the step is finite without it: an unusual sample alone proves nothing.
        if far is not None and self._finite_in(bad_inputs.replace_sample(self.attempt, far)):
            sentence = explain.explain_outliers(far, as_it_was)
            return Verdict(DATA, sentence, _add_path(culprit, far), (explain.FINITE_WITHOUT,), (_SKIP,))
        for found in bad_inputs.find_large_tensors(
            microbatches, bad_inputs.UNUSUAL if self._applied else bad_inputs.ABSURD
        ):
            if self._finite_in(bad_inputs.normalize_spot(self.attempt, found)):
                sentence = explain.explain_outliers(found, as_it_was)
                remedies = (_NORMALIZE, _SKIP)
                return Verdict(DATA, sentence, _add_path(culprit, found), (explain.FINITE_NORMALIZED,), remedies)
        return None

    def _finite_in(self, attempt: StepInputs) -> bool:
        outcome = self.trials.run(ReplayConfig(self.precision, scale=1.0), attempt)
        return outcome.finite and not explain.describe_fp32_deviation(outcome, self.history)

    def _run_in_fp32(self) -> TrialOutcome:
        return self.trials.run(ReplayConfig(resolve_precision_name("fp32"), scale=1.0))

    def _precision_or_not(self, as_it_was: TrialOutcome) -> Verdict:
        if self.precision.computes is FP32:
            if self._happens_again():
                return self._fails_in_fp32(as_it_was, as_it_was)
            return self._verdict_not_reproducible(explain.NOW_AND_THEN)
        fp32 = self._run_in_fp32()
        if fp32.error:
            return self._verdict_without_fp32(as_it_was, fp32)
        if not fp32.finite:
            return self._fails_in_fp32(as_it_was, fp32)
        # An operation whose result fits fp32 but not its own format fails every time. For others that must be tried.
        culprit = as_it_was.culprit
        overflows = culprit is not None and culprit.in_fp32 is not None and culprit.in_fp32 > culprit.limit
        if not overflows and not self._happens_again():
            return self._verdict_not_reproducible(explain.NOW_AND_THEN)
        why = explain.describe_fp32_deviation(fp32, self.history)
        # A loss may grow on purpose, slowly, as its weight is raised; a jump is none.
        if why and (self._weights_moved or not explain.is_near_last_loss(fp32, self.history)):
            return self._divergence(f"divergence: {why}", as_it_was.culprit, explain.describe_failure(as_it_was))
        return self._precision(as_it_was, fp32)

    def _happens_again(self) -> bool:
        # A large model has few reruns; one that only confirms is left out.
        if self.trials.few_left:
            return True
        once_more = self._run(1.0)
        return bool(once_more.error) or not once_more.finite

    def _precision(self, as_it_was: TrialOutcome, fp32: TrialOutcome) -> Verdict:
        remedies = try_precision_remedies(self.trials, self.precision, as_it_was.culprit, fp32)
        sentence = explain.explain_precision_failure(self.precision, as_it_was, remedies)
        return Verdict(PRECISION, sentence, as_it_was.culprit, explain.list_useless_remedies(remedies), remedies)

    def _verdict_without_fp32(self, as_it_was: TrialOutcome, fp32: TrialOutcome) -> Verdict:
        """Return the verdict from the one operation that was repeated in fp32 alone, if the step cannot run in fp32."""
        culprit = as_it_was.culprit
        fits = culprit is not None and culprit.in_fp32 is not None and math.isfinite(culprit.in_fp32)
        verdict = self._precision(as_it_was, fp32) if fits else self._fails_in_fp32(as_it_was, as_it_was)
        told = f"the whole step could not be run in fp32: {fp32.error}"
        return Verdict(verdict.cause, verdict.sentence, culprit, (told, *verdict.evidence), verdict.remedies)

    def _fails_in_fp32(self, as_it_was: TrialOutcome, fp32: TrialOutcome) -> Verdict:
        """Return the verdict on a step that also fails in fp32."""
        # The origin in fp32 is what must change, even if another operation failed before it in 16 bits.
        why = self._grown
        if not fp32.undefined and not why:
            culprit = fp32.culprit
            largest = fp32.grad_norm if culprit is None else culprit.largest_input
            why = explain.describe_large_values(self.trials.model, largest, self._applied)
        why = why or self._ruined_by_update
        if not why:
            return self._verdict_code(as_it_was, fp32)
        first = self._first_elsewhere(as_it_was, fp32)
        return self._divergence(explain.explain_divergence(fp32, why, self._in_fp32), fp32.culprit, *first)

    def _verdict_code(self, as_it_was: TrialOutcome, fp32: TrialOutcome) -> Verdict:
        evidence = (
            *self._first_elsewhere(as_it_was, fp32),
            self._no_divergence,
            explain.describe_weight_evidence(self.trials.model),
        )
        fix = ProposedRemedy("fix_code", explain.suggest_line_change(fp32), None)
        return Verdict(CODE, explain.explain_code_failure(fp32, self._in_fp32), fp32.culprit, evidence, (fix,))

    @property
    def _in_fp32(self) -> str:
        return "the step already runs in fp32" if self.precision.computes is FP32 else "the step also fails in fp32"

    @property
    def _no_divergence(self) -> str:
        grown, share = explain.describe_growth(self.history), self._update_share
        return explain.NO_SIGN if not grown or share is None else explain.explain_intended_growth(grown, share)

    def _first_elsewhere(self, as_it_was: TrialOutcome, fp32: TrialOutcome) -> tuple[str, ...]:
        if locate_culprit(as_it_was.culprit) == locate_culprit(fp32.culprit):
            return ()
        return (f"in {self.precision} it is {explain.describe_origin(as_it_was)} first, which {as_it_was.effect}",)

    def _divergence(self, sentence: str, culprit: Culprit | None, *first: str) -> Verdict:
        evidence = (
            *first,
            explain.describe_weight_evidence(self.trials.model),
            *explain.describe_rate_evidence(self.history),
        )
        return Verdict(DIVERGENCE, sentence, culprit, evidence, (_SLOWER,))
