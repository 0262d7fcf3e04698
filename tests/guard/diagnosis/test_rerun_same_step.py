"""A rerun is the step that failed: its optimizers, its counts, its batch and its random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep import Stepper, Window
from halfstep.guard.diagnosis.diagnose import diagnose_attempt
from halfstep.guard.verdict import Verdict
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.experiment.rerun import ReplayConfig, RerunResult, rerun_step
from halfstep.step.loss import DynamicScale
from halfstep.step.report import StepReport
from tests.support.models import plain_model

FP32 = resolve_precision_name("fp32")


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def stepper_of(model: nn.Module, precision: str = "fp32", optimizers: Any = None, scale: float = 2.0**16) -> Stepper:
    chosen = optimizers or torch.optim.SGD(model.parameters(), 0.0)
    loss_scale: Any = None
    if precision == "fp16":
        names = chosen if isinstance(chosen, dict) else ()
        loss_scale = {name: DynamicScale(init_scale=scale) for name in names} or DynamicScale(init_scale=scale)
    return Stepper(model, chosen, precision=resolve_precision_name(precision), loss_scale=loss_scale, observe=False)


def verdict_on(stepper: Stepper, loss_fn: Callable[..., Any], batch: Any, only: str | None = None) -> Verdict:
    report = stepper.step(loss_fn, batch, only=only)
    assert report.reason is not None
    assert stepper.attempt is not None
    return diagnose_attempt(stepper.model, stepper.attempt, precision=stepper.precision, reason=report.reason)


def both(stepper: Stepper, loss_fn: Callable[..., Any], batch: Any) -> tuple[StepReport, RerunResult]:
    report = stepper.step(loss_fn, batch)
    assert stepper.attempt is not None
    return report, rerun_step(stepper.model, stepper.attempt, ReplayConfig(stepper.precision))


# -- optimizers ----------------------------------------------------------------------------------------------------


def two() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})


def for_each(model: nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.SGD(part.parameters(), 0.0) for name, part in model.items()}


def against_each_other(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Summed, the gradients of the second one are nothing at all."""
    fooled = model["d"](model["g"](x)).float().mean()
    return {"g": -50 * fooled, "d": 50 * fooled}


def test_each_loss_goes_to_the_parameters_of_its_own_optimizer() -> None:
    model = two()
    report, again = both(stepper_of(model, optimizers=for_each(model)), against_each_other, torch.rand(4, 4))
    assert report.applied
    assert again.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)
    assert again.loss == pytest.approx(report.loss, abs=1e-5)


def test_a_warm_up_of_two_optimizers_is_a_warm_up() -> None:
    model = two()
    stepper = stepper_of(model, "fp16", for_each(model))
    assert verdict_on(stepper, against_each_other, torch.rand(4, 4) * 60).cause == "warm_up"


def test_gradients_of_another_optimizer_are_not_looked_at() -> None:
    """The root of 0 has an infinite gradient, which is no part of this step."""
    model = two()
    model["d"].register_parameter("zero", nn.Parameter(torch.zeros(1)))

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return model["d"](model["g"](x)).float().mean() + model["d"].zero.sqrt().sum()

    found = verdict_on(
        stepper_of(model, "fp16", for_each(model), scale=2.0**24), loss_fn, torch.rand(4, 4) * 60, only="g"
    )
    assert found.cause == "warm_up"


def test_gradients_of_parameters_that_no_optimizer_has_are_not_looked_at() -> None:
    class Stray(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.zero = nn.Linear(4, 1), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.zero.sqrt()

    model = Stray()
    optimizer = torch.optim.SGD(model.inner.parameters(), 0.0)
    report, again = both(stepper_of(model, optimizers=optimizer), mse, torch.rand(4, 4))
    assert report.applied
    assert again.finite
    assert again.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)


def test_a_step_that_knows_nothing_of_optimizers_is_judged_by_all_that_the_model_trains() -> None:
    model = plain_model()
    stepper = stepper_of(model)
    report = stepper.step(mse, torch.randn(6, 8))
    assert stepper.attempt is not None
    again = rerun_step(model, stepper.attempt._replace(reaches=None), ReplayConfig(FP32))
    assert again.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)


# -- sums and counts -----------------------------------------------------------------------------------------------


def summed(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    out = model(x).float()
    return halfstep.Counted(out.square().sum(), out.numel())


def test_sums_are_divided_by_what_this_step_counted() -> None:
    stepper = stepper_of(plain_model())
    stepper.step(summed, torch.randn(1, 8))
    window = Window([torch.randn(500, 8), torch.randn(40, 8)])
    report, again = both(stepper, summed, window)
    assert again.loss == pytest.approx(report.loss, rel=1e-5)
    assert again.grad_norm == pytest.approx(report.grad_norm, rel=1e-4)


def test_a_first_step_of_micro_batches_with_other_counts() -> None:
    report, again = both(stepper_of(plain_model()), summed, Window([torch.randn(3, 8), torch.randn(400, 8)]))
    assert again.loss == pytest.approx(report.loss, rel=1e-5)
    assert again.grad_norm == pytest.approx(report.grad_norm, rel=1e-4)


def test_a_count_of_nothing_is_told_as_such() -> None:
    def nothing_counted(model: nn.Module, x: Tensor) -> halfstep.Counted:
        return halfstep.Counted(model(x).sum() * 0, 0)

    found = verdict_on(stepper_of(plain_model()), nothing_counted, torch.randn(2, 8))
    assert found.cause == "code"
    assert "counts no element" in found.sentence


# -- kinds of gradients --------------------------------------------------------------------------------------------


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    ids = torch.tensor([1, 1, 2])
    report, again = both(stepper_of(model), mse, ids)
    assert report.applied
    assert again.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)

    def blown_up(model: nn.Module, ids: Tensor) -> Tensor:
        return (model[0](ids) * 1e-30 / 0.0).sum() * 0 + (model[0](ids) * 0).sqrt().sum()  # type: ignore[index]

    found = verdict_on(stepper_of(model), blown_up, ids)
    assert found.cause == "code"
    assert found.culprit is not None
    assert found.culprit.operation == "aten.div"


def test_complex_parameters_have_a_norm() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.fft.fft(x) @ self.weight).abs()

    report, again = both(stepper_of(Complex()), mse, torch.rand(3, 4))
    assert again.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)
