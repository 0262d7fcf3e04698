"""A run under watch: what spoiled a step is named, and the run stops with good weights and one thing to type."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import Guardian, Stepper, Window
from halfstep.errors import Diverged, UnknownName
from halfstep.guard.monitors.monitors import Meters
from halfstep.guard.streak import Limits
from halfstep.guard.verdict import FailedStep, GuardEvent
from halfstep.step.loss import DynamicScale
from tests.support.combinations import one_per_value
from tests.support.digest import digest_of, digest_of_run
from tests.support.models import buffered_model, plain_model

TRUE = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


def fit(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x).float(), x @ TRUE)


def fit_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def nan(model: nn.Module, x: Tensor) -> Tensor:
    return fit(model, x) * float("nan")


def guarded(
    precision: str = "fp32", *, lr: float = 1e-3, mode: Any = "watch", model: nn.Module | None = None, **options: Any
) -> tuple[Guardian, list[GuardEvent]]:
    model = model or plain_model()
    told: list[GuardEvent] = []
    limits = options.pop("limits", Limits())
    record = options.pop("record", None)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr), precision=precision, observe=False, **options)
    return Guardian(stepper, mode=mode, tell=told.append, limits=limits, record=record), told


def until_given_up(guardian: Guardian, loss_fn: Any, batch: Callable[[], Any], most: int = 40) -> tuple[Diverged, int]:
    """What it said, and after how many steps."""
    for attempt in range(1, most + 1):
        try:
            guardian.step(loss_fn, batch())
        except Diverged as error:
            return error, attempt
    raise AssertionError(f"went on for {most} steps")


def batch() -> Tensor:
    return torch.randn(6, 8)


# -- a healthy run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["watch", "repair"])
def test_a_healthy_run_is_the_same_to_the_bit_and_nothing_is_said(mode: str) -> None:
    guardian, told = guarded("bf16", mode=mode, model=buffered_model())
    model = buffered_model()
    alone = Stepper(model, torch.optim.AdamW(model.parameters(), 1e-3), precision="bf16", observe=False)
    for seed in range(40):
        torch.manual_seed(seed)
        assert guardian.step(fit, batch()).applied
        torch.manual_seed(seed)
        alone.step(fit, batch())
    assert digest_of_run(guardian.stepper) == digest_of_run(alone)
    assert told == []
    assert not guardian.in_trouble


def test_with_meters_too_it_is_the_same_to_the_bit() -> None:
    guardian, told = guarded("bf16", model=buffered_model())
    metered, _ = guarded("bf16", model=buffered_model())
    meters = Meters(metered.stepper, every=5)
    metered = Guardian(metered.stepper, tell=told.append, meters=meters)
    for seed in range(20):
        for one in (guardian, metered):
            torch.manual_seed(seed)
            one.step(fit, batch())
    assert digest_of_run(guardian.stepper) == digest_of_run(metered.stepper)
    assert meters.readings
    assert {t.kind for t in told} <= {"alarm"}


def test_two_optimizers_in_turns_are_watched_each_by_itself() -> None:
    model = plain_model()
    first, second = torch.optim.SGD(model[0].parameters(), 1e-3), torch.optim.SGD(model[2].parameters(), 1e-3)
    told: list[GuardEvent] = []
    stepper = Stepper(model, {"a": first, "b": second}, precision="fp32", observe=False)
    guardian = Guardian(stepper, tell=told.append, limits=Limits(spikes="refuse"))

    def losses(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        return {"a": fit(model, x), "b": 1000.0 * fit(model, x)}

    for _ in range(30):
        for name in ("a", "b"):
            assert guardian.step(losses, batch(), only=name).applied
    report = guardian.step(lambda model, x: {"a": 1000.0 * fit(model, x)}, batch(), only="a")
    assert report.reason == "guard:spike"
    assert "the loss of a" in told[-1].text


@pytest.mark.wording
def test_a_wrong_mode_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownName, match="repair"):
        guarded(mode="repare")


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_bad_sample_is_named_once_and_the_run_goes_on() -> None:
    boxes: list[FailedStep] = []
    guardian, told = guarded(record=boxes.append)
    for step in range(20):
        x = batch()
        if step == 10:
            x[3, 2] = math.inf
        guardian.step(fit_batch, (x, x.nan_to_num(posinf=0.0) @ TRUE))
    assert [(t.kind, t.level, t.facts["cause"]) for t in told] == [("verdict", "warning", "data")]
    assert "sample 3" in told[0].text
    assert guardian.stepper.counts.applied == 19
    assert [(box.report.attempt, box.verdict.cause, len(box.history.losses)) for box in boxes] == [(11, "data", 10)]
    json.dumps([t.as_dict() for t in told])


def test_each_bad_batch_of_a_streak_is_looked_at_but_one_cause_only_once() -> None:
    guardian, told = guarded()
    guardian.step(fit, batch())
    for _ in range(4):
        guardian.step(nan, batch())
    assert guardian.state_dict()["diagnoser"]["diagnoses"] == 1
    assert [t.facts["cause"] for t in told] == ["code"]
    assert guardian.in_trouble


def test_the_replay_uses_the_function_that_counts_nothing() -> None:
    guardian, told = guarded()
    counted = []

    def counting(model: nn.Module, x: Tensor) -> Tensor:
        counted.append(1)
        return nan(model, x)

    guardian.step(counting, batch(), again=nan)
    assert len(counted) == 1
    assert told[0].kind == "verdict"


def test_a_diagnosis_leaves_the_run_as_it_was() -> None:
    guardian, _ = guarded("bf16", model=buffered_model())
    for _ in range(3):
        guardian.step(fit, batch())
    before, random = digest_of_run(guardian.stepper), torch.get_rng_state()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    guardian.step(nan, Window([x, x]))
    assert digest_of_run(guardian.stepper) == before
    assert torch.equal(torch.get_rng_state(), random)


# -- where it stops ----------------------------------------------------------------------------------------------------


@pytest.mark.wording
def test_five_in_a_row_end_the_run_with_its_weights_and_the_cause() -> None:
    guardian, told = guarded()
    for _ in range(3):
        guardian.step(fit, batch())
    weights = digest_of(dict(guardian.stepper.model.named_parameters()))
    error, after = until_given_up(guardian, nan, batch)
    assert after == 5
    assert error.exit_code == 80
    assert error.report.attempt == 8
    assert error.given.startswith("code: ")
    assert "every update from attempt 4 on was skipped" in error.given
    assert error.do
    assert error.verdict is not None
    assert error.verdict["cause"] == "code"
    assert digest_of(dict(guardian.stepper.model.named_parameters())) == weights
    assert (told[-1].kind, told[-1].level) == ("alarm", "error")


@pytest.mark.wording
def test_every_other_step_skipped_ends_it_too() -> None:
    guardian, _ = guarded()
    turns = itertools.cycle([nan, fit])
    error, after = until_given_up(guardian, lambda model, x: next(turns)(model, x), batch, most=100)
    assert "26 of the last 100 steps were skipped" in error.given
    assert after == 51


@pytest.mark.wording
def test_the_one_thing_to_type_is_the_cure_that_was_tried() -> None:
    guardian, _ = guarded("fp16", model=overflows_in_two())
    error, _ = until_given_up(guardian, fit, batch)
    assert error.given.startswith("precision: ")
    assert error.do == 'guard.mode=repair, or by hand: halfstep.island(model, "2") before the Stepper is built'


class Large(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        large = super().forward(x) * 1e6
        return (large - large.mean()) * 1e-6


def overflows_in_two() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Large(16, 4))


@pytest.mark.wording
@pytest.mark.parametrize("seed", range(10))
def test_a_scale_that_cannot_save_the_step_ends_it_in_time_and_names_the_module(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    torch.nn.init.normal_(model[2 * (seed % 3)].weight).data.mul_(1e6)
    guardian, _ = guarded("fp16", model=model, loss_scale=DynamicScale(init_scale=65536.0))
    error, after = until_given_up(guardian, fit, batch)
    assert after <= 17
    assert error.verdict is not None
    assert error.verdict["culprit"]["module"] == str(2 * (seed % 3))
    assert f"{2 * (seed % 3)} " in error.given


@pytest.mark.wording
def test_gradients_that_no_scale_makes_fit_are_not_waited_for_until_the_floor() -> None:
    guardian, _ = guarded("fp16", loss_scale=DynamicScale(init_scale=65536.0))
    error, after = until_given_up(guardian, lambda model, x: 1e9 * fit(model, x), batch)
    assert after == 7  # known at the third, and five in a row from there
    assert error.given.startswith("precision: ")
    assert guardian.stepper.counts.skipped == {"gradient_overflow": 7}


# -- loss scales that find their place ---------------------------------------------------------------------------------


def test_a_start_scale_that_is_far_too_high_is_told_once_and_forgiven() -> None:
    guardian, told = guarded("fp16", loss_scale=DynamicScale(init_scale=2.0**24, cap=2.0**24))

    def steep(model: nn.Module, x: Tensor) -> Tensor:
        return 1000.0 * fit(model, x)

    for _ in range(40):
        guardian.step(steep, batch())
    counts = guardian.stepper.counts
    assert counts.skipped["gradient_overflow"] >= 6
    assert counts.applied == 40 - counts.skipped["gradient_overflow"]
    assert [(t.level, t.facts["cause"]) for t in told] == [("info", "warm_up")]


# -- divergence --------------------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize(
    *one_per_value(
        guards=[("watch", "refuse"), ("repair", "refuse"), ("repair", "warn")],
        precision=["bf16", "fp32"],
        seed=range(10),
    )
)
def test_a_learning_rate_that_explodes_is_given_up_soon(guards: tuple[Any, Any], precision: str, seed: int) -> None:
    mode, spikes = guards
    torch.manual_seed(seed)
    guardian, _ = guarded(precision, mode=mode, model=plain_model(seed), limits=Limits(spikes=spikes))
    (optimizer,) = guardian.stepper.optimizers.values()
    onset = 30 + 3 * seed
    attempts = itertools.count(1)

    def batch_at_a_rate() -> Tensor:
        if next(attempts) >= onset:
            optimizer.param_groups[0]["lr"] = 1e-3 * 1e4
        return batch()

    error, attempt = until_given_up(guardian, fit, batch_at_a_rate, most=100)
    assert attempt - onset <= (20 if spikes == "refuse" else 25)
    assert error.do == "optimizer.lr=0.001"
    assert all(p.isfinite().all() for p in guardian.stepper.model.parameters())
    if mode == "repair":
        assert guardian.state_dict()["rollbacks"] == 2
        assert guardian.stepper.counts.applied < onset
