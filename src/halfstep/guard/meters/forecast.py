"""When a quantity that grows steadily will reach its limit, or nothing where it does not."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

FEWEST = 6
"""Samples."""
CLEAR = 0.8
"""Share of the variance that a straight line explains."""
RISE = 1.0
"""Bits that it must have risen over what was seen: less is a wave."""
FARTHEST = 2.0
"""How often the time seen so far may pass again until the limit: nobody can look further ahead."""
GOES_ON = 0.75
"""Slope of the later half, in that of the earlier one: what slows down comes to rest, as outputs do that are learnt."""


def steps_left(seen: Iterable[tuple[int, float]], limit: float) -> float | None:
    """Steps from the last sample until the line through the samples reaches the limit, where the trend is clear.

    A sample is a step and the bits that were measured there.
    """
    points = list(seen)
    steps, bits = [float(step) for step, _ in points], [height for _, height in points]
    if len(points) < FEWEST or min(steps) == max(steps) or min(bits) == max(bits):
        return None
    slope, start = statistics.linear_regression(steps, bits)
    span = steps[-1] - steps[0]
    if slope * span < RISE or statistics.correlation(steps, bits) ** 2 < CLEAR:
        return None
    if not _goes_on(steps, bits):
        return None
    left = max(0.0, (limit - start) / slope - steps[-1])
    return left if left <= FARTHEST * span else None


def _goes_on(steps: list[float], bits: list[float]) -> bool:
    """Whether it rises as it did before; the halves share the sample in the middle, where there is one."""
    half = (len(steps) + 1) // 2
    if steps[0] == steps[half - 1] or steps[-half] == steps[-1]:
        return False
    earlier = statistics.linear_regression(steps[:half], bits[:half]).slope
    later = statistics.linear_regression(steps[-half:], bits[-half:]).slope
    return later > 0.0 and later >= GOES_ON * earlier
