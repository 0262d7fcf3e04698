"""Sine positions computed by a product of positions and frequencies, which autocast runs in bf16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

LENGTH = 1024


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 10000.0 ** (torch.arange(0, 16) / 16))
        self.linear = nn.Linear(16, 16)

    def angles(self, positions: Tensor) -> Tensor:
        return positions.float()[:, None] @ self.frequencies[None, :]

    def forward(self, positions: Tensor) -> Tensor:
        return self.linear(self.angles(positions).sin())


def model() -> Positions:
    torch.manual_seed(0)
    return Positions()


def run() -> Outcome:
    net, positions = model(), torch.arange(LENGTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fast = net.angles(positions)[:, 0]
    distinct = len(fast.unique())
    return Outcome(
        good=distinct == LENGTH,
        seen=f"{LENGTH} positions become {distinct} different angles; the last is {fast[-1].item():g}; "
        "nothing is NaN, and nothing is said",
    )
