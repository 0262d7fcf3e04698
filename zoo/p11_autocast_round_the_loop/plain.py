"""One `with torch.autocast(...)` round the whole loop."""

from __future__ import annotations

import torch
from torch import nn

from zoo.outcome import Outcome


def run() -> Outcome:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    losses: list[float] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(20):
            loss = nn.functional.mse_loss(model(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return Outcome(
        good=losses[-1] < 0.5 * losses[0], seen=f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step 20"
    )
