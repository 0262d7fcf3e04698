"""The same mistake is refused before anything moves; without it, the loss falls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome


def run() -> Outcome:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.05), precision="bf16")
    x = torch.randn(64, 8)
    before = model.weight.detach().clone()
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stepper.step(loss_fn, x)
        message = ""
    except halfstep.HalfstepError as error:
        message = error.given
    refused_in_time = "inside torch.autocast" in message and torch.equal(before, model.weight)
    losses = [stepper.step(loss_fn, x).loss for _ in range(20)]
    return Outcome(
        good=refused_in_time and losses[-1] < 0.5 * losses[0],
        seen=f"refused: {message}; outside it, loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step 20",
    )


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
