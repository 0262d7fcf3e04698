"""Find numbers that an update should have changed and did not, by comparing one weight at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from halfstep.finding import Finding
from halfstep.formats import name_dtype
from halfstep.guard.monitors.base import (
    Crossings,
    Monitor,
    SampledStep,
    TrainedParameter,
    select_next_turn,
    view_local_part,
)


@dataclass
class WeightBefore:
    """The state of a weight before the update."""

    one: TrainedParameter
    numbers: Tensor
    """A copy of the numbers that should change."""


class UnchangedWeights(Monitor):
    """The base of meters that count elements which should have changed and are bitwise the same."""

    # The even samples belong to the meter of tiny gradients, so that one sample does not pay for both.
    turn = 1

    def __init__(self) -> None:
        super().__init__()
        self._before: WeightBefore | None = None
        self._noted: tuple[WeightBefore, int, int] | None = None
        self._over = Crossings()

    @abstractmethod
    def begun(self, sample: SampledStep, one: TrainedParameter) -> WeightBefore | None:
        """Return the values needed from before the update; None for a weight outside this meter's scope."""

    @abstractmethod
    def moved(self, sample: SampledStep, before: WeightBefore) -> tuple[Tensor, Tensor] | None:
        """Return masks of the elements that stayed, and of those that should have changed."""

    @abstractmethod
    def judged(self, sample: SampledStep, before: WeightBefore, share: float) -> Finding | None:
        """Set the readings, and return a finding for the share of elements that stayed, or None."""

    def before(self, sample: SampledStep) -> None:
        """Forget the previous sample."""
        self._before = self._noted = None

    def gradients(self, sample: SampledStep) -> None:
        """Choose one weight, in turn, and record it before the update."""
        for one in select_next_turn(sample.with_gradients, sample.turn // 2, 1):
            self._before = self.begun(sample, one)

    def after(self, sample: SampledStep) -> None:
        """Write the counts to the scalars, if the update was applied."""
        before, self._before = self._before, None
        if before is None or sample.report is None or not sample.report.applied:
            return
        found = self.moved(sample, before)
        if found is not None:
            stayed, should_move = found
            lost = sample.scalars.note((stayed & should_move).count_nonzero())
            self._noted = before, lost, sample.scalars.note(should_move.count_nonzero())

    def drop(self) -> None:
        """Release the copy."""
        self._before = None

    def read(self, sample: SampledStep, numbers: Sequence[float]) -> list[Finding]:
        """Return a finding the first time a weight's share is too high."""
        noted, self._noted = self._noted, None
        if noted is None or not numbers[noted[2]]:
            return []
        before, stayed, should_move = noted
        finding = self.judged(sample, before, numbers[stayed] / numbers[should_move])
        name = before.one.name
        fresh = self._over.new([name], [] if finding is None else [name])
        return [finding] if finding is not None and fresh else []


class UnchangedAverages(UnchangedWeights):
    """The meter of elements of a weight's average that stayed although the weight differs."""

    def begun(self, sample: SampledStep, one: TrainedParameter) -> WeightBefore | None:
        """Copy the average of the weight, if there is one."""
        average = _find_average(sample, one)
        return None if average is None else WeightBefore(one, view_local_part(average).clone())

    def moved(self, sample: SampledStep, before: WeightBefore) -> tuple[Tensor, Tensor] | None:
        """Compare the average with its copy, and the weight with the average."""
        average = _find_average(sample, before.one)
        if average is None:
            return None
        return view_local_part(average) == before.numbers, _read_stored(sample, before.one) != before.numbers

    def judged(self, sample: SampledStep, before: WeightBefore, share: float) -> Finding | None:
        """Report an average of which no element moved."""
        self.readings = {"still_average_share": share}
        ema = sample.stepper.ema
        if share < 1.0 or ema is None:
            return None
        return Finding(
            "average-still",
            "warning",
            f"the average of {before.one.name}, in {name_dtype(before.numbers.dtype)}, did not move, although the "
            f"weight differs: its steps with decay {ema.decay:g} are too small for the format",
            "halfstep.Ema(model, decay), which averages in fp32; or a smaller decay",
        )


def _read_stored(sample: SampledStep, one: TrainedParameter) -> Tensor:
    """Return a part of the weight; with the low bits, where these are stored next to it."""
    weights = sample.stepper.weights
    return view_local_part(one.parameter if weights is None else weights.wide(one.parameter))


def _find_average(sample: SampledStep, one: TrainedParameter) -> Tensor | None:
    ema = sample.stepper.ema
    return None if ema is None else ema.average_of(one.parameter)


MANY = 0.2
"""The share of the elements that should have changed, above which it is reported."""


@dataclass
class _PushedWeight(WeightBefore):
    rate: float
    pushed: Tensor
    """Where the gradient is non-zero, so that the weight should change."""


class LostUpdates(UnchangedWeights):
    """The meter of elements with a gradient whose stored value the update did not change."""

    def begun(self, sample: SampledStep, one: TrainedParameter) -> WeightBefore | None:
        """Copy the weight, and record where its gradient is non-zero."""
        assert one.parameter.grad is not None
        groups = one.slot.optimizer.param_groups
        group = next(group for group in groups if any(p is one.parameter for p in group["params"]))
        rate = group.get("lr", float("nan"))
        # A tensor could only be read by waiting.
        rate = float("nan") if isinstance(rate, Tensor) else float(rate)
        # A schedule that starts or ends at 0 changes nothing by design; stochastic rounding, few elements at a time.
        weights = sample.stepper.weights
        if rate == 0.0 or (weights is not None and weights.rounds_at_random(one.parameter)):
            return None
        return _PushedWeight(one, _read_stored(sample, one).clone(), rate, view_local_part(one.parameter.grad) != 0)

    def moved(self, sample: SampledStep, before: WeightBefore) -> tuple[Tensor, Tensor] | None:
        """Compare the weight with its copy."""
        assert isinstance(before, _PushedWeight)
        return _read_stored(sample, before.one) == before.numbers, before.pushed

    def judged(self, sample: SampledStep, before: WeightBefore, share: float) -> Finding | None:
        """Report a weight of which many elements did not move."""
        assert isinstance(before, _PushedWeight)
        name, stored = before.one.name, name_dtype(before.numbers.dtype)
        self.readings = {"lost_update_share": share, "lost_update_weight": name}
        if share < MANY:
            return None
        return Finding(
            "updates-lost",
            "warning",
            f"{name}: {share:.0%} of the elements with a gradient did not change in the update: it is "
            f"too small for {stored} relative to them, at learning rate {before.rate:g}",
            "a larger learning rate" if stored == "fp32" else "weights in fp32, with 16 bits for computing only",
        )
