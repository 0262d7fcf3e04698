"""Gradient clipping, moved over from an fp32 loop as it stood."""

from __future__ import annotations

import torch
from torch import nn

from zoo.outcome import Outcome


def run() -> Outcome:
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(64, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x) - 5).square().mean()
    scaler.scale(loss).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]).norm().item()
    return Outcome(
        good=moved > 0.1,
        seen=f"gradient norm reported as {norm.item():.2g}; with clipping to 1.0 the weights moved by {moved:.1e}",
    )
