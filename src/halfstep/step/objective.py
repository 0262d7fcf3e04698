"""One loss and the optimizers that it trains: differentiated, judged and clipped together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from halfstep.errors import WrongUse
from halfstep.formats import FP32
from halfstep.step.ema import StepCounts
from halfstep.step.gradients import clip_factor
from halfstep.step.loss import LossSlot
from halfstep.step.optimizer_slot import OptimizerSlot
from halfstep.step.ranks import Ranks
from halfstep.step.report import (
    GRADIENT_NOT_FINITE,
    GRADIENT_OVERFLOW,
    LOSS_NOT_FINITE,
    OptimizerReport,
    StepReport,
)

V = TypeVar("V")
ByName: TypeAlias = V | Mapping[str, V] | None
"""One value for all, one for each by name, or none."""


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

    def backward(self, loss: Any, *, divide: int, ranks: Ranks, window: int, retain_graph: bool) -> None:
        """Run backward from a loss, into the parameters of its own optimizers."""
        ready = self.loss.scaled(loss, divide, ranks, window)
        if self.everywhere:
            # Without `inputs`: FSDP2 cannot restrict backward to some parameters, and one loss has no need to.
            ready.backward()
        else:
            ready.backward(inputs=self._inputs(), retain_graph=retain_graph)

    def _inputs(self) -> list[Tensor]:
        found = self.trainable
        if not found:
            raise _all_frozen(self.slots)
        return found

    # -- what all ranks must agree on -------------------------------------------------------------------------

    def numbers(self) -> list[Tensor]:
        """Return the numbers of one rank: the loss's, then each optimizer's norm."""
        self.collect()
        found = self.loss.numbers()
        if len(self.slots) == 1:
            return [*found, self.slots[0].gradients.norm()]
        everything = [gradient for slot in self.slots for gradient in slot.gradients.local]
        # torch's own norm over all of them, to the bit; the root of the summed squares would round differently.
        own = [s.gradients.norm() if s.gradients.local else torch.zeros_like(found[0]) for s in self.slots]
        return [*found, get_total_norm(everything), *own]

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
        if not any([slot.gradients.collect() for slot in self.slots]):
            raise _no_gradient(self.slots)

    def read(self, numbers: Iterator[float]) -> None:
        """Take the numbers of `numbers`, as read by the host."""
        total = next(numbers)
        if self.loss.count is None:
            self.loss.read(total / self.loss.microbatches, None)
        else:
            self.loss.read(total, next(numbers))
        together = next(numbers)
        self._read_norms([next(numbers) for _ in self.slots] if len(self.slots) > 1 else [together])
        self.norm = together * self.loss.factor

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
        return self.norm <= FP32.largest and math.isfinite(self.loss.value)

    def reason(self) -> str | None:
        """Return why this objective cannot be applied, or None."""
        if not math.isfinite(self.loss.value):
            return LOSS_NOT_FINITE
        if self.norm <= FP32.largest:
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
        together = 1.0 if self._clip_norm is None else clip_factor(self.norm, self._clip_norm)
        for slot in self.slots:
            own = 1.0 if slot.clip_norm is None else clip_factor(slot.norm, slot.clip_norm)
            # Unscaling and clipping in one factor: one pass over the gradients, and one rounding.
            slot.multiplier = self.loss.factor * together * own
            if slot.gradients.local:
                slot.ready()

    def apply(self) -> None:
        """Step the optimizers and their schedules."""
        for slot in self.slots:
            slot.apply()

    def adjust(self) -> None:
        """Adjust the scale from the gradients: a non-finite loss says nothing about it."""
        if math.isfinite(self.loss.value):
            self.loss.scale.update(overflow=not self.norm <= FP32.largest)


def differentiate(objectives: Sequence[Objective], losses: Any, *, divide: int, ranks: Ranks, window: int) -> None:
    """Run backward from each loss, into the parameters of its own optimizers and no others."""
    last = objectives[-1]
    for objective in objectives:
        loss = losses[objective.loss.name] if isinstance(losses, dict) else losses
        # The losses share one forward graph, which the last backward frees.
        objective.backward(loss, divide=divide, ranks=ranks, window=window, retain_graph=objective is not last)


def report_of(objectives: Sequence[Objective], counts: StepCounts, reason: str | None, aux: Any) -> StepReport:
    """Return the report of a step with this outcome."""
    applied = reason is None
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


def value_for(values: ByName[V], name: str, names: Sequence[str], what: str) -> V | None:
    """Return the setting of one optimizer; a value without names is for all. Raises WrongUse for unknown names."""
    if not isinstance(values, Mapping):
        return values
    unknown = set(values) - set(names)
    if unknown:
        raise WrongUse(
            f"{what} for {sorted(unknown)}, which no optimizer is called",
            allowed=str(list(names)),
            do="use the optimizers' names",
        )
    return values.get(name)


def positive(name: str, given: Any) -> float | None:
    """Return a limit on gradients as a float, or None; raise WrongUse if it is not positive."""
    if given is None:
        return None
    if not isinstance(given, (int, float)) or not given > 0:
        raise WrongUse(f"{name}={given!r}", allowed="a positive number, or None", do=f"{name}=1.0")
    return float(given)


def _names(slots: Sequence[OptimizerSlot]) -> str:
    return ", ".join(repr(slot.name) for slot in slots)


def _no_gradient(slots: Sequence[OptimizerSlot]) -> WrongUse:
    return WrongUse(
        f"no parameter of optimizer {_names(slots)} has a gradient",
        allowed="at least one parameter that the loss depends on",
        do="build the optimizer from the parameters that are trained (after wrapping or freezing the model)",
    )


def _all_frozen(slots: Sequence[OptimizerSlot]) -> WrongUse:
    return WrongUse(
        f"a step for optimizer {_names(slots)}, all of whose parameters are frozen",
        allowed="at least one parameter with requires_grad",
        do="requires_grad_(True) on what this step trains, or name another optimizer with only=",
    )
