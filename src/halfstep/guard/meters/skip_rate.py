"""How many steps are skipped: a run that skips some all the time trains on less than it is given."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.finding import Finding
from halfstep.guard.meters.meter import Crossings, Meter
from halfstep.guard.meters.sample import Sample
from halfstep.guard.meters.scale_trend import WARM_UP

MANY = 0.05
"""Share of the steps since the sample before."""
FEWEST = 2
"""Skips: one of a few is chance."""


class SkipRate(Meter):
    """Skipped steps since the sample before, from the stepper's own counters."""

    def __init__(self) -> None:
        super().__init__()
        self._attempted = self._skipped = 0
        self._over = Crossings()

    def read(self, sample: Sample, numbers: Sequence[float]) -> list[Finding]:
        counts = sample.stepper.counts
        total = sum(counts.skipped.values())
        attempted, skipped = counts.attempted - self._attempted, total - self._skipped
        self._attempted, self._skipped = counts.attempted, total
        if attempted <= 0 or skipped < 0:  # another run's state was loaded
            return []
        self.readings = {"skip_rate": skipped / attempted}
        # A loss scale looks for its place by skipping.
        settled = not sample.stepper.precision.scaled or counts.attempted - attempted >= WARM_UP
        many = settled and skipped >= FEWEST and skipped / attempted > MANY
        if not self._over.new(["steps"], ["steps"] if many else []):
            return []
        reason, times = counts.skipped.most_common(1)[0]
        return [
            Finding(
                "steps-skipped",
                "warning",
                f"{skipped} of the last {attempted} steps were skipped; most often, {times} times in all: {reason}",
                "guard=repair, or halfstep replay with the run's folder, which names the operation",
            )
        ]
