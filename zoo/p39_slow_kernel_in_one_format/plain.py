"""A small convolutional net in fp16 beside fp32, with a kernel that this build of torch does not have in fp16."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from zoo.outcome import Outcome

SLOWER = 2.0
"""A format that takes this many times as long as fp32 gains nothing."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))


def batch() -> Tensor:
    return torch.randn(2, 16, 24, 24, generator=torch.Generator().manual_seed(0))


def run() -> Outcome:
    times = {name: _seconds(dtype) for name, dtype in (("fp32", None), ("fp16", torch.float16))}
    ratio = times["fp16"] / times["fp32"]
    return Outcome(
        good=ratio < SLOWER,
        seen=f"forward and backward take {ratio:.1f} times as long in fp16 as in fp32, and nothing is said",
        word="many times slower",
    )


def _seconds(dtype: torch.dtype | None) -> float:
    model, x = make_model(), batch()

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = model(x)
        out.float().square().mean().backward()

    return Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=0.05).median
