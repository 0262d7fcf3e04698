"""The same loss as an island: its inputs are fp32 wherever it is called."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome
from zoo.p20_dice_sum_overflows.plain import SIDE, dice_loss

safe_dice_loss = halfstep.island(dice_loss)


def run() -> Outcome:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16")
    report = stepper.step(loss_fn, torch.rand(SIDE * SIDE, 3))
    return Outcome(
        good=report.applied and 0 < report.loss < 1,
        seen=f"loss {report.loss:.3f} over {SIDE} x {SIDE} pixels, step applied: {report.applied}",
    )


def loss_fn(model: nn.Module, pixels: Tensor) -> Tensor:
    logits = model(pixels)
    return safe_dice_loss(logits, torch.ones_like(logits))
