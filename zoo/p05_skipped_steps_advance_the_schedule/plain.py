"""accelerate with a fused optimizer, whose kernel decides by itself to skip (fp16 on a CPU: see the README)."""

from __future__ import annotations

import torch
from torch import nn

from zoo.outcome import Outcome
from zoo.real_accelerate import accelerator_with_fp16

TOO_LARGE = torch.full((8, 4), 100.0)


def run() -> Outcome:
    accelerator = accelerator_with_fp16()
    torch.manual_seed(0)
    linear = nn.Linear(4, 1)
    adamw = torch.optim.AdamW(linear.parameters(), lr=1.0, fused=True)
    decay = torch.optim.lr_scheduler.LinearLR(adamw, 1.0, 0.0, total_iters=10)
    model, optimizer, schedule = accelerator.prepare(linear, adamw, decay)
    before = linear.weight.detach().clone()
    skips_admitted = 0
    for _ in range(4):
        optimizer.zero_grad()
        accelerator.backward((model(TOO_LARGE) - 1e4).square().mean())
        optimizer.step()
        schedule.step()
        skips_admitted += accelerator.optimizer_step_was_skipped
    unchanged = torch.equal(before, linear.weight)
    rate = schedule.get_last_lr()[0]
    return Outcome(
        good=unchanged == (rate == 1.0),
        seen=f"4 steps, weights changed: {not unchanged}, learning rate 1.0 -> {rate:.1f}; "
        f"accelerate admits {skips_admitted} skips",
        word="learning rate advanced",
    )
