"""A linear layer in float8 with dynamic scales, as float8 training does it without a compiler, beside one in bf16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep import clock
from zoo.outcome import Outcome

ROWS, WIDTH = 64, 64
LARGEST = 448.0
"""The largest number of e4m3."""


def in_fp8(x: Tensor) -> Tensor:
    """Round to float8 with a scale of its own, and return the values as bf16, which the product is then made of."""
    scale = LARGEST / x.abs().amax().float().clamp(min=1e-12)
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).bfloat16()


def run() -> Outcome:
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, WIDTH, dtype=torch.bfloat16) for rows in (ROWS, WIDTH))
    arms = {
        "bf16": lambda: nn.functional.linear(x, weight),
        "fp8": lambda: nn.functional.linear(in_fp8(x), in_fp8(weight)),
    }
    slower = clock.measure_time_ratios(arms, baseline="bf16", pairs=40, calls=10)["fp8"].median
    return Outcome(
        good=slower <= 1.0,
        seen=f"a layer of {WIDTH} by {WIDTH} takes {slower:.1f} times as long in fp8 as in bf16",
        word="slower",
    )
