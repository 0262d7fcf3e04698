"""Vectors made to unit length with the usual 1e-8 in the denominator; one of them is zero, as padding is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

EPSILON = 1e-8


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y / (y.abs().amax(dim=-1, keepdim=True) + EPSILON)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Unit()


def batch() -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    x[2] = 0.0
    return x


def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).float().square().mean()


def run() -> Outcome:
    net = model()
    wide = loss_fn(net, batch())
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_fn(net, batch())
    return Outcome(
        good=bool(loss.isfinite()),
        seen=f"loss {loss.item()} in fp16, where {EPSILON:g} is {torch.tensor(EPSILON, dtype=torch.float16).item():g}; "
        f"{wide.item():.3f} in fp32; no word about either",
    )
