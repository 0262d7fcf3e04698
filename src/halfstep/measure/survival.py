"""Would this model survive fp16, bf16 or fp8? One emulated step says it, without the hardware."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import WrongUse, unknown_name
from halfstep.formats import BF16, FP8_E4M3, FP8_E5M2, FP16
from halfstep.guard.replay.cures import candidates
from halfstep.measure.case import Case, LossFunction, case_of
from halfstep.measure.survival_report import (
    LostGradient,
    Survival,
    cures,
    event_named,
    module_ranges,
    named,
    where,
)
from halfstep.measure.survival_step import Gradients, Outcome, step, step_with_loss_scale
from halfstep.observe.ranges import BACKWARD, Event
from halfstep.observe.rounding import RoundedOperands, RoundedOutputs, Rounding, over_the_whole_range
from halfstep.precision.hardware import describe

MakeRounding = Callable[[], Rounding]

# fp8 trains with e4m3 in forward, where digits matter, and e5m2 for gradients, where range does.
_FP8 = {
    "fp8_e4m3": partial(RoundedOperands, FP8_E4M3, FP8_E5M2),
    "fp8_e5m2": partial(RoundedOperands, FP8_E5M2, FP8_E5M2),
}
_ROUNDINGS: dict[str, MakeRounding] = {
    "fp16": partial(RoundedOutputs, FP16),
    "bf16": partial(RoundedOutputs, BF16),
    **_FP8,
}
FORMAT_NAMES = tuple(_ROUNDINGS)
TOLERATED_LOSS = 0.1
"""Of the norm of the parameters' gradients: when more vanishes, the model does not learn what it would in fp32."""
TOLERATED_ERROR, TIMES_BF16 = 0.5, 3.0
"""Of the norm of fp32's gradients: further from them than both this and so many times bf16 is, they lead elsewhere."""
_SCALE_EACH = "train in fp8 with a scale for each tensor, as torchao and Transformer Engine do"
_MOST_NAMED = 5
# torch documents these as computed in fp32 by CUDA's autocast; the CPU's leaves most of them in 16 bits.
_FP32_ON_CUDA = {"sum", "pow", "exp", "cumsum", "prod", "norm", "rsqrt", "reciprocal", "log", "_softmax"}


def survival(
    model: nn.Module | Case,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    format_name: str = "fp16",
    device: torch.device | str | None = None,
) -> Survival:
    """Whether one step of a case, or of a model with its loss and a batch, survives a format, and what to do.

    Several steps run on copies of the model, all with the same random numbers: in strict fp32, in the format, and with
    each cure before it is recommended. The person's model, batch and random numbers stay as they are.
    """
    if format_name not in _ROUNDINGS:
        raise unknown_name("format", format_name, FORMAT_NAMES)
    judged = _Judged(_case(model, loss_fn, batch), torch.device(describe(device).place))
    as_is = judged.survival(format_name, _ROUNDINGS[format_name])
    if format_name not in _FP8 or not judged.reference_is_finite:
        return as_is
    scaled = judged.survival(format_name, partial(_FP8[format_name], factor=over_the_whole_range))
    return replace(
        as_is,
        verdict=f"{as_is.verdict}; {_scaled_sentence(scaled)}",
        do=(_SCALE_EACH, *as_is.do) if scaled.survives and not as_is.survives else as_is.do,
        scaled=scaled,
    )


def _scaled_sentence(scaled: Survival) -> str:
    apart = "" if scaled.gradient_error is None else f" (gradients differ by {scaled.gradient_error:.0%})"
    return f"with a scale for each tensor it {'survives' if scaled.survives else 'does not'}{apart}"


def _case(model: nn.Module | Case, loss_fn: LossFunction | None, batch: Any) -> Case:
    if isinstance(model, Case):
        return model
    if loss_fn is None:
        raise WrongUse(
            "a model without a loss function",
            allowed="a Case, or a model, loss_fn(model, batch) and a batch",
            do="survival(model, loss_fn, batch)",
        )
    return case_of(model, loss_fn, batch)


