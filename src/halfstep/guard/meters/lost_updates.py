"""Updates so small beside their weight that rounding swallows them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from halfstep.finding import Finding
from halfstep.formats import name_of
from halfstep.guard.meters.sample import Sample, Trained, part_of
from halfstep.guard.meters.standing_still import Before, StandingStill

MANY = 0.2
"""Share of the elements that should have moved."""


@dataclass
class _Pushed(Before):
    rate: float
    pushed: Tensor
    """Where the gradient is not zero, and so the weight should move."""


class LostUpdates(StandingStill):
    """Elements with a gradient whose stored value the update left as it was."""

    def begun(self, sample: Sample, one: Trained) -> Before | None:
        assert one.parameter.grad is not None
        rate = _rate(one)
        if rate == 0.0:  # a schedule that begins or ends with nothing moves nothing
            return None
        return _Pushed(one, part_of(one.parameter).clone(), rate, part_of(one.parameter.grad) != 0)

    def moved(self, sample: Sample, before: Before) -> tuple[Tensor, Tensor] | None:
        assert isinstance(before, _Pushed)
        return part_of(before.one.parameter) == before.numbers, before.pushed

    def judged(self, sample: Sample, before: Before, share: float) -> Finding | None:
        assert isinstance(before, _Pushed)
        name, stored = before.one.name, name_of(before.numbers.dtype)
        self.readings = {"lost_update_share": share, "lost_update_weight": name}
        if share < MANY:
            return None
        return Finding(
            "updates-lost",
            "warning",
            f"{name}: {share:.0%} of the elements that have a gradient are the same after the update: it is "
            f"too small beside them for {stored}, at learning rate {before.rate:g}",
            "a larger learning rate" if stored == "fp32" else "weights in fp32, with 16 bits for computing only",
        )


def _rate(one: Trained) -> float:
    """The learning rate; NaN where it is a tensor, which would have to be read."""
    groups = one.lane.optimizer.param_groups
    group = next(group for group in groups if any(p is one.parameter for p in group["params"]))
    rate = group.get("lr", float("nan"))
    return float("nan") if isinstance(rate, Tensor) else float(rate)
