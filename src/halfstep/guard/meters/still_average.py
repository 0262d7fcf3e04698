"""An average of the weights that does not move while the weights do."""

from __future__ import annotations

from torch import Tensor

from halfstep.finding import Finding
from halfstep.formats import name_of
from halfstep.guard.meters.sample import Sample, Trained, part_of
from halfstep.guard.meters.standing_still import Before, StandingStill


class StillAverage(StandingStill):
    """Elements of a weight's average that stayed, though the weight is elsewhere."""

    def begun(self, sample: Sample, one: Trained) -> Before | None:
        average = _average(sample, one)
        return None if average is None else Before(one, part_of(average).clone())

    def moved(self, sample: Sample, before: Before) -> tuple[Tensor, Tensor] | None:
        average = _average(sample, before.one)
        if average is None:
            return None
        return part_of(average) == before.numbers, part_of(before.one.parameter) != before.numbers

    def judged(self, sample: Sample, before: Before, share: float) -> Finding | None:
        self.readings = {"still_average_share": share}
        ema = sample.stepper.ema
        if share < 1.0 or ema is None:
            return None
        return Finding(
            "average-still",
            "warning",
            f"the average of {before.one.name}, in {name_of(before.numbers.dtype)}, did not move at all, though the "
            f"weight is elsewhere: its steps with decay {ema.decay:g} are too small for the format",
            "halfstep.Ema(model, decay), which averages in fp32; or a smaller decay",
        )


def _average(sample: Sample, one: Trained) -> Tensor | None:
    ema = sample.stepper.ema
    return None if ema is None else ema.average_of(one.parameter)
