"""`model.half()` and Adam with its defaults."""

from __future__ import annotations

import torch
from torch import nn

from zoo.outcome import Outcome


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4).half()


def run() -> Outcome:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(16, 8).half()
    x[:, 0] = 0  # a feature that is absent from this batch
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    lost = (~model.weight.isfinite()).float().mean().item()
    return Outcome(good=lost == 0, seen=f"loss {loss.item():.2f}; {lost:.0%} of the weights not finite after step 1")
