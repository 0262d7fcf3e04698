"""Cases that are small enough to measure in a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def linear() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, loss_fn, (torch.randn(8, 64), torch.randint(0, 10, (8,)))


def convolutions() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 10),
    )  # fmt: skip
    return model, loss_fn, (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,)))


def broken() -> tuple[nn.Module, Any, Any]:
    model, _, batch = linear()
    return model, lambda model, batch: model(batch[0])[:, 99].sum(), batch


def not_a_case() -> int:
    return 3


NOT_CALLABLE = 3
