"""One loss and the optimizers that it trains: differentiated, agreed on by all ranks, judged, clipped and applied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from halfstep.errors import WrongUse
from halfstep.formats import FP32, FP64, Format
from halfstep.step.direct_backward import run_backward
from halfstep.step.ema import StepCounts
from halfstep.step.loss import LossSlot
from halfstep.step.optimizer_slot import (
    OptimizerSlot,
    compute_clip_factor,
    compute_fp32_norm,
    is_clearly_below,
)
from halfstep.step.ranks import Ranks
from halfstep.step.report import (
    GRADIENT_NOT_FINITE,
    GRADIENT_OVERFLOW,
    LOSS_NOT_FINITE,
    Guard,
    OptimizerReport,
    StepReport,
)

_PLACE = itemgetter(0)
_LARGEST = FP32.largest


class Objective:
    """A loss, and the optimizers whose parameters it differentiates."""

    def __init__(
        self, loss: LossSlot, slots: Sequence[OptimizerSlot], *, clip_norm: float | None, everywhere: bool
    ) -> None:
        self.loss, self.slots, self._clip_norm = loss, slots, clip_norm
        self.everywhere = everywhere
        """Whether no other loss shares the graph, so that backward needs no list of inputs."""
        self.norm = math.nan
        self.bad_parameter: Tensor | None = None
        """The first parameter with a non-finite gradient, if the window has one."""

    def begin(self) -> None:
        """Reset for a new window."""
        self.loss.begin()
        self.norm, self.bad_parameter = math.nan, None

    @property
    def trainable(self) -> list[Tensor]:
        """The parameters with `requires_grad` of its optimizers."""
        if len(self.slots) == 1:
            return self.slots[0].gradients.trainable
        return [p for slot in self.slots for p in slot.gradients.trainable]

    def backward(self, loss: Any, divide: int, ranks: Ranks, *, window: int, retain_graph: bool) -> None:
        """Run backward from a loss, only into the parameters of its optimizers."""
        ready = self.loss.scaled(loss, divide, ranks, window)
        if self.everywhere:
            # Without `inputs`: FSDP2 cannot restrict backward to some parameters, and one loss has no need to.
            run_backward(ready)
        else:
            ready.backward(inputs=self._inputs(), retain_graph=retain_graph)

    def _inputs(self) -> list[Tensor]:
        found = self.trainable
        if not found:
            raise WrongUse(
                f"a step for optimizer {_format_optimizer_names(self.slots)}, all of whose parameters are frozen",
                allowed="at least one parameter with requires_grad",
                do="requires_grad_(True) on the parameters of this step, or name another optimizer with only=",
            )
        return found

    # -- what all ranks must agree on -------------------------------------------------------------------------

    def numbers(self) -> list[Tensor]:
        """Return the numbers of one rank: the loss's, then each optimizer's norm."""
        self.collect()
        found = self.loss.numbers()
        if len(self.slots) == 1:
            return [*found, self.slots[0].gradients.norm()]
        everything = self._gradients_in_order()
        # torch's own norm over all of them, to the bit; the root of the summed squares would round differently.
        own = [s.gradients.norm() if s.gradients.local else torch.zeros_like(found[0]) for s in self.slots]
        total = compute_fp32_norm if any(slot.gradients.may_be_narrow for slot in self.slots) else get_total_norm
        return [*found, total(everything), *own]

    def _gradients_in_order(self) -> list[Tensor]:
        """Return the gradients of all its optimizers in the model's order, in which `clip_grad_norm_` sums them."""
        if not all(slot.gradients.places for slot in self.slots):
            return [gradient for slot in self.slots for gradient in slot.gradients.local]
        found = [pair for slot in self.slots for pair in slot.gradients.with_places()]
        return [gradient for _, gradient in sorted(found, key=_PLACE)]

    def numbers_on_ranks(self) -> list[Tensor]:
        """Return a total and a count in any case, so that a rank without a batch knows every position."""
        self.collect()
        return self.loss.numbers_on_ranks()

    def squared_shares(self) -> list[Tensor]:
        """Return this rank's share of each optimizer's squared norm."""
        zero = torch.zeros((), dtype=torch.float64, device=self.loss.device)
        return [slot.gradients.squared_share() if slot.gradients.local else zero for slot in self.slots]

    def collect(self) -> None:
        """Collect the gradients that backward left; raise WrongUse if it reached no optimizer."""
        reached = False
        for slot in self.slots:
            reached |= slot.gradients.collect()
        # A rank without a batch has none if no other rank has a batch either.
        if not reached and self.loss.microbatches:
            raise WrongUse(
                f"no parameter of optimizer {_format_optimizer_names(self.slots)} has a gradient",
                allowed="at least one parameter that the loss depends on",
                do="build the optimizer from the trained parameters (after wrapping or freezing the model)",
            )

    def read(self, numbers: Iterator[float]) -> None:
        """Take the numbers of `numbers`, as read by the host."""
        total = next(numbers)
        if self.loss.count is None:
            self.loss.read(total / self.loss.microbatches, None)
        else:
            self.loss.read(total, next(numbers))
        self.norm = next(numbers) * self.loss.factor
        if len(self.slots) == 1:
            self.slots[0].norm = self.norm
            return
        for slot in self.slots:
            slot.norm = next(numbers) * self.loss.factor

    def read_on_ranks(self, numbers: Iterator[float], norms: Iterator[float], ranks: int, with_a_batch: int) -> float:
        """Take the numbers that all ranks agreed on, and return the sum of the squared norms, still scaled."""
        total, count = next(numbers), next(numbers)
        # -1 stands for a mean, so that a rank without a batch learns which of the two the others have.
        self.loss.read(total, None if count < 0.0 else count, ranks, with_a_batch)
        squared = [next(norms) for _ in self.slots]
        self._read_norms([math.sqrt(norm) for norm in squared])
        return sum(squared)

    def _read_norms(self, norms: list[float]) -> None:
        for slot, norm in zip(self.slots, norms, strict=True):
            slot.norm = norm * self.loss.factor
        self.norm = math.hypot(*(slot.norm for slot in self.slots))

    # -- the verdict ------------------------------------------------------------------------------------------

    @property
    def finite(self) -> bool:
        # Norms are Python floats here and reach further than fp32; False for NaN as well.
        """Whether loss and gradient norm are finite."""
        return self._norm_fits and math.isfinite(self.loss.value)

    @property
    def _norm_fits(self) -> bool:
        return self.norm <= _LARGEST or self.norm <= self._norm_format.largest

    @property
    def _norm_format(self) -> Format:
        """The format of the common norm, as torch computes it."""
        return FP64 if any(slot.gradients.norm_format is FP64 for slot in self.slots) else FP32

    def reason(self) -> str | None:
        """Return why this objective cannot be applied, or None."""
        if not math.isfinite(self.loss.value):
            return LOSS_NOT_FINITE
        if self._norm_fits:
            return None
        # The parameter is looked up only here: it costs a host read, which a clean step does not pay.
        found = (slot.gradients.first_not_finite() for slot in self.slots if slot.gradients.local)
        self.bad_parameter = next((p for p in found if p is not None), None)
        return GRADIENT_OVERFLOW if self.loss.scale.can_fall else GRADIENT_NOT_FINITE

    def unscale(self, ranks: Ranks) -> list[Tensor]:
        """Unscale gradients ahead of a callback that edits them, and return the parameters that have one."""
        self.collect()
        factor = self.loss.unscale_ahead(ranks)
        for slot in self.slots:
            if slot.gradients.local:
                slot.gradients.multiply_(factor)
        return [p for slot in self.slots for p in slot.gradients.parameters if p.grad is not None]

    def ready(self) -> None:
        """Unscale and clip gradients, in one multiplication."""
        together = 1.0
        if self._clip_norm is not None and not is_clearly_below(self.norm, self._clip_norm):
            together = compute_clip_factor(self.norm, self._clip_norm, self._norm_format)
        for slot in self.slots:
            own = 1.0
            if slot.clip_norm is not None:
                own = compute_clip_factor(slot.norm, slot.clip_norm, slot.gradients.norm_format)
            # Unscaling and clipping in one factor: one pass over the gradients, and one rounding.
            slot.multiplier = self.loss.factor * together * own
            if slot.gradients.local:
                slot.gradients.multiply_all_but_bf16_(slot.multiplier)
                if slot.clip_value is not None:
                    slot.gradients.clamp_all_but_bf16_(slot.clip_value)

    def unscale_skipped(self) -> None:
        """Unscale gradients that are kept and not applied."""
        for slot in self.slots:
            if slot.gradients.local:
                slot.gradients.multiply_(self.loss.factor)

    def adjust(self) -> None:
        """Adjust the scale from the gradients: a non-finite loss says nothing about it."""
        if math.isfinite(self.loss.value):
            self.loss.scale.update(overflow=not self._norm_fits)


