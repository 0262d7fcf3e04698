"""A failed step run again: the same numbers, and nothing changed afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import Stepper, Window
from halfstep.observe.recorder import OUTSIDE, has_compiled_code
from halfstep.precision.island import find_islands
from halfstep.precision.precision import resolve_precision_name
from halfstep.step.experiment.rerun import ReplayConfig, RerunResult, rerun_step
from halfstep.step.loss import DynamicScale
from halfstep.step.report import StepReport
from halfstep.step.step_inputs import StepInputs
from tests.support.digest import digest_of
from tests.support.models import Coder, buffered_model, plain_model

FP32, FP16, BF16 = (resolve_precision_name(name) for name in ("fp32", "fp16", "bf16"))


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def stepped(
    model: nn.Module, loss_fn: Callable[..., Any], batch: Any, precision: str = "fp32", scale: float = 1.0
) -> tuple[StepReport, StepInputs]:
    """One step, with a learning rate of 0: the weights stay what they were even where it is applied."""
    loss_scale = DynamicScale(init_scale=scale) if precision == "fp16" else None
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.0)
    stepper = Stepper(
        model, optimizer, precision=resolve_precision_name(precision), loss_scale=loss_scale, observe=False
    )
    report = stepper.step(loss_fn, batch)
    assert stepper.attempt is not None
    return report, stepper.attempt


def again(
    model: nn.Module, loss_fn: Callable[..., Any], batch: Any, precision: str = "fp32", **way: Any
) -> RerunResult:
    _, attempt = stepped(model, loss_fn, batch, precision)
    return rerun_step(model, attempt, ReplayConfig(resolve_precision_name(precision), **way))


# -- the same step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_loss_and_norm_are_those_of_the_step(precision: str) -> None:
    model = nn.Sequential(plain_model(), nn.Dropout(0.5))
    report, attempt = stepped(model, mse, torch.randn(6, 8), precision, scale=8.0)
    torch.randn(100)  # other random numbers were drawn since
    found = rerun_step(model, attempt, ReplayConfig(resolve_precision_name(precision)))
    assert found.finite
    assert (found.origin, found.bad_parameters) == (None, ())
    assert found.loss == pytest.approx(report.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(report.grad_norm, rel=1e-3)


def test_micro_batches_are_averaged_as_in_the_step() -> None:
    model = plain_model()
    report, attempt = stepped(model, mse, Window([torch.randn(4, 8) for _ in range(3)]))
    found = rerun_step(model, attempt, ReplayConfig(FP32))
    assert found.loss == pytest.approx(report.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_sums_with_their_counts(microbatches: int) -> None:
    def summed(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return halfstep.Counted(model(x).square().sum(), x.shape[0] * 4)

    model = plain_model()
    report, attempt = stepped(model, summed, Window([torch.randn(4, 8) for _ in range(microbatches)]))
    found = rerun_step(model, attempt, ReplayConfig(FP32))
    assert found.loss == pytest.approx(report.loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)


def test_losses_of_two_optimizers() -> None:
    model = Coder()
    optimizers = {
        "encoder": torch.optim.SGD(model.encoder.parameters(), 0.0),
        "decoder": torch.optim.SGD(model.decoder.parameters(), 0.0),
    }

    def losses(model: Any, x: Tensor) -> dict[str, Tensor]:
        code = model.encode(x)
        return {"encoder": code.square().mean(), "decoder": (model.decode(code.detach()) / 0).mean()}

    stepper = Stepper(model, optimizers, precision=FP32, observe=False)
    x = torch.randn(5, 4)
    assert stepper.step(losses, x).reason == "loss_not_finite"
    assert stepper.attempt is not None
    found = rerun_step(model, stepper.attempt, ReplayConfig(FP32))
    assert found.origin is not None
    assert (found.origin.name, found.origin.module) == ("aten.div", OUTSIDE)
    assert set(found.bad_parameters) == {"decoder.weight", "decoder.bias"}
    assert stepper.step(losses, x, only="encoder").applied
    assert rerun_step(model, stepper.attempt, ReplayConfig(FP32)).finite


# -- nothing changed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("islands_tried", [(), ("4",), ("1", "2")])
@pytest.mark.parametrize("precision", [FP32, BF16])
def test_weights_buffers_gradients_and_random_numbers_stay(precision: Any, islands_tried: tuple[str, ...]) -> None:
    model = buffered_model()
    _, attempt = stepped(model, mse, torch.randn(6, 8))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    classes = [type(module) for module in model.modules()]
    before, state = digest_of((model.state_dict(), gradients)), torch.get_rng_state()
    rerun_step(model, attempt, ReplayConfig(precision, islands=islands_tried))
    assert digest_of((model.state_dict(), gradients)) == before
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(module) for module in model.modules()] == classes
    assert find_islands(model) == {}


def test_nothing_stays_of_a_rerun_that_raises() -> None:
    model, calls = buffered_model(), []

    def twice_is_too_often(model: nn.Module, x: Tensor) -> Tensor:
        loss = mse(model, x)
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("once only")
        return loss

    _, attempt = stepped(model, twice_is_too_often, torch.randn(6, 8))
    before, state = digest_of(model.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match="once only"):
        rerun_step(model, attempt, ReplayConfig(BF16, islands=("4",)))
    assert digest_of(model.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert find_islands(model) == {}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_weights_are_stored_as_before() -> None:
    model = nn.Sequential(nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(False), nn.Linear(8, 4))
    _, attempt = stepped(model, mse, torch.randn(6, 8), "bf16")
    stored = model[0].weight.data_ptr()
    assert rerun_step(model, attempt, ReplayConfig(BF16, islands=("0",))).finite
    assert model[0].weight.dtype is torch.bfloat16
    assert model[0].weight.data_ptr() == stored


# -- what made it fail ---------------------------------------------------------------------------------------------


class Bad(nn.Module):
    """Divides by zero: forward, or only in backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, h: Tensor) -> Tensor:
        return h / torch.zeros_like(h) if self.where == "forward" else (h * 0).sqrt() + h


