"""A model in bf16 and AdamW, compared with the same in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

RATE, UPDATES = 1e-4, 40


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    nn.init.normal_(model.weight, mean=0.3, std=0.05)
    return model


def batch(number: int) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(number))


def way(start: Tensor, end: Tensor) -> float:
    return float((end.float() - start.float()).norm())


def way_in(dtype: torch.dtype) -> float:
    model = make_model().to(dtype)
    start = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for number in range(UPDATES):
        optimizer.zero_grad()
        model(batch(number).to(dtype)).float().square().mean().backward()
        optimizer.step()
    return way(start, model.weight.detach())


def run() -> Outcome:
    share = way_in(torch.bfloat16) / way_in(torch.float32)
    return Outcome(
        good=share > 0.9, seen=f"bf16 weights go {share:.0%} of the way of fp32 weights in {UPDATES} updates"
    )
