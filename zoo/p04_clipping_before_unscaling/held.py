"""Clipping belongs to the step, which knows when gradients have their true size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome


def run() -> Outcome:
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stepper = halfstep.Stepper(
        model, optimizer, precision="fp16", clip_norm=1.0, loss_scale=halfstep.DynamicScale(init_scale=1024.0)
    )
    before = [p.detach().clone() for p in model.parameters()]
    report = stepper.step(loss_fn, torch.randn(64, 16))
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]).norm().item()
    return Outcome(
        good=abs(moved - 1.0) < 1e-3,
        seen=f"gradient norm reported as {report.grad_norm:.2g}; with clipping to 1.0 the weights moved by {moved:.3f}",
    )


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 5).square().mean()
