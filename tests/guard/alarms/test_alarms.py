"""Too many skips, and a loss scale that falls without end."""

from __future__ import annotations

import json

import pytest

from halfstep.errors import WrongUse
from halfstep.guard.alarms.scale_collapse import ScaleCollapse
from halfstep.guard.alarms.skips import Skips
from halfstep.guard.limits import Limits
from halfstep.step.report import GRADIENT_NOT_FINITE, GRADIENT_OVERFLOW, Part, StepReport


def skip(reason: str, scale: float) -> StepReport:
    return StepReport(0, 1, False, reason, False, 1.0, float("inf"), scale, {"loss": Part(1.0, float("inf"), scale)})


def test_five_in_a_row_are_too_many_and_four_are_not() -> None:
    skips = Skips(5, 0.25)
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
    skips = Skips(5, 0.25)
    for _ in range(25):
        skips.skipped()
        skips.applied()
    assert skips.alarm() is None
    skips.skipped()
    assert skips.alarm() == "26 of the last 100 steps were skipped"
    for _ in range(60):
        skips.applied()
    assert skips.alarm() is None


def test_excused_skips_count_for_nothing() -> None:
    skips = Skips(5, 0.25)
    for _ in range(200):
        skips.excused()
    assert skips.alarm() is None


def test_a_saved_count_goes_on() -> None:
    skips, other = Skips(5, 0.25), Skips(5, 0.25)
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


def test_a_scale_that_falls_is_normal_until_it_has_reached_its_floor() -> None:
    collapse = ScaleCollapse()
    for halvings in range(16):
        assert collapse.skipped(skip(GRADIENT_OVERFLOW, 65536.0 / 2**halvings))
    assert collapse.alarm() is None
    assert not collapse.skipped(skip(GRADIENT_NOT_FINITE, 1.0))
    assert collapse.alarm() == "the loss scale fell 16 times in a row and gradients still overflow"


def test_a_scale_that_stays_is_not_on_its_way_anywhere() -> None:
    collapse = ScaleCollapse()
    assert collapse.skipped(skip(GRADIENT_OVERFLOW, 1024.0))
    assert not collapse.skipped(skip(GRADIENT_OVERFLOW, 1024.0))


def test_an_applied_step_begins_the_fall_anew() -> None:
    collapse = ScaleCollapse()
    for halvings in range(30):
        assert collapse.skipped(skip(GRADIENT_OVERFLOW, 2.0**24 / 2**halvings))
        if halvings % 10 == 9:
            collapse.applied()
    assert collapse.alarm() is None


@pytest.mark.parametrize("wrong", [{"skips_in_a_row": 0}, {"skip_share": 0.0}, {"skip_share": 2.0}, {"rollbacks": -1}])
def test_impossible_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(WrongUse, match=next(iter(wrong))):
        Limits(**wrong)  # type: ignore[arg-type]


def test_limits_of_nothing_are_possible() -> None:
    assert Limits(rollbacks=0, diagnoses=0, islands=0).rollbacks == 0
