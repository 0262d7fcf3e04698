"""A new head, put in after the optimizer was built."""

from __future__ import annotations

import torch
from torch import nn

from zoo.outcome import Outcome


def make_model() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 10))
    optimizer = torch.optim.AdamW(model[2].parameters())
    model[2] = nn.Linear(8, 3)
    return model, optimizer


def run() -> Outcome:
    model, optimizer = make_model()
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    message = "nothing was raised"
    try:
        scaler.step(optimizer)
    except AssertionError as error:
        message = f"AssertionError: {error}"
    return Outcome(good="parameter" in message, seen=message)
