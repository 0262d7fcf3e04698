"""Arms: what they do to a case, in this process and in one of their own."""

from __future__ import annotations

import pytest
import torch

from halfstep.errors import HalfstepError
from halfstep.measure.arm import Arm
from halfstep.measure.case import Subject
from halfstep.measure.process import ArmFailed, ArmProcess, ArmTooSlow
from halfstep.measure.setting import Setting
from halfstep.measure.timing import Speed, race, warm

LINEAR = Subject("tests.support.cases:linear")


def test_an_arm_trains_a_copy_in_the_precision_asked_for() -> None:
    case = LINEAR.open()
    before = [p.detach().clone() for p in case.model.parameters()]
    arm = Arm(case, Setting("bf16", batch=4, microbatches=2))
    losses = arm.losses(20)
    assert losses[-1] < losses[0]
    assert arm.samples == 8
    assert arm.stepper.observed is not None
    assert arm.stepper.observed.share == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, case.model.parameters(), strict=True))


def test_a_precision_that_is_not_here_is_refused_not_replaced() -> None:
    with pytest.raises(HalfstepError, match="tf32"):
        Arm(LINEAR.open(), Setting("tf32"))


def test_an_arm_elsewhere_is_the_same_arm() -> None:
    setting = Setting("bf16", batch=4)
    with ArmProcess(LINEAR, setting) as away:
        opened = away.open()
        assert opened["samples"] == 4
        assert opened["conditions"]["torch"] == torch.__version__
        assert away.losses(3) == Arm(LINEAR.open(), setting).losses(3)
        assert away.seconds(2) > 0
        assert away.memory() > 4 * (64 * 128 + 128 * 10) * 4  # weights, gradients and two of AdamW


def test_an_arm_elsewhere_says_why_it_cannot() -> None:
    with ArmProcess(LINEAR, Setting("tf32")) as away, pytest.raises(HalfstepError, match="tf32 on") as refused:
        away.open()
    assert refused.value.do
    with ArmProcess(Subject("tests.support.cases:broken"), Setting()) as away:
        away.open()
        with pytest.raises(ArmFailed, match="IndexError"):
            away.seconds()


def test_an_arm_that_dies_or_hangs_is_told_apart() -> None:
    with ArmProcess(LINEAR, Setting()) as away:
        with pytest.raises(ArmTooSlow):
            away.open(limit=0.01)
        with pytest.raises(ArmFailed):
            away.seconds()


class Clockwork:
    """An arm that takes exactly as long as it is told, without taking it."""

    def __init__(self, *times: float) -> None:
        self.times, self.calls = list(times), 0

    def seconds(self, steps: int = 1) -> float:
        self.calls += 1
        return self.times[min(self.calls, len(self.times)) - 1]


def test_warming_up_ends_when_three_times_agree() -> None:
    arm = Clockwork(9.0, 4.0, 1.2, 1.0, 1.01, 1.02, 1.0)
    assert warm(arm) == 1.02
    assert arm.calls == 6
    restless = Clockwork(*(1.0 + (n % 2) for n in range(100)))
    warm(restless)
    assert restless.calls == 20


def test_a_race_pairs_times_and_gives_no_verdict_where_it_cannot() -> None:
    found = race({"base": Clockwork(2.0), "fast": Clockwork(1.0), "noisy": Clockwork(1.9, 2.1, 1.9, 2.1)},
                 baseline="base", pairs=20)  # fmt: skip
    assert found["fast"] == Speed(1.0, 2.0, 2.0, 2.0, 20)
    assert found["fast"].verdict == "faster"
    assert found["base"].verdict == "can't tell"
    assert race({"base": Clockwork(1.0), "slow": Clockwork(4.0)}, baseline="base", pairs=8)["slow"].verdict == "slower"


def test_a_race_ends_in_time_and_on_ctrl_c_with_what_it_has() -> None:
    class Interrupted(Clockwork):
        def seconds(self, steps: int = 1) -> float:
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().seconds(steps)

    assert race({"a": Interrupted(1.0)}, baseline="a", pairs=10)["a"].pairs == 3
    assert race({"a": Clockwork(1.0)}, baseline="a", pairs=10, seconds=0.0)["a"].pairs == 1
