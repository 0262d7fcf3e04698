"""The schedule rides on the step: it moves when weights move."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome

TOO_LARGE = torch.full((8, 4), 100.0)


def run() -> Outcome:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)
    stepper = halfstep.Stepper(model, optimizer, precision="fp16", schedule=schedule)
    before = model.weight.detach().clone()
    reports = [stepper.step(loss_fn, TOO_LARGE) for _ in range(4)]
    unchanged = torch.equal(before, model.weight)
    rate = schedule.get_last_lr()[0]
    skips = sum(not report.applied for report in reports)
    return Outcome(
        good=unchanged and rate == 1.0 and skips == 4 and not optimizer.state,
        seen=f"4 steps, weights changed: {not unchanged}, learning rate 1.0 -> {rate:.1f}; "
        f"{skips} reported as {reports[-1].reason}",
    )


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - 1e4).square().mean()
