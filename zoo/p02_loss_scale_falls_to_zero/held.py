"""The same data; and once more with losses that are finite while their gradients are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome

CLEAN = torch.full((8, 4), 0.1)


def run() -> Outcome:
    scale_after_losses, learned_after_losses = train([CLEAN * math.nan] * 200 + [CLEAN], loss_fn)
    scale_after_gradients, learned_after_gradients = train([CLEAN * 0] * 200 + [CLEAN], loss_with_nan_gradient_at_zero)
    return Outcome(
        good=learned_after_losses
        and learned_after_gradients
        and (scale_after_losses, scale_after_gradients) == (65536, 1),
        seen=f"scale {scale_after_losses:g} after 200 NaN losses, {scale_after_gradients:g} after 200 NaN gradients; "
        f"weights finite and moved by the next clean batch: {learned_after_losses and learned_after_gradients}",
    )


def train(batches: list[Tensor], loss: Callable[[nn.Module, Tensor], Tensor]) -> tuple[float, bool]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16")
    before = model.weight.detach().clone()
    reports = [stepper.step(loss, batch) for batch in batches]
    learned = bool(model.weight.isfinite().all()) and not torch.equal(before, model.weight)
    return reports[-1].loss_scale, learned


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def loss_with_nan_gradient_at_zero(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum().sqrt()