class Again(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def failing(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 4))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again(where: str, reentrant: bool) -> None:
    found = again(failing(Again(Bad(where), reentrant)), mse, torch.randn(3, 8))
    assert not found.finite
    assert found.origin is not None
    assert (found.origin.name, found.origin.module) == ("aten.div", "1.inner")
    assert found.origin.backward is (where == "backward")
    assert found.origin.line is not None
    assert found.origin.line.endswith(f"test_rerun.py:{Bad.forward.__code__.co_firstlineno + 1}")


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, spoil: bool) -> Tensor:
        return h / (0.0 if spoil else 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / 0.0, None


class Own(nn.Module):
    def __init__(self, spoil: bool) -> None:
        super().__init__()
        self.spoil = spoil

    def forward(self, h: Tensor) -> Tensor:
        return _Own.apply(h, self.spoil)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(("spoil", "written"), [(True, _Own.forward), (False, _Own.backward)])
def test_a_function_with_a_backward_of_its_own(spoil: bool, written: Callable[..., Any]) -> None:
    found = again(failing(Own(spoil)), mse, torch.randn(3, 8))
    assert found.origin is not None
    assert (found.origin.name, found.origin.module, found.origin.backward) == ("aten.div", "1", not spoil)
    assert found.origin.line is not None
    assert found.origin.line.endswith(f"test_rerun.py:{written.__code__.co_firstlineno + 2}")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by Dynamo itself, which means to ignore it
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_are_run_as_they_are_written(whole: bool) -> None:
    torch._dynamo.reset()
    plain = failing(Bad("forward"))
    assert not has_compiled_code(plain)
    if whole:
        model: Any = torch.compile(plain, backend="eager")
    else:
        model = plain
        model[1].compile(backend="eager")
    assert has_compiled_code(model)
    found = again(model, mse, torch.randn(3, 8))
    assert found.origin is not None
    assert (found.origin.name, found.origin.module) == ("aten.div", "1")
    hidden = again(model, mse, torch.randn(3, 8), compiled=True)
    assert not hidden.finite
    assert hidden.origin is None
    assert hidden.bad_parameters[0] == "0.weight"


def test_complex_and_one_byte_numbers() -> None:
    class Mixed(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(h.float())
            coarse = h.to(torch.float8_e4m3fn).to(h.dtype)
            return torch.fft.irfft(spectrum).to(h.dtype) + coarse

    assert again(failing(Mixed()), mse, torch.randn(3, 8), "bf16").finite


def test_the_scale_may_be_another() -> None:
    model = plain_model()
    report, attempt = stepped(model, mse, torch.randn(6, 8) * 10, "fp16", scale=2.0**24)
    assert report.reason == "gradient_overflow"
    at_scale, without = (
        rerun_step(model, attempt, ReplayConfig(FP16)),
        rerun_step(model, attempt, ReplayConfig(FP16, scale=1.0)),
    )
    assert not at_scale.finite
    assert at_scale.origin is not None
    assert at_scale.origin.backward
    assert without.finite
    assert at_scale.loss == without.loss == pytest.approx(report.loss)
