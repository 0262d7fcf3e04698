"""An exponential moving average kept in the model's own bf16."""

from __future__ import annotations

import torch
from torch import nn

from zoo.outcome import Outcome

DECAY = 0.999
STEPS = 200


def run() -> Outcome:
    model = nn.Linear(4, 4, bias=False)
    average = torch.ones(4, 4, dtype=torch.bfloat16)
    right = torch.ones(4, 4)
    nn.init.constant_(model.weight, 2.0)
    for _ in range(STEPS):
        average.lerp_(model.weight.detach().bfloat16(), 1 - DECAY)
        right.lerp_(model.weight.detach(), 1 - DECAY)
    in_bf16, in_fp32 = average.mean().item(), right.mean().item()
    return Outcome(
        good=abs(in_bf16 - in_fp32) < 0.01,
        seen=f"{STEPS} updates from 1 towards 2: {in_bf16:.3f} in bf16, {in_fp32:.3f} in fp32",
    )
