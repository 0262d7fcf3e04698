"""Random numbers of a training loop: from generators that all share, and from objects that a loss function holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def seed_streams(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def read_streams() -> dict[str, Any]:
    """The states of the shared generators, as values that `==` compares."""
    return {
        "python": random.getstate(),
        "numpy": repr(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state().tolist(),
    }


def augment(x: Tensor) -> Tensor:
    """Noise from torch, with a size from NumPy, and a shift from Python."""
    noise = torch.randn(x.shape, device=x.device)
    return x * (1.0 + 0.1 * float(np.random.rand())) + 0.1 * noise + 0.01 * random.random()


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(augment(batch)).float().square().mean()
    return loss


class OwnStreams:
    """A loss function with a generator of each kind."""

    def __init__(self, seed: int = 7) -> None:
        self.generators: list[Any] = [random.Random(seed), np.random.default_rng(seed), np.random.RandomState(seed)]
        self.generators.append(torch.Generator().manual_seed(seed))
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.calls += 1
        python, numpy, old, own = self.generators
        size = 1.0 + 0.1 * python.random() + 0.1 * float(numpy.random()) + 0.1 * float(old.rand())
        noise = torch.randn(batch.shape, generator=own).to(batch.device)
        loss: Tensor = model(size * batch + 0.1 * noise).float().square().mean()
        return loss

    def read(self) -> list[Any]:
        python, numpy, old, own = self.generators
        return [
            python.getstate(),
            repr(numpy.bit_generator.state),
            repr(old.get_state(legacy=False)),
            own.get_state().tolist(),
        ]


class FailingLoss:
    """A loss function that draws from all generators, and raises an error at a later call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss = loss_fn(model, batch)
        self.left -= 1
        if self.left < 0:
            raise KeyError("no such label")
        return loss


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.LayerNorm(16), nn.Linear(16, 1))


def seeding_case() -> tuple[nn.Module, Any, Tensor]:
    """A case that seeds all generators, as many scripts do."""
    seed_streams(0)
    return small_model(), loss_fn, augment(torch.zeros(4, 8))
