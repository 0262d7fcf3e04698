"""bf16 weights with Adam's moments in fp32, saved and loaded with torch's own methods."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64)


def batch(number: int) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(number))


def run() -> Outcome:
    model = make_model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for p in model.parameters():
        moments = {name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
        for number in range(5):
            moment = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
            moments["exp_avg"].lerp_(moment, 0.1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    before, after = saved["state"][0]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    share = float((before != after.float()).float().mean())
    name = str(after.dtype).removeprefix("torch.")
    return Outcome(good=share == 0.0, seen=f"the moments come back in {name}, {share:.0%} of them changed")
