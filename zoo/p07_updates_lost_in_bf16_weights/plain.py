"""A model loaded in bf16 and fine-tuned with an ordinary learning rate."""

from __future__ import annotations

import torch
from torch import nn

from zoo.outcome import Outcome


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    nn.init.normal_(model.weight, mean=0.2, std=0.05)
    return model.bfloat16()


def run() -> Outcome:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    before = model.weight.detach().clone()
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(16, 100).bfloat16()).float().square().mean().backward()
        optimizer.step()
    lost = (model.weight == before).float().mean().item()
    return Outcome(good=lost < 0.5, seen=f"{lost:.0%} of the weights as before after 10 updates")
