"""Parity: what a verdict needs, beside numbers that were worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.measure.parity import (
    ParityTest,
    compare_paired_metrics,
    compute_margin,
    compute_smallest_margin,
    compute_student_quantile,
)

# Student's t at 95 % one-sided and 97.5 % one-sided, as the tables in books print it.
TABLE = {
    1: (6.314, 12.706), 2: (2.920, 4.303), 3: (2.353, 3.182), 4: (2.132, 2.776), 5: (2.015, 2.571),
    6: (1.943, 2.447), 7: (1.895, 2.365), 8: (1.860, 2.306), 9: (1.833, 2.262), 10: (1.812, 2.228),
    11: (1.796, 2.201), 12: (1.782, 2.179), 13: (1.771, 2.160), 14: (1.761, 2.145), 15: (1.753, 2.131),
    16: (1.746, 2.120), 17: (1.740, 2.110), 18: (1.734, 2.101), 19: (1.729, 2.093), 20: (1.725, 2.086),
    21: (1.721, 2.080), 22: (1.717, 2.074), 23: (1.714, 2.069), 24: (1.711, 2.064), 25: (1.708, 2.060),
    26: (1.706, 2.056), 27: (1.703, 2.052), 28: (1.701, 2.048), 29: (1.699, 2.045), 30: (1.697, 2.042),
}  # fmt: skip
BASE = [0.90, 0.91, 0.92, 0.91, 0.91]
"""A standard deviation of 0.00707, so a margin of 0.0212."""


def judged(base: list[float], arm: list[float], points: float = 0.005, higher_is_better: bool = True) -> ParityTest:
    return compare_paired_metrics(base, arm, compute_margin(base, points=points), higher_is_better=higher_is_better)


def moved(base: list[float], *by: float) -> list[float]:
    return [value + by[n % len(by)] for n, value in enumerate(base)]


@pytest.mark.parametrize("freedom", TABLE)
def test_student_is_that_of_the_tables(freedom: int) -> None:
    assert compute_student_quantile(0.90, freedom) == pytest.approx(TABLE[freedom][0], abs=6e-4)
    assert compute_student_quantile(0.95, freedom) == pytest.approx(TABLE[freedom][1], abs=6e-4)


def test_student_of_very_many_is_the_normal_distribution() -> None:
    assert compute_student_quantile(0.95, 10_000) == pytest.approx(1.95996, abs=3e-4)


def test_the_interval_is_that_worked_out_by_hand() -> None:
    # Differences -0.01, 0, 0.01, 0, 0.01: mean 0.002, sd 0.0083666, t(4) at 90 % 2.1318; 2.1318 · sd / √5 = 0.0079766.
    found = judged(BASE, moved(BASE, -0.01, 0.0, 0.01, 0.0, 0.01))
    assert found.difference == pytest.approx(0.002)
    assert found.low == pytest.approx(0.002 - 0.0079766, abs=1e-6)
    assert found.high == pytest.approx(0.002 + 0.0079766, abs=1e-6)
    assert found.margin == pytest.approx(3 * math.sqrt(0.0002 / 4))
    assert (found.verdict, found.pairs) == ("same", 5)


@pytest.mark.parametrize(
    ("by", "verdict"),
    [
        ((0.0,), "same"),
        ((-0.02,), "same"),
        ((-0.03,), "worse"),
        ((-0.03, -0.05), "worse"),
        ((-0.06, 0.02), "can't tell"),  # around the margin, and across zero
        ((-0.01, -0.025), "can't tell"),  # the mean is inside, the interval is not
        ((+0.2,), "can't tell"),  # not worse, and not the same
    ],
)
def test_verdicts(by: tuple[float, ...], verdict: str) -> None:
    assert judged(BASE, moved(BASE, *by)).verdict == verdict


def test_a_better_arm_is_not_the_same_and_not_worse() -> None:
    better, perhaps = judged(BASE, moved(BASE, 0.05)), judged(BASE, moved(BASE, 0.05, 0.0))
    assert better.verdict == perhaps.verdict == "can't tell"
    assert "better by more than the margin" in better.note
    assert "not worse; more seeds" in perhaps.note


def test_a_margin_is_never_below_half_a_point_and_a_wide_one_is_told() -> None:
    still = [0.9] * 4
    found = judged(still, moved(still, -0.004))
    assert (found.margin, found.verdict, found.note) == (0.005, "same", "")
    assert not compute_margin(still, points=0.005).wide
    assert judged(still, moved(still, -0.006)).verdict == "worse"
    for noisy, wide in (([0.88, 0.9, 0.92], True), ([0.896, 0.9, 0.904], True), ([0.897, 0.9, 0.903], False)):
        assert ("wide margin" in judged(noisy, noisy).note) == wide, "from one percentage point on"


def test_a_margin_of_more_than_ten_points_tells_nothing_but_that_fp32_is_unsteady() -> None:
    wild = [0.1, 0.9, 0.5]
    assert compute_margin(wild, points=0.005).unsteady
    for by in (0.0, -0.05, -2.0, +2.0):
        found = judged(wild, moved(wild, by))
        assert (found.verdict, found.note) == ("can't tell", "fp32 itself is too unsteady from seed to seed")
    assert judged(wild, [0.1, math.nan, 0.5]).verdict == "worse"
    just = [0.9 - 0.0332, 0.9, 0.9 + 0.0332]  # three standard deviations are 0.0996
    assert judged(just, just).verdict == "same"


def test_metrics_that_never_vary_are_told() -> None:
    still = [0.1, 0.1, 0.1]
    found = judged(still, still)
    assert (found.verdict, found.note) == ("same", "nothing varied: the metric is the same in every run")
    assert judged(still, moved(still, 0.001)).note == ""


def test_the_margin_is_of_all_seeds_of_fp32_whichever_an_arm_has() -> None:
    margin = compute_margin(BASE, points=0.005)
    few = compare_paired_metrics(BASE[:3], moved(BASE[:3], -0.001), margin, higher_is_better=True)
    assert few.margin == margin.size == pytest.approx(3 * math.sqrt(0.0002 / 4))
    assert margin.seeds == 5
    assert compute_margin([*BASE, math.nan], points=0.005).size == margin.size


def test_losses_run_the_other_way() -> None:
    base = [2.0, 2.0, 2.0]
    points = compute_smallest_margin(base, higher_is_better=False)
    assert points == pytest.approx(0.01)
    assert judged(base, [2.02, 2.02, 2.02], points, higher_is_better=False).verdict == "worse"
    assert judged(base, [1.995, 1.995, 1.995], points, higher_is_better=False).verdict == "same"
    assert "better" in judged(base, [1.5, 1.5, 1.5], points, higher_is_better=False).note
    assert compute_smallest_margin(base, higher_is_better=True) == 0.005
    assert compute_smallest_margin([math.nan], higher_is_better=False) > 0


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_seeds_tell_nothing(count: int) -> None:
    found = judged(BASE[:count], moved(BASE[:count], -0.5))
    assert found.verdict == "can't tell"
    assert "fewer than 3 seeds" in found.note
    assert found.low is None


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_is_worse(wrong: float) -> None:
    found = judged(BASE, [*BASE[:4], wrong])
    assert found.verdict == "worse"
    assert found.note == "no finite metric in 1 of 5 runs"
    assert judged([0.5], [wrong]).verdict == "worse"
    json.dumps(asdict(found), allow_nan=False)


def test_a_baseline_that_is_no_number_tells_nothing() -> None:
    found = judged([*BASE[:4], math.nan], BASE)
    assert found.verdict == "can't tell"
    json.dumps(asdict(found), allow_nan=False)


def test_huge_metrics_do_not_overflow() -> None:
    huge = [1e308, 1.1e308, 0.9e308]
    assert judged(huge, huge, 0.02e308).verdict == "same"
    assert judged(huge, [-value for value in huge]).verdict == "can't tell"


def test_unequal_numbers_of_runs_cannot_be_paired() -> None:
    with pytest.raises(ValueError):
        judged(BASE, BASE[:3])


numbers = st.floats(-10, 10)


@given(
    st.lists(st.tuples(numbers, numbers), min_size=3, max_size=8),
    st.floats(0, 20),
    st.floats(0, 1),
    st.booleans(),
)
def test_moving_an_arm_down_never_makes_it_better(
    pairs: list[tuple[float, float]], down: float, points: float, higher_is_better: bool
) -> None:
    base, arm = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    lower = [value - down if higher_is_better else value + down for value in arm]
    before = judged(base, arm, points, higher_is_better).verdict
    after = judged(base, lower, points, higher_is_better).verdict
    if before == "worse":
        assert after == "worse"
