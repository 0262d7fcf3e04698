"""From a failed step to its cause: run again in several ways, each of which rules something out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import nn

from halfstep import world
from halfstep.formats import FP32
from halfstep.guard.replay import bad_batch, wording
from halfstep.guard.replay.agreement import agreed
from halfstep.guard.replay.cures import cures_for
from halfstep.guard.replay.rerun import Way
from halfstep.guard.replay.trials import Outcome, Trials
from halfstep.guard.replay.weights import rate_evidence, strayed, weight_evidence
from halfstep.guard.trouble import History
from halfstep.guard.verdict import COMPILER, DATA, DIVERGENCE, HARDWARE, PRECISION, WARM_UP, Cure, Verdict
from halfstep.observe.origins import BATCH
from halfstep.precision.precision import Precision
from halfstep.precision.registry import precision_named
from halfstep.step.attempt import Attempt
from halfstep.step.report import GRADIENT_OVERFLOW, GUARD, LOSS_NOT_FINITE

_NO_HISTORY = History()
_WRITTEN = "written"
_OTHER_LOSS = Cure("fix_code", wording.OTHER_LOSS, None)
_SLOWER = Cure("lower_rate", "lower the learning rate", None)


def diagnose(
    model: nn.Module,
    attempt: Attempt,
    *,
    precision: Precision,
    reason: str,
    history: History = _NO_HISTORY,
    compiled: bool = False,
) -> Verdict:
    """What a skipped step came from. Leaves the model as it is; every process calls it, and all get one verdict.

    `compiled`: whether compiled code ran in the step.
    """
    # All decide from the same reruns; of a sharded model, each process sees other weights and may tell of others.
    written = _WRITTEN in world.from_all(_WRITTEN if attempt.batch_changed else "")
    case = _Case(Trials(model, attempt, written=written), precision, reason, history, compiled)
    verdict = agreed(case.verdict())
    if not written or wording.BATCH_WRITTEN in verdict.sentence:
        return verdict
    # What was run again is not quite what had failed.
    return replace(verdict, evidence=(wording.BATCH_WRITTEN, *verdict.evidence))


@dataclass(frozen=True)
class _Case:
    """One step, and all that was known of it before it was run again."""

    trials: Trials
    precision: Precision
    reason: str
    history: History
    compiled: bool

    @property
    def attempt(self) -> Attempt:
        return self.trials.attempt

    @property
    def scale(self) -> float:
        return max(factor.scale for factor in self.attempt.factors.values())

    @property
    def _own_scale(self) -> float | None:
        # The forward pass knows no scale, and what it overflows by is not to hide behind gradients that do, too.
        return 1.0 if self.reason == LOSS_NOT_FINITE else None

    def verdict(self) -> Verdict:
        as_it_was = self._run(self._own_scale)
        if as_it_was.error:
            return Verdict(DATA, wording.not_run(as_it_was), None, (), (_OTHER_LOSS, _skip()))
        if as_it_was.finite:
            return self._not_again()
        if self.reason != LOSS_NOT_FINITE and self.scale > 1.0:
            unscaled = self._run(1.0)
            if unscaled.finite:
                return self._scale_too_high(as_it_was)
            as_it_was = unscaled
        return self._real(as_it_was)

    def _run(self, scale: float | None, *, compiled: bool = False) -> Outcome:
        return self.trials.run(Way(self.precision, scale=scale, compiled=compiled))

    # -- the scale ----------------------------------------------------------------------------------------------

    def _scale_too_high(self, at_scale: Outcome) -> Verdict:
        sentence = wording.scale_too_high(self.scale, at_scale)
        if self.reason == GRADIENT_OVERFLOW:
            fits = Cure("skip", "the loss scale falls by itself", True)
            return Verdict(WARM_UP, f"warm_up: {sentence}", at_scale.culprit, (), (fits,))
        sentence += ", and the scale cannot fall below its floor"
        cures = cures_for(self.trials, self.precision, at_scale.culprit, self._in_fp32(), scale=None)
        return Verdict(PRECISION, f"precision: {sentence}", at_scale.culprit, (), cures)

    # -- what does not happen again -----------------------------------------------------------------------------

    def _not_again(self) -> Verdict:
        if self.reason.startswith(GUARD):
            evidence = (weight_evidence(self.trials.model), *rate_evidence(self.history))
            return Verdict(DIVERGENCE, wording.refused(self.reason), None, evidence, (_SLOWER,))
        if self.trials.written:
            fix = Cure("fix_code", wording.CLONE_FIRST, None)
            return Verdict(
                DATA, f"data: {wording.BATCH_WRITTEN}; run again as it is now it is finite", None, (), (fix,)
            )
        if self.reason == GRADIENT_OVERFLOW and not (above := self._run(2 * self.scale)).finite:
            return self._scale_too_high(above)
        if self.compiled:
            as_compiled = self._run(self._own_scale, compiled=True)
            if not as_compiled.finite:
                return self._only_compiled(as_compiled)
        evidence = ("run again, with the same batch and the same random numbers, it is finite",)
        if not self._run(self._own_scale).finite:
            evidence = ("run again twice, once it was finite and once not",)
        return Verdict(HARDWARE, wording.NOT_AGAIN, None, evidence, (_skip(),))

    def _only_compiled(self, as_compiled: Outcome) -> Verdict:
        if self.reason == GRADIENT_OVERFLOW and self._run(1.0, compiled=True).finite:
            return self._scale_too_high(as_compiled)
        bad = as_compiled.bad_parameters
        evidence = (f"compiled, the gradient of {bad[0]} is not finite",) if bad else ()
        eager = Cure("eager", "run it without torch.compile", True)
        return Verdict(COMPILER, wording.ONLY_COMPILED, None, evidence, (eager,))

    # -- what happens again -------------------------------------------------------------------------------------

    def _real(self, as_it_was: Outcome) -> Verdict:
        culprit = as_it_was.culprit
        outside = "" if culprit is None else culprit.outside or ""
        spots = bad_batch.not_finite(self.attempt.microbatches, outside) if outside.startswith(BATCH) else []
        if spots:
            others = tuple(map(wording.spot, spots[1:]))
            return Verdict(DATA, f"data: {wording.spot(spots[0])}", culprit, others, (_skip(),))
        far = bad_batch.outlier(self.attempt.microbatches)
        if far is not None and self._finite_without(far):
            return Verdict(DATA, wording.far(far, as_it_was), culprit, (wording.FINITE_WITHOUT,), (_skip(),))
        return self._precision_or_not(as_it_was)

    def _finite_without(self, far: bad_batch.Spot) -> bool:
        way = Way(self.precision, scale=1.0)
        return self.trials.run(way, bad_batch.without(self.attempt, far)).finite

    def _in_fp32(self) -> Outcome:
        return self.trials.run(Way(precision_named("fp32"), scale=1.0))

    def _precision_or_not(self, as_it_was: Outcome) -> Verdict:
        if self.precision.computes is FP32:
            return self._diverged(as_it_was, as_it_was)
        fp32 = self._in_fp32()
        if fp32.error:
            return self._without_fp32(as_it_was, fp32)
        if not fp32.finite:
            return self._diverged(as_it_was, fp32)
        if why := strayed(fp32, self.history):
            return self._left_its_path(as_it_was, why)
        return self._precision(as_it_was, fp32)

    def _precision(self, as_it_was: Outcome, fp32: Outcome) -> Verdict:
        cures = cures_for(self.trials, self.precision, as_it_was.culprit, fp32)
        sentence = wording.precision(self.precision, as_it_was, cures)
        return Verdict(PRECISION, sentence, as_it_was.culprit, wording.not_helping(cures), cures)

    def _without_fp32(self, as_it_was: Outcome, fp32: Outcome) -> Verdict:
        """Judged by the one operation, which was computed in fp32 by itself."""
        culprit = as_it_was.culprit
        fits = culprit is not None and culprit.in_fp32 is not None and math.isfinite(culprit.in_fp32)
        verdict = self._precision(as_it_was, fp32) if fits else self._diverged(as_it_was, as_it_was)
        told = f"the whole step could not be run in fp32: {fp32.error}"
        return Verdict(verdict.cause, verdict.sentence, culprit, (told, *verdict.evidence), verdict.cures)

    def _diverged(self, as_it_was: Outcome, fp32: Outcome) -> Verdict:
        """What fails in fp32 is what has to change, also where something else failed before it in 16 bits."""
        evidence = [weight_evidence(self.trials.model), *rate_evidence(self.history)]
        if as_it_was.culprit != fp32.culprit and wording.place(as_it_was) != wording.place(fp32):
            evidence.insert(0, f"in {self.precision} it is {wording.place(as_it_was)} first, which {as_it_was.deed}")
        cures = (Cure("fix_code", wording.fix(fp32), None), _SLOWER) if fp32.senseless else (_SLOWER,)
        return Verdict(DIVERGENCE, wording.diverged(fp32), fp32.culprit, tuple(evidence), cures)

    def _left_its_path(self, as_it_was: Outcome, why: str) -> Verdict:
        evidence = (wording.what_happened(as_it_was), weight_evidence(self.trials.model), *rate_evidence(self.history))
        return Verdict(DIVERGENCE, f"divergence: {why}", as_it_was.culprit, evidence, (_SLOWER,))


def _skip() -> Cure:
    return Cure("skip", "leave this batch out", None)
