"""Stochastic rounding by hand, on two replicas that get the same gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

UPDATES = 10


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64)


def gradient(number: int, p: Tensor) -> Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(number))


def rounded(wide: Tensor) -> Tensor:
    bits = wide.view(torch.int32) + torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32)
    return (bits & -65536).view(torch.float32).bfloat16()


def replica(draws: int) -> Tensor:
    weight = make_model().bfloat16().weight.detach()
    torch.manual_seed(7)
    torch.rand(draws)
    for number in range(UPDATES):
        weight = rounded(weight.float() - 1e-3 * gradient(number, weight))
    return weight


def differing(one: Tensor, other: Tensor) -> float:
    return float((one != other).float().mean())


def run() -> Outcome:
    share = differing(replica(0), replica(1))
    return Outcome(good=share == 0.0, seen=f"{share:.0%} of the weights differ after {UPDATES} updates")