def _format_optimizer_names(slots: Sequence[OptimizerSlot]) -> str:
    return ", ".join(repr(slot.name) for slot in slots)


# -- verdict ----------------------------------------------------------------------------------------------------------


def build_step_report(objectives: Sequence[Objective], counts: StepCounts, reason: str | None, aux: Any) -> StepReport:
    """Return the report of a step with this outcome."""
    applied = reason is None
    if len(objectives) == 1 and applied:
        only = objectives[0]
        loss, scale = only.loss.value, only.loss.scale.value
        parts = {slot.name: OptimizerReport(loss, slot.norm, scale) for slot in only.slots}
        return StepReport(
            counts.applied + 1, counts.attempted, True, None, True, loss, abs(only.norm), scale, parts, aux
        )
    return StepReport(
        # The counters change only after this; the report shows them as they will be.
        step=counts.applied + applied,
        attempt=counts.attempted,
        applied=applied,
        reason=reason,
        finite=all(objective.finite for objective in objectives),
        loss=sum(objective.loss.value for objective in objectives),
        grad_norm=math.hypot(*(objective.norm for objective in objectives)),
        loss_scale=objectives[0].loss.scale.value,
        parts={
            slot.name: OptimizerReport(objective.loss.value, slot.norm, objective.loss.scale.value)
            for objective in objectives
            for slot in objective.slots
        },
        aux=aux,
    )


