"""However a plan ends: out of time, interrupted at any moment, or with losses that are not fp32's."""

from __future__ import annotations

import math

import pytest

from halfstep.errors import NoStepInTime, WrongUse
from halfstep.measure.plan.plan import plan as real_plan
from tests.measure.plan.clockwork import World, cell, falling, key, planned
from tests.measure.plan.test_plan_choice import FAST


@pytest.mark.parametrize("seconds", [9, 20, 40, 60, 90, 130, 200, 400, 10_000])
def test_time_is_kept_and_what_there_is_is_chosen_from(seconds: int) -> None:
    world = World(FAST)
    plan = planned(world, seconds=seconds)
    assert not plan.interrupted
    assert world.clock <= seconds + 5, "but for an arm that was being opened"
    assert plan.choice.setting == plan.baseline or plan.choice.speed is not None
    if seconds >= 130:
        assert key(plan.choice.setting) == "bf16 last"
    late = {key(found.setting) for found in plan.ladder if "no time" in found.cut}
    assert late or seconds > 130
    assert not any(found.speed for found in plan.ladder if key(found.setting) in late)


@pytest.mark.wording
def test_too_little_time_for_one_step_is_told() -> None:
    with pytest.raises(NoStepInTime, match="no step in strict fp32 within the 6 s") as refused:
        planned(World(FAST), seconds=6)
    assert "--seconds 60" in refused.value.do


def test_a_setting_that_is_slow_once_it_is_warm_is_cut_and_keeps_nobody_waiting() -> None:
    world = World({"fp32": 0.001, "bf16": 1.0}, compile_seconds=1e6)
    plan = planned(world, seconds=60, has_images=False)
    assert "an update takes 1 s once it is warm; strict fp32's takes 0.001 s" in cell(plan, "bf16").cut
    assert cell(plan, "bf16").speed is None
    assert world.clock <= 60


def test_a_turn_is_as_long_as_its_slowest_arm_needs() -> None:
    world = World({"fp32": 0.01, "bf16": 0.04})
    plan = planned(world, seconds=60, has_images=False)
    found = cell(plan, "bf16")
    assert found.speed is not None
    assert found.speed.speedup == pytest.approx(0.25)


@pytest.mark.wording
def test_an_arm_that_fails_while_it_is_timed_is_cut_and_the_rest_goes_on() -> None:
    plan = planned(World(FAST, fails_after={"bf16 last": 8}))
    assert cell(plan, "bf16 last").cut == "it failed while it was timed: ValueError: call 9"
    assert key(plan.choice.setting) == "bf16"
    assert not plan.interrupted
    with pytest.raises(WrongUse, match="does not train in strict fp32: ValueError: call 9"):
        planned(World(FAST, fails_after={"fp32": 8}))
    with pytest.raises(WrongUse, match="does not train in strict fp32: ValueError: call 2"):
        planned(World(FAST, fails_after={"fp32": 1}))


@pytest.mark.wording
@pytest.mark.parametrize("broken", [0, 2, 15])
def test_strict_fp32_that_does_not_train_ends_the_plan(broken: int) -> None:
    with pytest.raises(WrongUse, match=f"the loss is nan at update {broken + 1}") as refused:
        planned(World(FAST, losses={"fp32": lambda n: math.nan if n == broken else falling(n)}))
    assert "learning rate" in refused.value.do


def test_ctrl_c_while_batches_grow_keeps_what_was_found() -> None:
    whole = World(FAST)
    found = planned(whole, grow_batch=True, seconds=3000)
    assert found.growth is not None
    assert found.growth_ended == "larger ones than 8x were not tried"
    assert found.growth.factor == 8
    grown = set()
    for moment in range(1, whole.calls + 1):
        plan = planned(World(FAST, interrupt_at=moment), grow_batch=True, seconds=3000)
        assert plan.interrupted
        assert all(cell.setting.batch * cell.setting.microbatches == 16 for cell in plan.ladder)
        grown.add(plan.growth.factor if plan.growth else 1)
    assert grown == {1, 2, 4}


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
    steady = planned(World(FAST, losses=drifting, nudged=lambda n, seed: falling(n) * (1 + 0.001 * seed)))
    assert steady.stay
    assert "more than 2.00%" in cell(steady, "bf16 last").cut
    wild = planned(World(FAST, losses=drifting, nudged=lambda n, seed: falling(n) * (1 + 0.005 * n * seed)))
    assert key(wild.choice.setting) == "bf16 last"
    assert wild.parity.verdict == "can't tell"
    assert not any(cell.parity and cell.parity.verdict == "fails" for cell in wild.ladder)


@pytest.mark.wording
def test_wrong_words_are_refused() -> None:
    with pytest.raises(WrongUse, match="0 seconds"):
        real_plan("tests.support.cases:linear", seconds=0)
    for seconds in (math.nan, math.inf, -3.0):
        with pytest.raises(WrongUse, match=f"{seconds} seconds"):
            real_plan("tests.support.cases:linear", seconds=seconds)
