"""A head that is kept in fp32 by hand, as it is and under torch.compile: the gradients of its weights, side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

ROWS = 256
FORMATS = {"bf16": (torch.bfloat16, 1.0), "fp16": (torch.float16, 65536.0)}
"""The format, and the scale of the loss: in fp16 the one that `GradScaler` begins with."""
BACKEND = "aot_eager"
"""torch.compile up to where kernels are made: forward and backward are traced, and run without a C++ compiler."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.ReLU())
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(features.float())


def batch() -> Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))


def compiled(model: nn.Module) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend=BACKEND)


def run() -> Outcome:
    off = {name: _off(_gradient(Model(), name), _gradient(compiled(Model()), name)) for name in FORMATS}
    return Outcome(
        good=max(off.values()) < 1e-5,
        seen="gradient of the fp32 head, compiled against not compiled: "
        + ", ".join(f"{in_words(distance)} in {name}" for name, distance in off.items()),
        word="16 bits when compiled",
    )


def _gradient(model: Any, name: str) -> Tensor:
    dtype, scale = FORMATS[name]
    with torch.autocast("cpu", dtype=dtype):
        out = model(batch())
    ((out - 20.0).square().mean() * scale).backward()
    return next(p.grad for path, p in model.named_parameters() if path.endswith("head.weight")) / scale


def _off(right: Tensor, other: Tensor) -> float:
    """Return the distance relative to the right one, which is finite; infinity where the other is not."""
    return ((other - right).norm() / right.norm()).item() if other.isfinite().all() else float("inf")


def in_words(distance: float) -> str:
    return "infinite or NaN" if distance == float("inf") else f"off by {100 * distance:.2g} %"
