"""What each meter says, when, and that it says it once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import DynamicScale, Ema, StaticScale, Stepper
from halfstep.finding import Finding
from halfstep.guard.monitors.base import ELEMENTS, select_next_turn, view_local_part
from halfstep.guard.monitors.monitors import Meters
from halfstep.guard.monitors.trends import predict_steps_left
from tests.support.models import plain_model

FP16_ENDS = 65504.0


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def make(model: nn.Module, rate: float = 1e-2, **given: Any) -> Stepper:
    given = {"precision": "fp32", "observe": False, **given}
    return Stepper(model, torch.optim.SGD(model.parameters(), rate), **given)


def watch(
    stepper: Stepper,
    steps: int,
    loss: Any = mse,
    *,
    every: int = 2,
    each: Callable[[int], None] = lambda step: None,
    meters: Meters | None = None,
) -> tuple[list[tuple[int, Finding]], Meters]:
    """Findings with the step after which they came; `each` is called before every step."""
    meters = Meters(stepper, every=every) if meters is None else meters
    found = []
    for step in range(1, steps + 1):
        each(step)
        meters.before()
        report = stepper.step(loss, torch.ones(4, 8))
        found += [(step, finding) for finding in meters.after(report)]
    return found, meters


def named(found: Sequence[tuple[int, Finding]], id: str) -> list[tuple[int, Finding]]:
    return [(step, finding) for step, finding in found if finding.id == id]


# -- headroom -------------------------------------------------------------------------------------------------------


def two_layers(largest: float) -> nn.Sequential:
    """The first puts out `largest` for a batch of ones, the second makes it small again."""
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(-largest / 8)  # the extreme may be below zero
        model[1].weight.fill_(1e-6)
    return model


@pytest.mark.wording
@pytest.mark.parametrize(("largest", "said"), [(40000.0, 1), (30000.0, 0)])
def test_little_headroom_is_told_once_with_module_and_numbers(largest: float, said: int) -> None:
    stepper = make(two_layers(largest), rate=1e-30, precision="fp16", loss_scale=StaticScale(1.0))
    found, meters = watch(stepper, 12)
    little = named(found, "headroom-little")
    assert len(little) == said
    assert meters.readings["headroom_module"] == "0"
    assert meters.readings["headroom_bits"] == pytest.approx(math.log2(FP16_ENDS / largest), abs=0.01)
    if said:
        assert little[0][0] == 3  # sampled at 2, read at 3
        assert little[0][1].evidence.startswith("0: its largest output is 40,000, and fp16 ends at 65,504: 0.7 bits")
        assert 'halfstep.island(model, "0")' in little[0][1].fix


def test_a_second_crossing_is_told_again() -> None:
    model = two_layers(40000.0)

    def each(step: int) -> None:
        with torch.no_grad():
            model[0].weight.fill_((1000.0 if 6 <= step < 12 else 40000.0) / 8)

    stepper = make(model, rate=1e-30, precision="fp16", loss_scale=StaticScale(1.0))
    found, _ = watch(stepper, 20, each=each)
    assert [step for step, _ in named(found, "headroom-little")] == [3, 13]


def test_bf16_has_room_where_fp16_has_little() -> None:
    found, meters = watch(make(two_layers(40000.0), rate=1e-30, precision="bf16"), 8)
    assert not named(found, "headroom-little")
    assert float(meters.readings["headroom_bits"]) > 100


@pytest.mark.wording
def test_steady_growth_is_forecast_and_comes_true() -> None:
    model, factor = two_layers(1.0), 1.25

    def each(step: int) -> None:
        with torch.no_grad():
            model[0].weight.mul_(factor)

    stepper = make(model, rate=1e-30, precision="fp16", loss_scale=StaticScale(1.0))
    found, meters = watch(stepper, 30, each=each)
    (step, finding), *more = named(found, "headroom-shrinks")
    assert not more
    assert step == 19  # from step 18 on, twice what was seen reaches to the end
    assert "fp16's limit in about" in finding.evidence
    said = float(finding.evidence.split("in about ")[1].split(" steps")[0])
    overflows_at = math.log(FP16_ENDS) / math.log(factor)
    assert said == pytest.approx(overflows_at - 18, abs=6)
    assert float(meters.readings["overflow_in_steps"]) == pytest.approx(overflows_at - 28, abs=2)


def test_a_forecast_needs_a_clear_trend() -> None:
    noise = torch.Generator().manual_seed(0)
    for _ in range(300):
        bits = (10 + 0.3 * torch.randn(16, generator=noise)).tolist()
        assert predict_steps_left(list(zip(range(0, 800, 50), bits, strict=True)), 16.0) is None
    rising = [(50 * i, 4 + 0.5 * i) for i in range(16)]
    assert predict_steps_left(rising, 16.0) == pytest.approx(450)
    assert predict_steps_left(rising[:5], 16.0) is None
    assert predict_steps_left([(step, -bits) for step, bits in rising], 16.0) is None
    assert predict_steps_left([(step, 4.0 + 0.01 * i) for i, (step, _) in enumerate(rising)], 4.5) is None
    assert predict_steps_left([(step, bits + 4.0 * (i % 2)) for i, (step, bits) in enumerate(rising[:8])], 16.0) is None
    assert predict_steps_left(rising, 128.0) is None, "too far away for anybody to say"
    assert predict_steps_left([(7, 1.0)] * 9, 16.0) is None
    assert predict_steps_left([(7, 1.0)] * 8 + [(50, 9.0)], 16.0) is None
    assert predict_steps_left([], 16.0) is None


# -- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_gradients_that_vanish_in_fp16_are_named_and_a_loss_scale_cures_it() -> None:
    def small(model: nn.Module, x: Tensor) -> Tensor:
        return mse(model, x) * 1e-6

    without, meters = watch(make(plain_model(), precision="fp16", loss_scale=StaticScale(1.0)), 8, small)
    (_, finding), *more = named(without, "gradients-vanish")
    assert not more
    assert "weight" in finding.evidence
    assert "with loss scale 1" in finding.evidence
    assert float(meters.readings["gradient_tiny_share"]) > 0.5 or meters.readings["gradient_zero_share"] == 1.0
    scaled, meters = watch(make(plain_model(), precision="fp16", loss_scale=StaticScale(2.0**18)), 8, small)
    assert not named(scaled, "gradients-vanish")
    assert float(meters.readings["gradient_tiny_share"]) < 0.1


def test_clipping_does_not_look_like_vanishing() -> None:
    found, meters = watch(make(plain_model(), precision="fp16", clip_norm=1e-7), 8)
    assert not named(found, "gradients-vanish")
    assert meters.readings["gradient_tiny_share"] == 0.0


def test_a_zero_that_is_zero_in_truth_is_a_reading_and_no_finding() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias[:2] = -10.0
        model[0].bias[2:] = 10.0
    found, meters = watch(make(model, rate=1e-6, precision="fp16", loss_scale=StaticScale(16.0)), 8)
    assert not named(found, "gradients-vanish")
    assert meters.readings["gradient_zero_share"] == pytest.approx((16 + 4) / 40)


def test_shares_are_shares_where_the_limit_itself_vanishes() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias[:2] = -10.0
        model[0].bias[2:] = 10.0
    _, meters = watch(make(model, clip_norm=1e-9), 8)
    assert meters.readings["gradient_tiny_share"] == 0.0
    assert meters.readings["gradient_zero_share"] == pytest.approx(0.5)


# -- updates --------------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_lost_updates_are_counted_and_told_once_for_each_weight() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False))
    found, meters = watch(make(model, rate=1e-12), 12)
    assert meters.readings["lost_update_share"] == 1.0
    assert meters.readings["lost_update_weight"] == "0.weight"
    ((_, finding),) = named(found, "updates-lost")
    assert "0.weight: 100% of the elements" in finding.evidence
    assert "at learning rate 1e-12" in finding.evidence


def test_half_of_the_updates_lost_is_half() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].weight[:8] = 2.0**30
    # Constant gradients: 1e-4 is nothing beside 2**30, and something beside 1.
    _, meters = watch(make(model, rate=1e-4), 4, lambda m, x: m[0].weight.sum())
    assert meters.readings["lost_update_share"] == 0.5


@pytest.mark.parametrize("rate", [1e-2, 0.0])
def test_updates_that_arrive_and_a_schedule_that_begins_at_zero_are_no_finding(rate: float) -> None:
    found, meters = watch(make(plain_model(), rate=rate), 8)
    assert not named(found, "updates-lost")
    assert meters.readings.get("lost_update_share") == (None if rate == 0.0 else 0.0)


def test_elements_without_a_gradient_are_not_expected_to_move() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False))
    _, meters = watch(make(model), 4, lambda m, x: m[0].weight[:4].sum())
    assert meters.readings["lost_update_share"] == 0.0


class Narrow(Ema):
    """An average kept in bf16, as people's own often are."""

    def update(self, parameters: Any = None) -> None:
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            short = average.bfloat16()
            average.copy_(short.lerp_(parameter.detach().bfloat16(), 1 - self.decay))