def find_refusing_guard(guards: Sequence[Guard], report: StepReport, ranks: Ranks, window: int) -> str | None:
    """Return the name of the first guard that refuses a step on any rank, or None.

    A guard that raises on one rank ends the window on all: the others raise RankFailed. Guards that decide from the
    report alone declare `same_on_all_ranks = True`; only others cost an agreement.
    """
    if not guards:
        return None
    if ranks.size == 1 or all(getattr(guard, "same_on_all_ranks", False) for guard in guards):
        for guard in guards:
            if not guard.passes(report):
                return guard.name
        return None
    refusals, error = _ask_guards(guards, report)
    if error is not None:
        ranks.publish_failure(window, error)
    # After the message was stored: the others look for it as soon as they have this result.
    raised, *refused = ranks.agree(torch.tensor([error is not None, *refusals], dtype=torch.float64)).tolist()
    if error is not None:
        raise error
    if raised:
        raise ranks.failed(window)
    return next((guard.name for guard, ranks_against in zip(guards, refused, strict=True) if ranks_against), None)


def _ask_guards(guards: Sequence[Guard], report: StepReport) -> tuple[list[bool], BaseException | None]:
    """Return which guards refuse; asking stops at the first refusal, as with one process."""
    refusals = [False] * len(guards)
    try:
        for place, guard in enumerate(guards):
            if not guard.passes(report):
                refusals[place] = True
                break
    except BaseException as error:
        return [False] * len(guards), error
    return refusals, None
