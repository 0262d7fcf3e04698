"""Meters do not cry wolf: what is learned and comes to rest, fp32 beside fp16, and loops of many kinds."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import DynamicScale, Stepper, island
from halfstep.finding import Finding
from halfstep.guard.monitors.monitors import SELDOM, USUAL, Meters, compute_sampling_interval
from halfstep.guard.monitors.trends import _predict_attempts_left, predict_steps_left
from halfstep.step.loss import StaticScale


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def make(model: nn.Module, **given: Any) -> Stepper:
    given = {"precision": "fp16", "observe": False, **given}
    return Stepper(model, torch.optim.SGD(model.parameters(), 1e-6), **given)


def run(stepper: Stepper, meters: Meters, steps: int, batch: Any, loss: Any = mse) -> list[Finding]:
    found: list[Finding] = []
    for _ in range(steps):
        meters.before()
        found += meters.after(stepper.step(loss, batch))
    return found


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


# -- forecasts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "height",
    [
        lambda t: 9 * (1 - math.exp(-t / 150)) - 1,  # an output on its way to the targets' size
        lambda t: 0.2 * math.sqrt(t),
        lambda t: math.log2(1 + t / 4),
        lambda t: 0.0 if t < 300 else 5.0,
        # The last layer of a regression to targets about 100, trained with AdamW.
        lambda t: [-1.6, 0.3, 2.8, 4.1, 5.1, 6.4, 7.3, 7.5, 8.0, 7.8][min(t // 50, 9)],
        lambda t: [0.1, 0.5, 1.4, 2.4, 2.8, 3.7, 4.3, 4.6, 5.1, 4.8][min(t // 50, 9)],
    ],
)
def test_what_comes_to_rest_is_not_forecast_to_overflow(height: Any) -> None:
    seen = [(t, height(t)) for t in range(10, 1500, 50)]
    assert [end for end in range(len(seen)) if predict_steps_left(seen[max(0, end - 16) : end], 16.0) is not None] == []


def test_what_goes_on_is_forecast() -> None:
    for bits_each in (0.4, 0.6, 1.0):
        seen = [(50 * i, 1.0 + bits_each * i) for i in range(40)]
        told = next(
            end for end in range(len(seen)) if predict_steps_left(seen[max(0, end - 16) : end], 16.0) is not None
        )
        overflows = 15 / bits_each
        assert told < 0.6 * overflows, "there is time to do something"


def test_a_loss_scale_that_finds_a_new_place_is_no_alarm() -> None:
    settles = [9.0, 8.0, 7.0, 6.0, 5.0, *[4.0] * 12]
    seen = [(50 * i, bits) for i, bits in enumerate(settles, 1)]
    assert all(_predict_attempts_left(seen[:end]) is None for end in range(len(seen) + 1))
    once = [(50 * i, 16.0 if i < 7 else 2.0) for i in range(1, 14)]
    assert all(_predict_attempts_left(once[:end]) is None for end in range(len(once) + 1))
    falls = [(50 * i, 16.0 - i) for i in range(14)]
    assert _predict_attempts_left(falls) == pytest.approx(150)


def test_two_loss_scales_that_fall_are_told_once_each() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), 1e-9) for name in "ab"}
    scales = {name: DynamicScale(init_scale=2.0**14) for name in "ab"}
    stepper = Stepper(model, optimizers, precision="fp16", observe=False, loss_scale=scales)
    meters, found = Meters(stepper, every=10), []
    for step in range(1, 400):
        grown = {"a": 2.0 ** max(0, (step - 80) // 10), "b": 2.0 ** max(0, (step - 84) // 10)}
        meters.before()
        report = stepper.step(lambda m, x, by=grown: {n: mse(m[n], x) * by[n] for n in "ab"}, torch.ones(4, 8))
        found += meters.after(report)
    told = [finding.evidence for finding in found if finding.id == "loss-scale-falls"]
    assert 1 <= len(told) <= 2
    assert all(sum(f"scale of '{name}'" in words for words in told) <= 1 for name in "ab")


# -- formats --------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Puts out fp32, whatever the run computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float()) * 0 + 2e5


class Shrinks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.last = Wide(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(x) * 1e-6)


def test_an_output_in_fp32_has_the_room_of_fp32() -> None:
    stepper = make(Shrinks())
    meters = Meters(stepper, every=1)
    assert [f for f in run(stepper, meters, 9, torch.ones(4, 8)) if f.id.startswith("headroom")] == []
    assert meters.readings["headroom_module"] == "last"


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.last = nn.Embedding(99, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x) * 1e-9 + 1) + self.inner(self.words(x)).sum() * 1e-9


@pytest.mark.wording
@pytest.mark.parametrize("wide", [True, False])
def test_gradients_of_islands_and_of_tables_of_words_do_not_vanish_in_fp16(wide: bool) -> None:
    torch.manual_seed(0)
    model = Tiny()
    if wide:
        island(model, "inner")
    stepper = make(model, loss_scale=StaticScale(1.0))
    found = run(stepper, Meters(stepper, every=1), 12, torch.tensor([1, 2]))
    vanish = [finding.evidence for finding in found if finding.id == "gradients-vanish"]
    assert not any("words" in words for words in vanish)
    assert any("inner" in words for words in vanish) is not wide


# -- hooks ----------------------------------------------------------------------------------------------------------


def test_an_abandoned_sample_leaves_nothing_on_the_model() -> None:
    stepper = make(two())
    meters = Meters(stepper, every=2)

    def fails(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise ZeroDivisionError

    run(stepper, meters, 1, torch.ones(4, 8))
    meters.before()
    assert hooks(stepper.model)
    with pytest.raises(ZeroDivisionError):
        stepper.step(fails, torch.ones(4, 8))
    meters.abandon()
    assert not hooks(stepper.model)
    assert b"halfstep" not in pickle.dumps(stepper.model)
    meters.abandon()
    run(stepper, meters, 6, torch.ones(4, 8))
    assert "headroom_bits" in meters.readings


def test_between_steps_nothing_is_metered_that_is_no_step() -> None:
    stepper = make(two())
    meters, found = Meters(stepper, every=2), []
    for _ in range(12):
        found += meters.after(stepper.step(mse, torch.ones(4, 8)))
        meters.between()
        assert not hooks(stepper.model)
        stepper.model(torch.ones(4, 8) * 1e6)
    assert [finding.id for finding in found if finding.id != "updates-lost"] == []
    assert "the loop calls the stepper itself" in str(meters.readings["headroom"])
    assert {"gradient_zero_share", "lost_update_share"} <= set(meters.readings)


def test_islands_and_parts_that_come_later_are_followed() -> None:
    stepper = make(two())
    meters = Meters(stepper, every=1)

    def hooked() -> list[str]:
        meters.before()
        found = [path for path, module in stepper.model.named_modules() if module._forward_hooks]
        meters.after(stepper.step(mse, torch.ones(4, 8)))
        run(stepper, meters, 1, torch.ones(4, 8))
        return found

    assert hooked() == ["0", "1"]
    stepper.model.append(nn.Linear(2, 2).requires_grad_(False))
    assert hooked() == ["0", "1", "2"]
    stepper.model[1] = nn.Sequential(stepper.model[1])
    assert hooked() == ["0", "1.0", "2"]
    island(stepper.model, "1")
    assert hooked() == ["0", "2"]


# -- how often ------------------------------------------------------------------------------------------------------


def test_samples_that_take_long_are_taken_seldom() -> None:
    assert compute_sampling_interval(0.0, 1.0) == compute_sampling_interval(0.5, 1.0) == USUAL
    assert compute_sampling_interval(0.51, 1.0) == compute_sampling_interval(1.0, 1.0) == 2 * USUAL
    assert compute_sampling_interval(1e9, 1.0) == compute_sampling_interval(1.0, 0.0) == SELDOM * USUAL
    for sample in (0.2, 0.7, 3.0, 9.9):
        assert sample / compute_sampling_interval(sample, 1.0) <= 0.01


def test_a_rhythm_that_was_asked_for_is_kept() -> None:
    assert Meters(make(two()), every=3).every == 3
    stepper = make(two())
    meters = Meters(stepper)
    run(stepper, meters, 120, torch.ones(4, 8))
    assert meters.every % USUAL == 0


def test_meters_that_take_turns_see_every_weight() -> None:
    torch.manual_seed(0)
    stepper = make(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))), precision="fp32")
    meters, seen = Meters(stepper, every=2), set()
    for _ in range(20):
        run(stepper, meters, 1, torch.ones(4, 8))
        seen.add(meters.readings.get("lost_update_weight"))
    assert {f"{i}.weight" for i in range(4)} <= seen
