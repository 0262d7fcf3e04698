"""Our loss scale is torch's between floor and cap, and survives what torch's does not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from halfstep import DynamicScale, StaticScale, Stepper
from halfstep.errors import StateMismatch, WrongUse
from halfstep.step.loss import NoScale
from tests.support.models import plain_model


def torch_trace(bad: list[bool], knobs: dict[str, Any]) -> list[tuple[float, int]]:
    """Scale and growth tracker of the stock scaler after each step."""
    scaler = torch.amp.GradScaler("cpu", **knobs)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.0)
    trace = []
    for overflow in bad:
        scaler.scale(weight.sum())
        weight.grad = torch.full((2,), float("inf") if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        trace.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    return trace


@pytest.mark.parametrize("traces", [150, pytest.param(1000, marks=pytest.mark.full)])
def test_equal_to_torch_on_many_traces_until_torch_leaves_the_bounds(traces: int) -> None:
    dice = random.Random(20)
    compared = left = 0
    for _ in range(traces):
        knobs = {
            "init_scale": 2.0 ** dice.randint(0, 24),
            "growth_factor": dice.choice([2.0, 1.5, 3.7]),
            "backoff_factor": dice.choice([0.5, 0.25, 0.7]),
            "growth_interval": dice.choice([1, 3, 5, 20]),
        }
        rate = dice.choice([0.05, 0.3, 0.6, 0.9])
        bad = [dice.random() < rate for _ in range(80)]
        ours = DynamicScale(**knobs)
        for overflow, (scale, tracker) in zip(bad, torch_trace(bad, knobs), strict=True):
            if not ours.floor <= scale <= ours.cap:
                left += 1
                break
            ours.update(overflow=overflow)
            assert (ours.value, ours.growth_tracker) == (scale, tracker), knobs
            compared += 1
    assert compared > 20 * traces
    assert left > traces / 10


def whole_steps(bad: list[bool]) -> list[float]:
    """The scale that a Stepper shows, driven by real gradients."""
    model = nn.Linear(2, 1, bias=False)
    scale = DynamicScale(growth_interval=3)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.0), precision="fp16", loss_scale=scale)
    armed = [False]
    model.weight.register_hook(lambda g: g + float("inf") if armed[0] else g)

    def loss(m: nn.Module, overflow: bool) -> Tensor:
        armed[0] = overflow
        return m(torch.ones(1, 2)).float().sum() * 1e-6

    seen = []
    for overflow in bad:
        stepper.step(loss, overflow)
        seen.append(scale.value)
    return seen


def test_the_stepper_drives_it_as_the_stock_scaler_is_driven() -> None:
    dice = random.Random(3)
    for _ in range(10):
        bad = [dice.random() < 0.3 for _ in range(40)]
        expected = [scale for scale, _ in torch_trace(bad, {"growth_interval": 3})]
        assert max(expected) <= 2.0**24
        assert whole_steps(bad) == expected


def test_stock_scaler_ends_in_nan_weights_where_ours_goes_on() -> None:
    def run_stock() -> Tensor:
        model = plain_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        for batch in range(203):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean() * (float("nan") if batch < 200 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return model[0].weight.detach()

    assert torch.isnan(run_stock()).any()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_200_nan_batches_then_clean_ones_leave_finite_weights_that_move(precision: str) -> None:
    model = plain_model()
    start = model[0].weight.detach().clone()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision)

    def step(factor: float) -> bool:
        return stepper.step(lambda m, x: m(x).float().square().mean() * factor, torch.randn(4, 8)).applied

    assert not any(step(float("nan")) for _ in range(200))
    assert torch.equal(model[0].weight, start)
    assert all(step(1.0) for _ in range(3))
    assert torch.isfinite(model[0].weight).all()
    assert not torch.equal(model[0].weight, start)


def test_200_overflowing_batches_then_clean_ones() -> None:
    model = plain_model()
    start = model[0].weight.detach().clone()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision="fp16")
    bad = [True]
    model[0].weight.register_hook(lambda g: g * float("inf") if bad[0] else g)
    for _ in range(200):
        assert not stepper.step(lambda m, x: m(x).float().square().mean(), torch.randn(4, 8)).applied
    bad[0] = False
    assert stepper.step(lambda m, x: m(x).float().square().mean(), torch.randn(4, 8)).applied
    assert torch.isfinite(model[0].weight).all()
    assert not torch.equal(model[0].weight, start)


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 8),
    st.floats(0.01, 0.99),
    st.floats(1.01, 64.0),
)
@settings(deadline=None, max_examples=200)
def test_never_leaves_the_bounds(bad: list[bool], interval: int, backoff: float, growth: float) -> None:
    scale = DynamicScale(growth_interval=interval, backoff_factor=backoff, growth_factor=growth, floor=0.5, cap=2.0**20)
    for overflow in bad:
        scale.update(overflow=overflow)
        assert 0.5 <= scale.value <= 2.0**20


def test_reads_and_writes_torchs_state() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    scaler.scale(torch.ones(()))
    ours = DynamicScale(floor=2.0)
    ours.load_state_dict(scaler.state_dict())
    assert (ours.value, ours.growth_interval, ours.floor) == (1024.0, 7, 2.0)
    ours.update(overflow=True)
    scaler.load_state_dict({k: v for k, v in ours.state_dict().items() if k not in ("floor", "cap")})
    assert scaler.get_scale() == 512.0
    again = DynamicScale()
    again.load_state_dict(ours.state_dict())
    assert vars(again) == vars(ours)


@pytest.mark.wording
def test_refuses_the_state_of_a_disabled_scaler_and_a_scale_of_another_kind() -> None:
    with pytest.raises(StateMismatch, match="disabled"):
        DynamicScale().load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    with pytest.raises(StateMismatch, match="this run has none"):
        NoScale().load_state_dict(DynamicScale().state_dict())
    with pytest.raises(StateMismatch, match="nan"):
        DynamicScale().load_state_dict({**DynamicScale().state_dict(), "scale": float("nan")})


def test_a_scale_that_torch_let_fall_to_zero_is_raised_to_the_floor() -> None:
    scale = DynamicScale()
    scale.load_state_dict({**DynamicScale().state_dict(), "scale": 0.0})
    assert scale.value == 1.0


@pytest.mark.parametrize(
    "knobs",
    [
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"init_scale": 0.0},
        {"init_scale": float("inf")},
        {"floor": 2.0**17},
        {"cap": 2.0},
    ],
)
def test_nonsense_is_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(WrongUse):
        DynamicScale(**knobs)


def test_a_static_scale_skips_and_stays() -> None:
    model = plain_model()
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), 0.1), precision="fp16", loss_scale=StaticScale(2.0**40)
    )
    report = stepper.step(lambda m, x: m(x).float().square().mean() * 1e4, torch.randn(4, 8))
    assert (report.reason, report.loss_scale) == ("gradient_overflow", 2.0**40)
    assert stepper.state_dict()["losses"]["loss"]["loss_scale"] == {"scale": 2.0**40}


@pytest.mark.wording
@pytest.mark.parametrize(
    ("precision", "scale"), [("bf16", DynamicScale()), ("fp32", StaticScale(8.0)), ("fp16", NoScale())]
)
def test_a_scale_in_the_wrong_precision_is_refused(precision: str, scale: Any) -> None:
    model = plain_model()
    with pytest.raises(WrongUse, match="with fp16, and only there"):
        Stepper(model, torch.optim.SGD(model.parameters(), 0.1), precision=precision, loss_scale=scale)
