"""However a plan ends: out of time, interrupted at any moment, or with losses that are not fp32's."""

from __future__ import annotations

import math

import pytest

from halfstep.errors import WrongUse
from halfstep.measure.plan.plan import plan as real_plan
from halfstep.measure.plan.probe import compare
from tests.measure.plan.clockwork import World, cell, falling, key, planned
from tests.measure.plan.test_plan_choice import FAST


@pytest.mark.parametrize("seconds", [1, 20, 40, 60, 90, 130, 200, 400, 10_000])
def test_time_is_kept_and_what_there_is_is_chosen_from(seconds: int) -> None:
    world = World(FAST)
    plan = planned(world, seconds=seconds)
    assert not plan.interrupted
    beginning = 5 + 3.0 * 21  # opening the baseline and warming it up is never left out
    assert world.clock <= max(seconds, beginning) + 3.0
    assert plan.choice.setting == plan.baseline or plan.choice.speed is not None
    if seconds >= 130:
        assert key(plan.choice.setting) == "bf16 last"
    late = {key(found.setting) for found in plan.ladder if "no time" in found.cut}
    assert late or seconds > 130
    assert not late & set(world.opened)


def test_ctrl_c_at_every_moment_leaves_a_plan() -> None:
    whole = World(FAST)
    planned(whole)
    assert whole.calls > 100
    choices = []
    for moment in range(1, whole.calls + 1):
        plan = planned(World(FAST, interrupt_at=moment))
        assert plan.interrupted
        assert plan.as_dict()["interrupted"] is True
        assert plan.choice.setting == plan.baseline or plan.choice.speed is not None
        choices.append(key(plan.choice.setting))
    assert choices[0] == "fp32"
    first = choices.index("bf16 last")
    assert first < len(choices) / 4, "the most promising setting is measured early"
    assert set(choices[first:]) == {"bf16 last"}


def test_losses_that_are_not_finite_reject() -> None:
    plan = planned(World(FAST, losses={"bf16 last": lambda n: math.nan if n == 3 else falling(n)}))
    assert cell(plan, "bf16 last").cut == "parity fails: the loss of update 4 is nan"
    assert key(plan.choice.setting) != "bf16 last"
    assert plan.choice.setting.precision == "bf16"


def test_losses_that_drift_reject_unless_fp32_drifts_as_far() -> None:
    drifting = {name: (lambda n: falling(n) * (1 + 0.005 * n)) for name in FAST if name != "fp32"}
    steady = planned(World(FAST, losses=drifting, nudged=lambda n: falling(n) * 1.001))
    assert steady.stay
    assert "more than 2.00%" in cell(steady, "bf16 last").cut
    wild = planned(World(FAST, losses=drifting, nudged=lambda n: falling(n) * (1 + 0.01 * n)))
    assert key(wild.choice.setting) == "bf16 last"
    assert wild.parity.spread is not None
    assert wild.parity.margin > 0.02


def test_updates_that_were_never_applied_are_no_parity() -> None:
    found = compare([2.0] * 20, [])
    assert found.verdict == "not probed"
    assert compare([2.0, 1.0] * 3, [2.0, 1.0] * 3).verdict == "holds"
    assert compare([math.nan] * 8, [2.0] * 8).verdict == "not probed"
    assert compare([2.0] * 8, [math.inf] + [2.0] * 7).verdict == "fails"
    assert compare([0.0] * 8, [0.0] * 8).verdict == "holds"
    assert compare([0.0] * 8, [1e-9] * 8).verdict == "fails"
    assert compare([1e30] * 8, [1.01e30] * 8).verdict == "holds"


def test_wrong_words_are_refused() -> None:
    with pytest.raises(WrongUse, match="0 seconds"):
        real_plan("tests.support.cases:linear", seconds=0)
    with pytest.raises(WrongUse, match="nan seconds"):
        real_plan("tests.support.cases:linear", seconds=math.nan)
