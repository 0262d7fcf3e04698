"""Measure gradients that underflow the format they are computed in, and find parameters that never have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfstep.finding import Finding
from halfstep.guard.monitors.base import (
    Crossings,
    Monitor,
    SampledStep,
    format_and_more,
    select_next_turn,
    view_local_part,
)

# Whether a zero gradient underflowed or is truly zero (a dead unit, a word that is not in the batch) cannot be known
# without computing it in fp32. But one can count the others that are so close to the end of the format that they lose
# digits: if those are many, some of their neighbors have underflowed.


AT_ONCE = 8
"""The number of weights in one sample."""
MANY = 0.25
"""The share of a gradient's non-zero elements that lose digits, above which it is reported."""


class _GradientSize(NamedTuple):
    """The size of a gradient, and the slots of its two counts on the scalars."""

    name: str
    elements: int
    nonzero: int
    low: int
    """The slot of the count below the smallest normal number, zeros included."""


class VanishingGradients(Monitor):
    """The meter of tiny gradients, of some matrices and kernels in turn: those are computed in 16 bits."""

    turn = 0

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[_GradientSize] = []
        self._over = Crossings()

    def before(self, sample: SampledStep) -> None:
        """Forget the previous sample."""
        self._noted = []

    def gradients(self, sample: SampledStep) -> None:
        """Count the zeros and the tiny values of some gradients, in turn."""
        wide = sample.members.not_multiplied
        matrices = [one for one in sample.with_gradients if one.parameter.ndim > 1 and id(one.parameter) not in wide]
        smallest = sample.stepper.precision.computes.smallest_normal
        for one in select_next_turn(matrices, sample.turn // 2, AT_ONCE):
            assert one.parameter.grad is not None
            size = view_local_part(one.parameter.grad).abs()
            nonzero = sample.scalars.note(size.count_nonzero())
            # Gradients are already unscaled and clipped here, so the limit is multiplied in the same way.
            low = sample.scalars.note((size < smallest * one.slot.multiplier).count_nonzero())
            self._noted.append(_GradientSize(one.name, size.numel(), nonzero, low))

    def read(self, sample: SampledStep, numbers: Sequence[float]) -> list[Finding]:
        """Return a finding for gradients that underflow, once per weight."""
        if not self._noted:
            return []
        nonzero = {one.name: numbers[one.nonzero] for one in self._noted}
        zero = {one.name: one.elements - nonzero[one.name] for one in self._noted}
        # If the limit itself underflows fp32 it is 0, and then not even a zero is below it.
        tiny = {one.name: max(0.0, numbers[one.low] - zero[one.name]) for one in self._noted}
        elements = sum(one.elements for one in self._noted)
        self.readings = {
            "gradient_zero_share": sum(zero.values()) / elements,
            "gradient_tiny_share": sum(tiny.values()) / max(1.0, sum(nonzero.values())),
        }
        zeros = {one.name: zero[one.name] / one.elements for one in self._noted}
        # A gradient that is zero everywhere has nothing left that could lose digits.
        low = {name: tiny[name] / max(1.0, nonzero[name]) for name in tiny}
        return self._say(sample, zeros, low)

    def _say(self, sample: SampledStep, zeros: dict[str, float], low: dict[str, float]) -> list[Finding]:
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
                f"{name}: {what}, with loss scale {sample.report.loss_scale:g}{format_and_more(len(fresh) - 1)}",
                "precision=bf16, which needs no loss scale; or a larger one: DynamicScale(init_scale=...)",
            )
        ]


LOOKS = 3
"""The number of steps of one optimizer before anything is reported: a layer that is dropped at random returns."""
SHOWN = 4


class UnreachedParameters(Monitor):
    """The meter of trainable parameters of an optimizer that never had a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self._never: dict[str, set[str]] = {}
        self._looks: dict[str, int] = {}
        self._over = Crossings()

    def gradients(self, sample: SampledStep) -> None:
        """Record which trained parameters have no gradient."""
        missing: dict[str, set[str]] = {}
        for one in sample.trained:
            missing.setdefault(one.slot.name, set())
            if one.parameter.grad is None:
                missing[one.slot.name].add(one.name)
        for optimizer, names in missing.items():
            self._never[optimizer] = names & self._never.get(optimizer, names)
            self._looks[optimizer] = self._looks.get(optimizer, 0) + 1

    def read(self, sample: SampledStep, numbers: Sequence[float]) -> list[Finding]:
        """Return a finding for parameters without a gradient in any observed step."""
        never = [
            name
            for optimizer, names in self._never.items()
            if self._looks[optimizer] >= LOOKS
            for name in sorted(names)
        ]
        self.readings = {"without_gradient": len(never)}
        fresh = self._over.new(never, never)
        if not fresh:
            return []
        return [
            Finding(
                "no-gradient",
                "warning",
                f"{', '.join(fresh[:SHOWN])}{format_and_more(len(fresh) - SHOWN)}: no gradient in any sampled step: "
                "the loss does not depend on them",
                "use them in the loss, or freeze them: parameter.requires_grad_(False)",
            )
        ]
