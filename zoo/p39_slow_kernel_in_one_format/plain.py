"""A small convolutional net in fp16 beside fp32, with a kernel that this build of torch does not have in fp16."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from halfstep import clock
from zoo.outcome import Outcome

SLOWER = 2.0
"""A format that takes this many times as long as fp32 gains nothing."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))


def batch() -> Tensor:
    return torch.randn(2, 16, 24, 24, generator=torch.Generator().manual_seed(0))


def run() -> Outcome:
    arms = {"fp32": partial(_step, None), "fp16": partial(_step, torch.float16)}
    slower = clock.measure_time_ratios(arms, baseline="fp32", pairs=10)["fp16"].median
    return Outcome(
        good=slower < SLOWER,
        seen=f"forward and backward take {slower:.1f} times as long in fp16 as in fp32, and nothing is said",
        word="many times slower",
    )


def _step(dtype: torch.dtype | None) -> None:
    model = make_model()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        out = model(batch())
    out.float().square().mean().backward()
