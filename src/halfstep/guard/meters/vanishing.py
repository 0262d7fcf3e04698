"""Gradients too small for the format they are computed in.

Whether a zero is a gradient that vanished or one that is zero in truth (a dead unit, a word that is not in the batch)
cannot be told without computing it again in fp32. What can be told is how many of the others lie so near the end of
the format that they lose digits: where those are many, some of their neighbours are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfstep.finding import Finding
from halfstep.guard.meters.meter import Crossings, Meter, and_more
from halfstep.guard.meters.sample import Sample, Trained, part_of, taking_turns
from halfstep.step.gradients import clip_factor

AT_ONCE = 8
"""Weights in one sample."""
MANY = 0.25
"""Share of a gradient's elements that are not zero and lose digits."""


class _Noted(NamedTuple):
    """Of a gradient: its size, and the places on the slate of two numbers."""

    name: str
    elements: int
    nonzero: int
    low: int
    """How many are below the smallest normal number, zeros included."""


class Vanishing(Meter):
    """Of some matrices and kernels, which are what is computed in 16 bits, the share of tiny gradients."""

    turn = 0

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[_Noted] = []
        self._over = Crossings()

    def before(self, sample: Sample) -> None:
        self._noted = []

    def gradients(self, sample: Sample) -> None:
        wide = sample.members.not_multiplied
        matrices = [one for one in sample.with_gradients if one.parameter.ndim > 1 and id(one.parameter) not in wide]
        smallest = sample.stepper.precision.computes.smallest_normal
        for one in taking_turns(matrices, sample.turn // 2, AT_ONCE):
            assert one.parameter.grad is not None
            size = part_of(one.parameter.grad).abs()
            nonzero = sample.slate.note(size.count_nonzero())
            low = sample.slate.note((size < smallest * _multiplied_by(one)).count_nonzero())
            self._noted.append(_Noted(one.name, size.numel(), nonzero, low))

    def read(self, sample: Sample, numbers: Sequence[float]) -> list[Finding]:
        if not self._noted:
            return []
        nonzero = {one.name: numbers[one.nonzero] for one in self._noted}
        zero = {one.name: one.elements - nonzero[one.name] for one in self._noted}
        # A limit that is itself too small for fp32 is 0, and then not even a zero is below it.
        tiny = {one.name: max(0.0, numbers[one.low] - zero[one.name]) for one in self._noted}
        elements = sum(one.elements for one in self._noted)
        self.readings = {
            "gradient_zero_share": sum(zero.values()) / elements,
            "gradient_tiny_share": sum(tiny.values()) / max(1.0, sum(nonzero.values())),
        }
        zeros = {one.name: zero[one.name] / one.elements for one in self._noted}
        # Where nothing is left of a gradient there is nothing that could lose digits.
        low = {name: tiny[name] / max(1.0, nonzero[name]) for name in tiny}
        return self._say(sample, zeros, low)

    def _say(self, sample: Sample, zeros: dict[str, float], low: dict[str, float]) -> list[Finding]:
        precision = sample.stepper.precision
        over = [name for name in zeros if precision.scaled and (low[name] >= MANY or zeros[name] == 1.0)]
        fresh = sorted(self._over.new(zeros, over), key=lambda name: -(low[name] + zeros[name]))
        if not fresh or sample.report is None:
            return []
        name = fresh[0]
        what = (
            "its gradient is exactly 0 everywhere"
            if zeros[name] == 1.0
            else f"{low[name]:.0%} of its gradient is below {precision.computes.name}'s smallest normal number and "
            f"loses digits, and {zeros[name]:.0%} is exactly 0"
        )
        return [
            Finding(
                "gradients-vanish",
                "warning",
                f"{name}: {what}, with loss scale {sample.report.loss_scale:g}{and_more(len(fresh) - 1)}",
                "precision=bf16, which needs no loss scale; or a larger one: DynamicScale(init_scale=...)",
            )
        ]


def _multiplied_by(one: Trained) -> float:
    """What became of a number that backward computed: unscaled and clipped."""
    lane = one.lane
    return lane.factor * (1.0 if lane.clip_norm is None else clip_factor(lane.norm, lane.clip_norm))
