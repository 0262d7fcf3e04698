"""`autocast` in fp16 and nothing else, with a loss that is small."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean() * 1e-5


def run() -> Outcome:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-15)
    before = model[0].weight.detach().clone()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_fn(model, torch.randn(256, 64))
    loss.backward()
    optimizer.step()
    stuck = (model[0].weight == before).float().mean().item()
    return Outcome(good=stuck < 0.01, seen=f"{stuck:.0%} of the first layer's weights did not move")
