"""States of other runs, evaluation, what a Stepper says of itself, and a callable that edits gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import Counted, DynamicScale, Ema, Stepper, Window
from halfstep.errors import StateMismatch, WrongUse
from tests.support.digest import digest_of, digest_of_run

L = torch.optim.lr_scheduler


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def make(optimizer: Any = momentum, schedule: Any = None, **options: Any) -> Stepper:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    own = optimizer(model.parameters())
    given = schedule(own) if schedule else None
    return Stepper(model, own, **{"precision": "fp32", "schedule": given, **options})


# -- states --------------------------------------------------------------------------------------------------------


@pytest.mark.wording
@pytest.mark.parametrize(
    ("saved", "ours"), [(adamw, momentum), (momentum, adamw), (adam, adamw), (adamw, torch.optim.Adagrad)]
)
@pytest.mark.parametrize("steps", [0, 1])
def test_the_state_of_another_optimizer_is_refused_before_anything_changes(saved: Any, ours: Any, steps: int) -> None:
    one, two = make(saved), make(ours)
    for _ in range(steps):
        one.step(square, torch.randn(4, 8))
    before = digest_of_run(two)
    with pytest.raises(StateMismatch, match="was saved as"):
        two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert digest_of_run(two) == before
    assert two.step(square, torch.randn(4, 8)).applied


@pytest.mark.wording
@pytest.mark.parametrize(
    ("saved", "ours"),
    [
        (lambda o: L.StepLR(o, 2), lambda o: L.CosineAnnealingLR(o, 10)),
        (lambda o: L.CosineAnnealingLR(o, 10), lambda o: L.OneCycleLR(o, 0.1, 10)),
        (None, lambda o: L.StepLR(o, 2)),
        (lambda o: L.StepLR(o, 2), None),
    ],
)
def test_the_state_of_another_schedule_is_refused_before_anything_changes(saved: Any, ours: Any) -> None:
    one, two = make(schedule=saved), make(schedule=ours)
    one.step(square, torch.randn(4, 8))
    before = digest_of_run(two)
    with pytest.raises(StateMismatch, match="schedule"):
        two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert digest_of_run(two) == before


@pytest.mark.wording
def test_the_state_of_another_precision_is_refused_before_anything_changes() -> None:
    one, two = make(precision="fp16", loss_scale=DynamicScale(init_scale=8.0)), make(precision="bf16")
    before = digest_of_run(two)
    with pytest.raises(StateMismatch, match="precision"):
        two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert digest_of_run(two) == before


@pytest.mark.wording
def test_options_of_another_optimizer_are_refused() -> None:
    state = copy.deepcopy(make().state_dict())
    state["optimizers"]["loss"]["optimizer"]["param_groups"][0]["betas"] = (0.9, 0.99)
    stepper = make()
    before = digest_of_run(stepper)
    with pytest.raises(StateMismatch, match="options betas"):
        stepper.load_state_dict(state)
    assert digest_of_run(stepper) == before


# -- evaluating ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluating_is_the_models_own_eval_in_the_precision_of_the_run(precision: str) -> None:
    stepper = make(precision=precision)
    stepper.step(square, torch.randn(4, 8))
    stepper.model[2].eval()  # a norm that somebody froze stays so
    x = torch.randn(4, 8)
    before = digest_of_run(stepper)
    with stepper.evaluating() as model:
        out = model(x)
        assert not torch.is_grad_enabled()
        assert model is stepper.model
    assert digest_of_run(stepper) == before
    assert [m.training for m in stepper.model.modules()] == [True, True, True, False, True]
    assert not torch.is_autocast_enabled("cpu")
    reference = copy.deepcopy(stepper.model).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        assert torch.equal(out, reference(x))


def test_evaluating_with_the_average_wears_it_and_takes_it_off() -> None:
    stepper = make()
    stepper = make_with_average()
    for _ in range(3):
        stepper.step(square, torch.randn(4, 8))
    own = stepper.model[0].weight.detach().clone()
    with stepper.evaluating(ema=True) as model:
        assert torch.equal(model[0].weight, stepper.ema.averages()["0.weight"])
    assert torch.equal(stepper.model[0].weight, own)
    with pytest.raises(ZeroDivisionError), stepper.evaluating(ema=True):
        raise ZeroDivisionError
    assert torch.equal(stepper.model[0].weight, own)


def make_with_average() -> Stepper:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    return Stepper(model, momentum(model.parameters()), precision="fp32", ema=Ema(model, 0.5))


@pytest.mark.wording
def test_evaluating_needs_an_average_and_no_open_window() -> None:
    stepper = make()
    with pytest.raises(WrongUse, match="without an average"), stepper.evaluating(ema=True):
        pass
    with stepper.forward():
        square(stepper.model, torch.randn(4, 8))
    with pytest.raises(WrongUse, match="open window"), stepper.evaluating():
        pass


# -- words ---------------------------------------------------------------------------------------------------------


def test_a_stepper_and_its_counts_say_what_they_are() -> None:
    stepper = make()
    stepper.step(square, torch.randn(4, 8))
    stepper.step(square, torch.full((4, 8), math.nan))
    assert repr(stepper.counts) == "Counts(2 attempted, 1 applied, 1 skipped (loss_not_finite 1))"
    assert repr(stepper) == (
        "Stepper(Sequential, loss=SGD, precision=fp32, device=cpu, "
        "Counts(2 attempted, 1 applied, 1 skipped (loss_not_finite 1)))"
    )


# -- a callable that edits gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_on_gradients_sees_them_unscaled(precision: str, counted: bool, microbatches: int) -> None:
    seen: list[float] = []

    def look(parameters: list[Tensor]) -> None:
        seen.append(math.hypot(*(p.grad.norm().item() for p in parameters)))

    def loss(model: nn.Module, x: Tensor) -> Any:
        out = model(x).float().square()
        return Counted(out.sum(), out.numel()) if counted else out.mean()

    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    scale = DynamicScale(init_scale=1024.0) if precision == "fp16" else None
    stepper = Stepper(
        model, momentum(model.parameters()), precision=precision, loss_scale=scale, on_gradients=look, clip_norm=1e-3
    )
    for _ in range(2):
        report = stepper.step(loss, Window(torch.randn(4, 8) for _ in range(microbatches)))
        assert report.applied
        assert seen[-1] == pytest.approx(report.grad_norm, rel=1e-5)


def test_what_on_gradients_edits_is_clipped_and_applied() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 2)

    def ones(parameters: list[Tensor]) -> None:
        for parameter in parameters:
            parameter.grad.fill_(1.0)

    before = [p.detach().clone() for p in model.parameters()]
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), 1.0), precision="fp32", on_gradients=ones)
    report = stepper.step(square, torch.randn(4, 8))
    assert report.grad_norm == pytest.approx(math.sqrt(18))
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 1.0)


def test_what_on_gradients_spoils_is_not_applied() -> None:
    stepper = make(on_gradients=lambda parameters: parameters[0].grad.fill_(math.inf))
    before = digest_of_run(stepper)
    assert stepper.step(square, torch.randn(4, 8)).reason == "gradient_not_finite"
    assert digest_of_run(stepper) == before


def test_an_error_in_on_gradients_abandons_the_window() -> None:
    def fails(parameters: list[Tensor]) -> None:
        raise ZeroDivisionError

    stepper = make(on_gradients=fails)
    before = digest_of_run(stepper), digest_of(stepper.counts.state_dict())
    with pytest.raises(ZeroDivisionError):
        stepper.step(square, torch.randn(4, 8))
    assert (digest_of_run(stepper), digest_of(stepper.counts.state_dict())) == before
