"""A loss scale that goes down and does not come back: gradients grow, or a module is about to overflow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from halfstep.finding import Finding
from halfstep.guard.meters.meter import Crossings, Meter
from halfstep.guard.meters.sample import Sample

WARM_UP = 50
"""Attempts in which a scale looks for its place."""
KEPT = 5
"""Samples."""
FALL = 4.0
"""Bits over these samples."""


class ScaleTrend(Meter):
    """How many bits each optimizer's loss scale has moved over the last samples."""

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
        moved = {name: self._seen[name][-1][1] - self._seen[name][0][1] for name in report.parts}
        name = min(moved, key=moved.__getitem__)
        self.readings = {"loss_scale_bits": moved[name]}
        if not self._over.new(list(moved), [name] if moved[name] <= -FALL else []):
            return []
        (since, before), (_, now) = self._seen[name][0], self._seen[name][-1]
        return [
            Finding(
                "loss-scale-falls",
                "warning",
                f"the loss scale of {name!r} fell from {2.0**before:g} at attempt {since} to {2.0**now:g} at attempt "
                f"{report.attempt}: ever larger gradients overflow",
                "precision=bf16, or a lower learning rate",
            )
        ]
