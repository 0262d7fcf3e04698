"""Decide whether another precision trains as well as fp32: paired by seed, with a margin fixed beforehand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["same", "worse", "can't tell"]
HALF_A_POINT = 0.005
"""The smallest margin: absolute for a metric between 0 and 1, relative to fp32's mean for a loss."""
SPREADS = 3.0
"""Standard deviations of fp32 over its seeds; a smaller difference may be caused by the seed alone."""
FEWEST = 3
"""The smallest number of pairs for which an interval is narrow enough to be useful."""
WIDE = 2.0
"""Multiple of the smallest margin from which on a margin is reported as wide: one point of a metric, 1 % of a loss."""
UNSTEADY = 20.0
"""Multiple of the smallest margin above which there is no verdict: ten points of a metric, 10 % of a loss."""
CONFIDENCE = 0.9
"""Confidence of the interval; it lies inside both margins exactly where two one-sided tests at 5 % pass."""


@dataclass(frozen=True)
class ParityTest:
    """The comparison of a candidate with fp32. Positive differences are improvements, for both metrics and losses."""

    verdict: Verdict
    margin: float
    difference: float | None
    """The mean over pairs; None if it is not finite."""
    low: float | None
    high: float | None
    pairs: int
    note: str = ""


@dataclass(frozen=True)
class Margin:
    """The largest distance from fp32 that still counts as the same; one for all candidates of a bench."""

    size: float
    smallest: float
    """The margin if fp32 did not vary from seed to seed."""
    seeds: int
    """Number of finite fp32 runs from which it was computed."""

    @property
    def wide(self) -> bool:
        """Return whether the margin is so wide that "same" is weak evidence."""
        return self.size >= WIDE * self.smallest

    @property
    def unsteady(self) -> bool:
        """Return whether fp32 varies too much between seeds for any verdict."""
        return self.size > UNSTEADY * self.smallest


def compute_margin(base: Sequence[float], *, points: float) -> Margin:
    """Return the margin: `points`, or three standard deviations of fp32 over its seeds, whichever is larger."""
    finite = [value for value in base if math.isfinite(value)]
    spread = statistics.stdev(finite) if len(finite) > 1 else 0.0
    return Margin(max(points, SPREADS * spread), points, len(finite))


def compute_smallest_margin(base: Sequence[float], *, higher_is_better: bool) -> float:
    """Return the smallest margin: 0.005 for a metric where higher is better, 0.5 % of fp32's mean for a loss."""
    if higher_is_better:
        return HALF_A_POINT
    finite = [value for value in base if math.isfinite(value)]
    return HALF_A_POINT * abs(statistics.mean(finite)) if finite else HALF_A_POINT


def compare_paired_metrics(
    base: Sequence[float],
    candidate: Sequence[float],
    margin: Margin,
    *,
    higher_is_better: bool,
    base_name: str = "fp32",
) -> ParityTest:
    """Compare the metrics of a candidate with those of fp32, or of another baseline; equal indices are the same seed.

    The verdict is

    - *same* if the 90 % interval of the mean difference lies inside the margin on both sides, which is two one-sided
      tests at 5 %,
    - *worse* if the mean lies below minus the margin and the interval below zero, or if a metric is non-finite,
    - *can't tell* otherwise, with fewer than three pairs, or if fp32 varies too much between seeds. A note says whether
      the candidate is at least not worse.

    The verdict is monotonic: shifting a candidate down shifts only its interval, so *worse* never becomes *same*.
    """
    differences = [(a - b) * (1 if higher_is_better else -1) for b, a in zip(base, candidate, strict=True)]
    unsure = ParityTest("can't tell", margin.size, None, None, None, len(differences))
    if not all(map(math.isfinite, base)):
        return _build_test_without_interval(unsure, f"{base_name}'s own metric is no finite number")
    # A non-finite metric is a failed training, so it counts as worse, not as missing.
    broken = sum(not math.isfinite(value) for value in candidate)
    if broken:
        return _build_test_without_interval(unsure, f"no finite metric in {broken} of {len(differences)} runs", "worse")
    # Two finite metrics near the limit of a float can have an infinite difference.
    if not all(map(math.isfinite, differences)):
        return _build_test_without_interval(unsure, "the metrics lie too far apart to be subtracted")
    if len(differences) < FEWEST:
        mean = statistics.mean(differences) if differences else None
        return ParityTest("can't tell", margin.size, mean, None, None, len(differences), f"fewer than {FEWEST} seeds")
    mean = statistics.mean(differences)
    low, high = compute_mean_interval(differences, CONFIDENCE)
    verdict, note = _judge_interval(mean, low, high, margin.size)
    if margin.unsteady:
        verdict, note = "can't tell", f"{base_name} itself is too unsteady from seed to seed"
    elif verdict == "same" and margin.wide:
        note = f"a wide margin, as {base_name} itself differs that much from seed to seed"
    elif len({*base, *candidate}) == 1:
        note = "nothing varied: the metric is the same in every run"
    return ParityTest(verdict, margin.size, mean, low, high, len(differences), note)


def _judge_interval(mean: float, low: float, high: float, margin: float) -> tuple[Verdict, str]:
    if -margin <= low and high <= margin:
        return "same", ""
    # The interval may still cross the margin: with a mean beyond it and no gain in sight that is "worse", with a note.
    if mean < -margin and high < 0.0:
        return "worse", "" if high < -margin else "by about the margin or more"
    if low > margin:
        return "can't tell", "not worse: better by more than the margin, which a precision alone does not explain"
    if low >= -margin:
        return "can't tell", "not worse; more seeds would show whether it is the same"
    return "can't tell", "the interval reaches across the margin; more seeds would narrow it"


def _build_test_without_interval(parity: ParityTest, note: str, verdict: Verdict = "can't tell") -> ParityTest:
    return ParityTest(verdict, parity.margin, None, None, None, parity.pairs, note)


def compute_mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the interval of the mean by Student's t; needs at least two values."""
    mean, count = statistics.mean(values), len(values)
    reach = compute_student_quantile(confidence, count - 1) * statistics.stdev(values) / math.sqrt(count)
    return mean - reach, mean + reach


def compute_student_quantile(confidence: float, freedom: int) -> float:
    """Return the two-sided quantile of Student's t: 2.92 at confidence 0.9 with two degrees of freedom."""
    # scipy is not a dependency. With θ = atan(t / √freedom) the probability is a finite sum for
    # integer degrees, so bisection inverts it; 60 halvings reach double precision.
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_student_probability(middle, freedom) < confidence else (low, middle)
    return math.tan(high) * math.sqrt(freedom)


def _compute_student_probability(angle: float, freedom: int) -> float:
    """Return the probability that |t| < tan(angle) · √freedom."""
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(odd + 1, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    if odd:
        return 2.0 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