@pytest.mark.wording
def test_an_average_that_does_not_move_is_told_and_one_in_fp32_is_not() -> None:
    def watched(kind: type[Ema]) -> tuple[list[tuple[int, Finding]], Meters]:
        model = nn.Sequential(nn.Linear(8, 16, bias=False))
        ema = kind(model, 0.9999)
        ema._averages = [average.bfloat16().float() for average in ema._averages]
        return watch(make(model, rate=1e-2, ema=ema), 8)

    still, meters = watched(Narrow)
    ((_, finding),) = named(still, "average-still")
    assert "0.weight" in finding.evidence
    assert meters.readings["still_average_share"] == 1.0
    moving, meters = watched(Ema)
    assert not named(moving, "average-still")
    assert float(meters.readings["still_average_share"]) < 0.1


# -- the host's own counters ---------------------------------------------------------------------------------------


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.sometimes = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.used(x) + self.frozen(x) + (self.sometimes(x) if self.calls % 3 == 0 else 0.0)


@pytest.mark.wording
def test_parameters_that_no_loss_reaches_are_named_early_and_once() -> None:
    model = Unused()
    found, meters = watch(make(model), 40, every=50)
    ((step, finding),) = named(found, "no-gradient")
    assert step == 3
    assert finding.evidence.startswith("never.bias, never.weight: no gradient")
    assert meters.readings["without_gradient"] == 2
    assert len(found) == 1
    assert meters.readings["headroom_module"] in ("used", "sometimes", "frozen")


