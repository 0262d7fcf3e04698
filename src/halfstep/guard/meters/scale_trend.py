"""A loss scale that goes down and does not come back: gradients grow, or a module is about to overflow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from halfstep.finding import Finding
from halfstep.guard.meters.forecast import steps_left
from halfstep.guard.meters.meter import Crossings, Meter, and_more
from halfstep.guard.meters.sample import Sample

WARM_UP = 50
"""Attempts in which a scale looks for its place."""
KEPT = 16
"""Samples."""
FALLS = 6
"""Samples that found it lower than the one before: a scale that finds a new place falls a few times, and stays."""


class ScaleTrend(Meter):
    """How many bits each optimizer's loss scale has moved over the last samples, and when it will be down at 1."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, deque[tuple[int, float]]] = {}
        self._over = Crossings()

    def read(self, sample: Sample, numbers: Sequence[float]) -> list[Finding]:
        report = sample.report
        if report is None or report.attempt < WARM_UP or not sample.stepper.precision.scaled:
            return []
        for name, part in report.parts.items():
            seen = self._seen.setdefault(name, deque(maxlen=KEPT))
            seen.append((report.attempt, math.log2(part.loss_scale)))
        self.readings = {"loss_scale_bits": min(seen[-1][1] - seen[0][1] for seen in self._seen.values())}
        left = {name: attempts for name in report.parts if (attempts := _attempts_left(self._seen[name])) is not None}
        fresh = sorted(self._over.new(list(report.parts), list(left)), key=left.__getitem__)
        if not fresh:
            return []
        name = fresh[0]
        (since, before), (_, now) = self._seen[name][0], self._seen[name][-1]
        return [
            Finding(
                "loss-scale-falls",
                "warning",
                f"the loss scale of {name!r} fell from {2.0**before:g} at attempt {since} to {2.0**now:g} at attempt "
                f"{report.attempt}, and goes on: ever larger gradients overflow{and_more(len(fresh) - 1)}",
                "precision=bf16, or a lower learning rate",
            )
        ]


def _attempts_left(seen: Sequence[tuple[int, float]]) -> float | None:
    """Until it is 1, below which fp16 has no use for it; None where it does not fall again and again."""
    bits = [height for _, height in seen]
    falls = sum(later < earlier for earlier, later in pairwise(bits))
    return steps_left([(attempt, -height) for attempt, height in seen], 0.0) if falls >= FALLS else None
