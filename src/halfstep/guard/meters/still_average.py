"""An average of the weights that does not move while the weights do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from halfstep.finding import Finding
from halfstep.formats import name_of
from halfstep.guard.meters.meter import Crossings, Meter
from halfstep.guard.meters.sample import Sample, Trained, part_of, taking_turns


class _Before(NamedTuple):
    one: Trained
    average: Tensor


class StillAverage(Meter):
    """Of one weight at a time: elements of its average that stayed, bit for bit, though the weight is elsewhere."""

    turn = 1

    def __init__(self) -> None:
        super().__init__()
        self._before: _Before | None = None
        self._noted: tuple[_Before, int, int] | None = None
        self._over = Crossings()

    def before(self, sample: Sample) -> None:
        self._before = self._noted = None

    def gradients(self, sample: Sample) -> None:
        ema = sample.stepper.ema
        if ema is None:
            return
        for one in taking_turns(sample.with_gradients, sample.turn // 2, 1):
            average = ema.average_of(one.parameter)
            if average is not None:
                self._before = _Before(one, part_of(average).clone())

    def after(self, sample: Sample) -> None:
        before, self._before = self._before, None
        ema, report = sample.stepper.ema, sample.report
        average = None if before is None or ema is None else ema.average_of(before.one.parameter)
        if before is None or average is None or report is None or not report.applied:
            return
        elsewhere = part_of(before.one.parameter) != before.average
        stayed = part_of(average) == before.average
        still = sample.slate.note((stayed & elsewhere).count_nonzero())
        self._noted = before, still, sample.slate.note(elsewhere.count_nonzero())

    def drop(self) -> None:
        self._before = None

    def read(self, sample: Sample, numbers: Sequence[float]) -> list[Finding]:
        noted, self._noted = self._noted, None
        if noted is None or not numbers[noted[2]]:
            return []
        (one, average), still, elsewhere = noted
        self.readings = {"still_average_share": numbers[still] / numbers[elsewhere]}
        if not self._over.new([one.name], [one.name] if numbers[still] == numbers[elsewhere] else []):
            return []
        assert sample.stepper.ema is not None
        return [
            Finding(
                "average-still",
                "warning",
                f"the average of {one.name}, in {name_of(average.dtype)}, did not move at all, though the weight is "
                f"elsewhere: its steps with decay {sample.stepper.ema.decay:g} are too small for the format",
                "halfstep.Ema(model, decay), which averages in fp32; or a smaller decay",
            )
        ]