def test_an_optimizer_whose_turn_it_is_not_misses_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizers = {name: torch.optim.SGD(model[i].parameters(), 1e-2) for i, name in enumerate("ab")}
    stepper = Stepper(model, optimizers, precision="fp32", observe=False)
    meters, found = Meters(stepper, every=3), []
    for step in range(20):
        meters.before()
        report = stepper.step(lambda m, x: dict.fromkeys("ab", mse(m, x)), torch.ones(4, 8), only="ab"[step % 2])
        found += meters.after(report)
    assert found == []
    assert meters.readings["without_gradient"] == 0


@pytest.mark.wording
def test_a_loss_scale_that_falls_after_the_warm_up_is_told() -> None:
    grown = [1.0]
    stepper = make(plain_model(), rate=1e-9, precision="fp16", loss_scale=DynamicScale(init_scale=2.0**10))

    def each(step: int) -> None:
        grown[0] = 2.0 ** max(0, (step - 80) // 10)

    found, meters = watch(stepper, 600, lambda m, x: mse(m, x) * grown[0], every=10, each=each)
    ((step, finding),) = named(found, "loss-scale-falls")
    assert step > 80
    assert "fell from 1024 at attempt" in finding.evidence
    assert meters.readings["loss_scale_bits"] == 0.0, "it has been at its floor for long"


def test_the_search_for_a_loss_scale_is_no_alarm() -> None:
    stepper = make(plain_model(), rate=1e-9, precision="fp16", loss_scale=DynamicScale(init_scale=2.0**24))
    found, _ = watch(stepper, 120, lambda m, x: mse(m, x) * 1e4, every=10)
    assert stepper.counts.skipped["gradient_overflow"] > 5
    assert found == []


@pytest.mark.wording
def test_steps_that_are_skipped_all_the_time_are_told() -> None:
    bad = [1.0]

    def each(step: int) -> None:
        bad[0] = math.nan if step % 10 == 5 else 1.0

    found, meters = watch(make(plain_model()), 120, lambda m, x: mse(m, x) * bad[0], every=50, each=each)
    ((_, finding),) = named(found, "steps-skipped")
    assert finding.evidence.endswith("loss_not_finite")
    assert meters.readings["skip_rate"] == pytest.approx(0.1)


def test_one_bad_batch_is_no_alarm() -> None:
    bad = [1.0]

    def each(step: int) -> None:
        bad[0] = math.nan if step == 5 else 1.0

    found, _ = watch(make(plain_model()), 60, lambda m, x: mse(m, x) * bad[0], every=50, each=each)
    assert found == []


# -- what is looked at ---------------------------------------------------------------------------------------------


def test_of_a_large_tensor_the_first_rows_are_looked_at_and_nothing_is_copied() -> None:
    large = torch.zeros(4096, 1024)
    part = view_local_part(large)
    assert part.numel() == ELEMENTS
    assert part.data_ptr() == large.data_ptr()
    assert view_local_part(torch.zeros(2, 2 * ELEMENTS)).shape == (1, 2 * ELEMENTS)
    assert view_local_part(torch.zeros(0, 3)).numel() == 0
    last = torch.zeros(64, 64, 32, 32).to(memory_format=torch.channels_last)
    assert view_local_part(last).data_ptr() == last.data_ptr()


def test_all_have_their_turn() -> None:
    names = list(range(20))
    assert select_next_turn(names, 5, 30) == names
    assert set().union(*(select_next_turn(names, turn, 8) for turn in range(5))) == set(names)
    assert all(len(select_next_turn(names, turn, 8)) == 8 for turn in range(7))
    assert select_next_turn([], 3, 1) == []
