"""Plain torch, with the schedule stepped once a batch as the tutorials do."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from zoo.outcome import Outcome
from zoo.p05_skipped_steps_advance_the_schedule.plain import TOO_LARGE


def run() -> Outcome:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)
    before = model.weight.detach().clone()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(TOO_LARGE).float() - 1e4).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
    unchanged = torch.equal(before, model.weight)
    rate = schedule.get_last_lr()[0]
    return Outcome(
        good=unchanged == (rate == 1.0),
        seen=f"4 steps, weights changed: {not unchanged}, learning rate 1.0 -> {rate:.1f}; "
        f"warned: {str(warned[0].message).split('. ')[0] if warned else 'nothing'}",
        word="learning rate advanced",
    )
