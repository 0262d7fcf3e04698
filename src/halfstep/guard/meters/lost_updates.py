"""Updates so small beside their weight that rounding swallows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from halfstep.finding import Finding
from halfstep.formats import name_of
from halfstep.guard.meters.meter import Crossings, Meter
from halfstep.guard.meters.sample import Sample, Trained, part_of, taking_turns

MANY = 0.2
"""Share of the elements that should have moved."""


class _Before(NamedTuple):
    one: Trained
    rate: float
    weight: Tensor
    pushed: Tensor
    """Where the gradient is not zero, and so the weight should move."""


class LostUpdates(Meter):
    """Of one weight at a time: elements with a gradient whose stored value the update left as it was."""

    turn = 1

    def __init__(self) -> None:
        super().__init__()
        self._before: _Before | None = None
        self._noted: tuple[_Before, int, int] | None = None
        self._over = Crossings()

    def before(self, sample: Sample) -> None:
        self._before = self._noted = None

    def gradients(self, sample: Sample) -> None:
        for one in taking_turns(sample.with_gradients, sample.turn // 2, 1):
            assert one.parameter.grad is not None
            rate = _rate(one)
            if rate != 0.0:  # a schedule that begins or ends with nothing moves nothing
                weight = part_of(one.parameter).clone()
                self._before = _Before(one, rate, weight, part_of(one.parameter.grad) != 0)

    def after(self, sample: Sample) -> None:
        before, self._before = self._before, None
        if before is None or sample.report is None or not sample.report.applied:
            return
        same = part_of(before.one.parameter) == before.weight
        lost = sample.slate.note((same & before.pushed).count_nonzero())
        self._noted = before, lost, sample.slate.note(before.pushed.count_nonzero())

    def drop(self) -> None:
        self._before = None

    def read(self, sample: Sample, numbers: Sequence[float]) -> list[Finding]:
        noted, self._noted = self._noted, None
        if noted is None or not numbers[noted[2]]:
            return []
        (one, rate, weight, _), lost, pushed = noted
        share = numbers[lost] / numbers[pushed]
        self.readings = {"lost_update_share": share, "lost_update_weight": one.name}
        if not self._over.new([one.name], [one.name] if share >= MANY else []):
            return []
        stored = name_of(weight.dtype)
        return [
            Finding(
                "updates-lost",
                "warning",
                f"{one.name}: {share:.0%} of the elements that have a gradient are the same after the update: it is "
                f"too small beside them for {stored}, at learning rate {rate:g}",
                "a larger learning rate" if stored == "fp32" else "weights in fp32, with 16 bits for computing only",
            )
        ]


def _rate(one: Trained) -> float:
    """The learning rate; NaN where it is a tensor, which would have to be read."""
    groups = one.lane.optimizer.param_groups
    group = next(group for group in groups if any(p is one.parameter for p in group["params"]))
    rate = group.get("lr", float("nan"))
    return float("nan") if isinstance(rate, Tensor) else float(rate)