class _Judged:
    """A case on a device, with its gradients in fp32 to compare with."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.reference = step(case, device, None)
        self.reference_is_finite = self.reference.fits

    def survival(self, name: str, make: MakeRounding) -> Survival:
        outcome = self._outcome(name, make)
        assert outcome.rounding is not None
        ranges = outcome.rounding.ranges
        error, lost_share, lost = _compared(self.reference.gradients, outcome.gradients)
        survives = self._survives(outcome)
        event = ranges.first_on_the_way_forward
        if event is None and not outcome.gradients_finite:
            event = ranges.first_overflow.get(BACKWARD)
        bf16 = not survives and name != "bf16" and self._survives(self._bf16)
        unscaled = self._unscaled_underflow(outcome, make) if name == "fp16" else None
        return Survival(
            format=name,
            survives=survives,
            verdict=f"{name}: {self._sentence(outcome, event, error, lost_share)}"
            + ("; bf16 survives" if bf16 else ""),
            first_overflow=event_named(event) if event else None,
            loss=_finite(outcome.loss),
            loss_fp32=_finite(self.reference.loss),
            loss_scale=outcome.scale if name == "fp16" and outcome.gradients_finite else None,
            gradient_underflow=ranges.total(BACKWARD).underflow_share,
            gradient_underflow_unscaled=unscaled,
            gradient_lost=lost_share,
            gradient_error=error,
            lost=lost,
            modules=module_ranges(ranges),
            do=() if survives else cures(event, self._islands(name, make, event), bf16),
            notes=self._notes(outcome.rounding, event),
        )

    def _outcome(self, name: str, make: MakeRounding, islands: tuple[str, ...] = ()) -> Outcome:
        if name == "fp16":
            return step_with_loss_scale(self.case, self.device, make, islands=islands)
        return step(self.case, self.device, make(), islands=islands)

    def _survives(self, outcome: Outcome) -> bool:
        if not (outcome.fits and self.reference_is_finite):
            return False
        error, lost, _ = _compared(self.reference.gradients, outcome.gradients)
        return error is not None and lost is not None and lost <= TOLERATED_LOSS and not self._too_far(error)

    def _too_far(self, error: float) -> bool:
        """Whether gradients are of no use any more, though all of them are finite."""
        return error > TOLERATED_ERROR and error > TIMES_BF16 * self._bf16_error

    @cached_property
    def _bf16(self) -> Outcome:
        return step(self.case, self.device, RoundedOutputs(BF16))

    @property
    def _bf16_error(self) -> float:
        """What people live with: small batches and normalisation make any rounding large in some models."""
        return _compared(self.reference.gradients, self._bf16.gradients)[0] or 0.0

    def _unscaled_underflow(self, outcome: Outcome, make: MakeRounding) -> float:
        unscaled = outcome if outcome.scale == 1.0 else step(self.case, self.device, make())
        assert unscaled.rounding is not None
        return unscaled.rounding.ranges.total(BACKWARD).underflow_share

    def _sentence(self, outcome: Outcome, event: Event | None, error: float | None, lost: float | None) -> str:
        if not self.reference_is_finite:
            return "no format helps: the loss or a gradient is not finite in fp32 either"
        assert outcome.rounding is not None
        ranges = outcome.rounding.ranges
        if event is not None and event is ranges.first_overflow.get(BACKWARD):
            return f"gradients overflow {where(event)}, at every loss scale down to {outcome.scale:.0f}"
        if event is not None:
            return f"overflows {where(event)}" + (", though the loss is finite" if math.isfinite(outcome.loss) else "")
        if not math.isfinite(outcome.loss):
            spoiled = ranges.first_spoiled
            place = f", first seen in {named(spoiled.module)} ({spoiled.operation})" if spoiled else ""
            return f"the loss is not finite though nothing overflows{place}: something that vanished is divided by"
        if lost is not None and lost > TOLERATED_LOSS:
            return f"gradients vanish: {lost:.0%} of their norm in fp32"
        if error is not None and self._too_far(error):
            return f"does not: its gradients differ from fp32's by {error:.0%}, bf16's by {self._bf16_error:.0%}"
        if isinstance(outcome.rounding, RoundedOperands):
            return f"survives; its gradients differ from fp32's by {error or 0.0:.1%}, bf16's by {self._bf16_error:.1%}"
        return f"survives; {_headroom(outcome)}, {_vanishing(outcome)}"

    def _islands(self, name: str, make: MakeRounding, event: Event | None) -> list[str]:
        """The smallest part of the model that cures it when it is kept in fp32; empty where none does."""
        if event is None or name in _FP8 or not self.reference_is_finite:
            return []
        for path in candidates(self.case.model, event.module):
            try:
                if self._survives(self._outcome(name, make, islands=(path,))):
                    return [path]
            except WrongUse:  # not every module can be an island
                continue
        return []

    def _notes(self, rounding: Rounding, event: Event | None) -> tuple[str, ...]:
        kind = self.device.type.upper()
        notes = [f"rules: {kind} autocast"]
        operation = event.operation.removeprefix("aten.") if event else ""
        if self.device.type != "cuda" and operation in _FP32_ON_CUDA:
            notes.append(f"CUDA's autocast computes {operation} in fp32: there it would not overflow")
        if rounding.not_emulated:
            notes.append(f"ran as they are: {', '.join(sorted(rounding.not_emulated))}")
        return (*notes, "one step on one batch: weights and gradients of later steps may lie elsewhere")


def _compared(wanted: Gradients, found: Gradients) -> tuple[float | None, float | None, tuple[LostGradient, ...]]:
    """Relative error, share of the norm that vanished, and the largest that did; None where it cannot be told."""
    total = difference = gone = 0.0
    lost = []
    for name, true in wanted.items():
        ours = found.get(name, torch.zeros_like(true))
        vanished = torch.where(ours == 0, true, torch.zeros_like(true))
        total += _squares(true)
        difference += _squares(true - ours)
        gone += _squares(vanished)
        if count := int(vanished.count_nonzero()):
            lost.append(LostGradient(name, count / int(true.count_nonzero()), vanished.abs().max().item()))
    lost.sort(key=lambda gradient: -gradient.largest)
    if not (math.isfinite(total) and math.isfinite(difference)):
        return None, None, ()
    if not total:
        return 0.0, 0.0, ()
    return math.sqrt(difference / total), math.sqrt(gone / total), tuple(lost[:_MOST_NAMED])


def _squares(tensor: Tensor) -> float:
    return float(tensor.square().sum().item())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _headroom(outcome: Outcome) -> str:
    assert outcome.rounding is not None
    modules = [module for module in module_ranges(outcome.rounding.ranges) if module.headroom_bits is not None]
    if not modules:
        return "nothing was rounded"
    return f"{modules[0].headroom_bits:.1f} bits of headroom in {modules[0].module}"


def _vanishing(outcome: Outcome) -> str:
    assert outcome.rounding is not None
    share = outcome.rounding.ranges.total(BACKWARD).underflow_share
    at = f" at a loss scale of {outcome.scale:.0f}" if outcome.scale != 1.0 else ""
    return f"{share:.1%} of gradients vanish{at}"
