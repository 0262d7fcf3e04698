"""Forecast when a steadily growing quantity reaches its limit, and meter loss scales and skips."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

from halfstep.finding import Finding
from halfstep.guard.monitors.base import Crossings, Monitor, SampledStep, format_and_more

FEWEST = 6
"""The minimum number of samples."""
CLEAR = 0.8
"""The minimum share of the variance that a straight line explains."""
RISE = 1.0
"""The minimum rise in bits over all samples; less may be a fluctuation."""
FARTHEST = 2.0
"""The horizon of a forecast, in multiples of the observed time."""
GOES_ON = 0.75
"""The minimum ratio of the later half's slope to the earlier half's.

A rise that slows down comes to rest, as that of outputs does while a model learns.
"""


def predict_steps_left(seen: Iterable[tuple[int, float]], limit: float) -> float | None:
    """Return the steps from the last sample until the regression line reaches the limit; None without a clear trend.

    A sample is a step and the bits measured there.
    """
    points = list(seen)
    steps, bits = [float(step) for step, _ in points], [height for _, height in points]
    if len(points) < FEWEST or min(steps) == max(steps) or min(bits) == max(bits):
        return None
    slope, start = statistics.linear_regression(steps, bits)
    span = steps[-1] - steps[0]
    if slope * span < RISE or statistics.correlation(steps, bits) ** 2 < CLEAR:
        return None
    if not _is_still_rising(steps, bits):
        return None
    left = max(0.0, (limit - start) / slope - steps[-1])
    return left if left <= FARTHEST * span else None


def _is_still_rising(steps: list[float], bits: list[float]) -> bool:
    """Return whether the rise continues; the halves share the middle sample, if there is one."""
    half = (len(steps) + 1) // 2
    if steps[0] == steps[half - 1] or steps[-half] == steps[-1]:
        return False
    earlier = statistics.linear_regression(steps[:half], bits[:half]).slope
    later = statistics.linear_regression(steps[-half:], bits[-half:]).slope
    return later > 0.0 and later >= GOES_ON * earlier


WARM_UP = 50
"""The attempts in which a scale adjusts."""
KEPT = 16
"""The number of samples that are kept."""
FALLS = 6
"""The minimum number of falls between samples: a scale that adjusts falls a few times, and stays."""


class ScaleTrend(Monitor):
    """The meter of each optimizer's loss scale: bits moved over the last samples, and when it will reach 1."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, deque[tuple[int, float]]] = {}
        self._over = Crossings()

    def read(self, sample: SampledStep, numbers: Sequence[float]) -> list[Finding]:
        """Return a finding for a loss scale that keeps falling."""
        report = sample.report
        if report is None or report.attempt < WARM_UP or not sample.stepper.precision.scaled:
            return []
        for name, part in report.parts.items():
            seen = self._seen.setdefault(name, deque(maxlen=KEPT))
            seen.append((report.attempt, math.log2(part.loss_scale)))
        self.readings = {"loss_scale_bits": min(seen[-1][1] - seen[0][1] for seen in self._seen.values())}
        left = {
            name: attempts
            for name in report.parts
            if (attempts := _predict_attempts_left(self._seen[name])) is not None
        }
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
                f"{report.attempt}, and keeps falling: ever larger gradients overflow{format_and_more(len(fresh) - 1)}",
                "precision=bf16, or a lower learning rate",
            )
        ]


def _predict_attempts_left(seen: Sequence[tuple[int, float]]) -> float | None:
    """Return the attempts until the scale is 1, below which fp16 does not need it; None unless it keeps falling."""
    bits = [height for _, height in seen]
    falls = sum(later < earlier for earlier, later in pairwise(bits))
    return predict_steps_left([(attempt, -height) for attempt, height in seen], 0.0) if falls >= FALLS else None


MANY = 0.05
"""The share of skips since the previous sample above which it is reported."""
FEWEST_STEPS = 2
"""The minimum number of skips: one of a few is chance."""


class SkipRate(Monitor):
    """The meter of skipped steps since the previous sample, from the stepper's own counters."""

    def __init__(self) -> None:
        super().__init__()
        self._attempted = self._skipped = 0
        self._over = Crossings()

    def read(self, sample: SampledStep, numbers: Sequence[float]) -> list[Finding]:
        """Return a finding for a high share of skips."""
        counts = sample.stepper.counts
        total = sum(counts.skipped.values())
        attempted, skipped = counts.attempted - self._attempted, total - self._skipped
        self._attempted, self._skipped = counts.attempted, total
        # The state of another run was loaded.
        if attempted <= 0 or skipped < 0:
            return []
        self.readings = {"skip_rate": skipped / attempted}
        # A loss scale adjusts by skipping.
        settled = not sample.stepper.precision.scaled or counts.attempted - attempted >= WARM_UP
        many = settled and skipped >= FEWEST_STEPS and skipped / attempted > MANY
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
