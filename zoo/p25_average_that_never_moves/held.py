"""The average rides on the step, and is fp32 whatever the model computes in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome
from zoo.p25_average_that_never_moves.plain import DECAY, STEPS


def run() -> Outcome:
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 1.0)
    ema = halfstep.Ema(model, DECAY)
    nn.init.constant_(model.weight, 2.0)
    # A learning rate of zero keeps the weights at 2, where the right answer is known.
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), precision="bf16", ema=ema)
    for _ in range(STEPS):
        stepper.step(loss_fn, torch.ones(1, 4))
    average = ema.averages()["weight"]
    right = 2 - DECAY**STEPS
    return Outcome(
        good=abs(average.mean().item() - right) < 0.001 and average.dtype is torch.float32,
        seen=f"{STEPS} updates from 1 towards 2: {average.mean().item():.3f}, by arithmetic {right:.3f}",
    )


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().mean()
