"""The same with accelerate, whose fp16 on a CPU is switched on by hand (see the README)."""

from __future__ import annotations

import torch
from torch import nn

from zoo.outcome import Outcome
from zoo.p02_loss_scale_falls_to_zero.plain import BATCHES
from zoo.real_accelerate import accelerator_with_fp16


def run() -> Outcome:
    accelerator = accelerator_with_fp16()
    torch.manual_seed(0)
    linear = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    for batch in BATCHES:
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
    ruined = not linear.weight.isfinite().all()
    return Outcome(
        good=not ruined,
        seen=f"scale {accelerator.scaler.get_scale()} after {len(BATCHES) - 1} NaN batches; "
        f"weights {'NaN' if ruined else 'finite'} after the next clean one",
        word="NaN weights",
    )
