"""Whether another precision trains as well as fp32 does: seed by seed, against a margin fixed beforehand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["same", "worse", "can't tell"]
HALF_A_POINT = 0.005
"""Of a metric between 0 and 1; of a loss, the share of fp32's mean."""
SPREADS = 3.0
"""What differs by less than so many standard deviations of fp32 over its seeds may be the seed's doing."""
FEWEST = 3
"""Pairs below which an interval is too wide to say anything."""
WIDE = 4.0
"""Times the smallest margin: from there on a margin lets much pass, and it is said."""
UNSTEADY = 20.0
"""Times the smallest margin, ten points: from there on nothing is told."""
CONFIDENCE = 0.9
"""Of the interval; two tests at 5 %, one against each margin, are this interval inside both of them."""


@dataclass(frozen=True)
class Parity:
    """How an arm compares with fp32. Differences above zero are improvements, whichever way the metric runs."""

    verdict: Verdict
    margin: float
    difference: float | None
    """The mean over pairs; None where it is no number."""
    low: float | None
    high: float | None
    pairs: int
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Margin:
    """How far an arm may lie from fp32 and still count as the same: one for all arms of a bench."""

    size: float
    smallest: float
    """What it would be if fp32 did not differ from seed to seed."""
    seeds: int
    """Of fp32, that it was taken from."""

    @property
    def wide(self) -> bool:
        return self.size > WIDE * self.smallest

    @property
    def unsteady(self) -> bool:
        return self.size > UNSTEADY * self.smallest


def margin_of(base: Sequence[float], *, points: float) -> Margin:
    """`points`, or three standard deviations of fp32 over all of its seeds, whichever is more."""
    finite = [value for value in base if math.isfinite(value)]
    spread = statistics.stdev(finite) if len(finite) > 1 else 0.0
    return Margin(max(points, SPREADS * spread), points, len(finite))


def half_a_point(base: Sequence[float], *, higher_is_better: bool) -> float:
    """The smallest margin for a metric: 0.005 where more is better, 0.5 % of fp32's mean where it is a loss."""
    if higher_is_better:
        return HALF_A_POINT
    finite = [value for value in base if math.isfinite(value)]
    return HALF_A_POINT * abs(statistics.mean(finite)) if finite else HALF_A_POINT


def parity(base: Sequence[float], arm: Sequence[float], margin: Margin, *, higher_is_better: bool) -> Parity:
    """Compare the metrics of an arm with those of fp32, where each place in both is the same seed. The arm is the

    - *same* where the 90 % interval of the mean difference lies inside the margin on both sides, which is two one-sided
      tests at 5 %,
    - *worse* where the mean lies below minus the margin and the interval below zero, or where a metric of it is no
      number,
    - and else nothing can be told, as with fewer than three pairs or where fp32 itself is too unsteady; where the arm
      is at least not worse, that is noted.

    Moving an arm down moves its interval down and nothing else, so no *worse* becomes *same* by it.
    """
    differences = [(a - b) * (1 if higher_is_better else -1) for b, a in zip(base, arm, strict=True)]
    unsure = Parity("can't tell", margin.size, None, None, None, len(differences))
    if not all(map(math.isfinite, base)):
        return _noted(unsure, "fp32's own metric is no finite number")
    broken = sum(not math.isfinite(value) for value in arm)
    if broken:
        return _noted(unsure, f"no finite metric in {broken} of {len(differences)} runs", "worse")
    if not all(map(math.isfinite, differences)):
        return _noted(unsure, "the metrics lie too far apart to be subtracted")
    if len(differences) < FEWEST:
        mean = statistics.mean(differences) if differences else None
        return Parity("can't tell", margin.size, mean, None, None, len(differences), f"fewer than {FEWEST} seeds")
    mean = statistics.mean(differences)
    low, high = mean_interval(differences, CONFIDENCE)
    verdict, note = _judged(mean, low, high, margin.size)
    if margin.unsteady:
        verdict, note = "can't tell", "fp32 itself is too unsteady from seed to seed"
    elif verdict == "same" and margin.wide:
        note = "a wide margin, as fp32 itself differs that much from seed to seed"
    elif len({*base, *arm}) == 1:
        note = "nothing varied: the metric is the same in every run"
    return Parity(verdict, margin.size, mean, low, high, len(differences), note)


def _judged(mean: float, low: float, high: float, margin: float) -> tuple[Verdict, str]:
    if -margin <= low and high <= margin:
        return "same", ""
    if mean < -margin and high < 0.0:
        return "worse", "" if high < -margin else "by about the margin or more"
    if low > margin:
        return "can't tell", "not worse: better by more than the margin, which a precision alone does not explain"
    if low >= -margin:
        return "can't tell", "not worse; more seeds would show whether it is the same"
    return "can't tell", "the interval reaches across the margin; more seeds would narrow it"


def _noted(parity: Parity, note: str, verdict: Verdict = "can't tell") -> Parity:
    return Parity(verdict, parity.margin, None, None, None, parity.pairs, note)


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Where the mean lies, by Student's t; of at least two values."""
    mean, count = statistics.mean(values), len(values)
    reach = student(confidence, count - 1) * statistics.stdev(values) / math.sqrt(count)
    return mean - reach, mean + reach


def student(confidence: float, freedom: int) -> float:
    """How far Student's t lies from zero with this confidence, on either side: 2.92 at 0.9 with two degrees."""
    # With θ = atan(t / √freedom) the probability is a finite sum for whole degrees, so halving finds its inverse.
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.tan(high) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The probability that |t| stays below tan(angle) · √freedom."""
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for k in range(odd + 1, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    if odd:
        return 2.0 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
