"""Autograd functions of a person's own, a model round one of them, and what a first step finds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd

from halfstep import Stepper
from halfstep.finding import Finding
from halfstep.observe.lint.functions import ID
from halfstep.precision.precision import resolve_precision_name


class Bare(torch.autograd.Function):
    """Right in fp32. Under autocast its product is narrow, and the weight that it saved is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        wide = gradients[0].float()
        return wide @ weight, wide.t() @ x.float()


class Wide(Bare):
    forward = staticmethod(custom_fwd(Bare.forward, device_type="cpu", cast_inputs=torch.float32))
    backward = staticmethod(custom_bwd(Bare.backward, device_type="cpu"))


class AsTheRun(Bare):
    forward = staticmethod(custom_fwd(Bare.forward, device_type="cpu"))
    backward = staticmethod(custom_bwd(Bare.backward, device_type="cpu"))


class Layer(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def between(layer: nn.Module) -> nn.Sequential:
    """Among so much other work that the formats of its products decide nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 512), nn.Linear(512, 8))


def mse(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def stepper(model: nn.Module, precision: str = "bf16", **options: Any) -> Stepper:
    return Stepper(
        model, torch.optim.SGD(model.parameters(), 0.1), precision=resolve_precision_name(precision), **options
    )


def found(model: nn.Module, precision: str = "bf16", batch: Any = None) -> list[Finding]:
    """By a first step."""
    ours = stepper(model, precision)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"warning {ID}")
        assert ours.step(mse, torch.randn(4, 8) if batch is None else batch).applied
    return [finding for finding in ours.findings if finding.id == ID]
