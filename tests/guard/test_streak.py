"""Too many skips, and a loss scale that falls without end."""

from __future__ import annotations

import json

import pytest

from halfstep.errors import WrongUse
from halfstep.guard.streak import Limits, OverflowCounter, SkipCounter
from halfstep.step.report import GRADIENT_NOT_FINITE, GRADIENT_OVERFLOW, OptimizerReport, StepReport


def skip(reason: str, scale: float, name: str = "loss") -> StepReport:
    return StepReport(
        0, 1, False, reason, False, 1.0, float("inf"), scale, {name: OptimizerReport(1.0, float("inf"), scale)}
    )


def test_five_in_a_row_are_too_many_and_four_are_not() -> None:
    skips = SkipCounter(5, 0.25)
    for _ in range(4):
        skips.skipped()
    assert skips.alarm() is None
    skips.applied()
    for _ in range(4):
        skips.skipped()
    assert skips.alarm() is None
    skips.skipped()
    assert skips.alarm() == "5 steps in a row were skipped"


def test_a_quarter_of_the_last_hundred_is_allowed_and_no_more() -> None:
    skips = SkipCounter(5, 0.25)
    for _ in range(25):
        skips.skipped()
        skips.applied()
    assert skips.alarm() is None
    skips.skipped()
    assert skips.alarm() == "26 of the last 100 steps were skipped"
    for _ in range(60):
        skips.applied()
    assert skips.alarm() is None


def test_what_somebodys_guard_refuses_counts_for_the_share_alone() -> None:
    skips = SkipCounter(5, 0.25)
    for _ in range(25):
        skips.refused()
    assert (skips.alarm(), skips.in_a_row, skips.next_is_too_much) == (None, 0, True)
    skips.refused()
    assert skips.alarm() == "26 of the last 100 steps were skipped"


def test_excused_skips_count_for_nothing() -> None:
    skips = SkipCounter(5, 0.25)
    for _ in range(200):
        skips.excused()
    assert skips.alarm() is None


def test_a_saved_count_goes_on() -> None:
    skips, other = SkipCounter(5, 0.25), SkipCounter(5, 0.25)
    for _ in range(20):
        skips.skipped()
        skips.applied()
    skips.skipped()
    other.load_state_dict(json.loads(json.dumps(skips.state_dict())))
    for _ in range(4):
        skips.skipped()
        other.skipped()
    assert other.alarm() == skips.alarm() == "5 steps in a row were skipped"
    assert other.lately == skips.lately == 25


def fall(collapse: OverflowCounter, name: str, scale: float, after: float, reason: str = GRADIENT_OVERFLOW) -> bool:
    return collapse.skipped(skip(reason, scale, name), {"loss": 2.0, "g": 2.0, "d": 2.0, name: after})


def test_a_scale_that_falls_is_normal_until_it_has_reached_its_floor() -> None:
    collapse = OverflowCounter()
    for halvings in range(16):
        assert fall(collapse, "loss", 65536.0 / 2**halvings, 32768.0 / 2**halvings)
    assert collapse.alarm() is None
    assert not fall(collapse, "loss", 1.0, 1.0, GRADIENT_NOT_FINITE)
    assert collapse.alarm() == "the loss scale fell 16 times in a row and gradients still overflow"


def test_a_scale_that_stays_is_not_on_its_way_anywhere() -> None:
    collapse = OverflowCounter()
    assert not fall(collapse, "loss", 1024.0, 1024.0)
    assert collapse.alarm() is None


def test_an_applied_step_begins_the_fall_anew() -> None:
    collapse = OverflowCounter()
    for halvings in range(30):
        assert fall(collapse, "loss", 2.0**24 / 2**halvings, 2.0**23 / 2**halvings)
        if halvings % 10 == 9:
            collapse.applied(skip("", 1.0))
            assert collapse.falls(skip("", 1.0)) == 0
    assert not fall(collapse, "loss", 1.0, 1.0, GRADIENT_NOT_FINITE)
    assert collapse.alarm() is None


def test_each_optimizer_falls_by_itself() -> None:
    collapse = OverflowCounter()
    for halvings in range(4):
        for name in ("g", "d"):  # at the same scale, one after the other
            assert fall(collapse, name, 1024.0 / 2**halvings, 512.0 / 2**halvings)
    collapse.applied(skip("", 64.0, "g"))
    assert (collapse.falls(skip("", 1.0, "g")), collapse.falls(skip("", 1.0, "d"))) == (0, 4)
    other = OverflowCounter()
    other.load_state_dict(json.loads(json.dumps(collapse.state_dict())))
    assert not fall(other, "g", 1.0, 1.0, GRADIENT_NOT_FINITE)
    assert not other.collapsed
    assert not fall(other, "d", 1.0, 1.0, GRADIENT_NOT_FINITE)
    assert other.alarm() == "the loss scale fell 4 times in a row and gradients still overflow"


def test_one_that_stays_is_not_excused_by_another_that_falls() -> None:
    parts = {name: OptimizerReport(1.0, float("inf"), 64.0) for name in ("g", "d")}
    report = StepReport(0, 1, False, GRADIENT_OVERFLOW, False, 2.0, float("inf"), 64.0, parts)
    assert not OverflowCounter().skipped(report, {"g": 32.0, "d": 64.0})
    assert OverflowCounter().skipped(report, {"g": 32.0, "d": 32.0})


@pytest.mark.wording
@pytest.mark.parametrize("wrong", [{"skips_in_a_row": 0}, {"skip_share": 0.0}, {"skip_share": 2.0}, {"rollbacks": -1}])
def test_impossible_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(WrongUse, match=next(iter(wrong))):
        Limits(**wrong)  # type: ignore[arg-type]


def test_limits_of_nothing_are_possible() -> None:
    assert Limits(rollbacks=0, diagnoses=0, islands=0).rollbacks == 0
