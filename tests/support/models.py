"""Small models that exercise what is hard to take back."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Writes(nn.Module):
    """Writes buffers in every way there is: in place, as an integer, and by binding a new tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rebound", torch.zeros(width))
        self.register_buffer("last", None)
        self.register_buffer("constant", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rebound = 0.9 * self.rebound + 0.1 * x.detach().float().mean(0)
        self.last = x.detach().float().amax(0)
        return x


def buffered_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), Writes(16), nn.ReLU(), nn.Linear(16, 4))


def plain_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Coder(nn.Module):
    """Two ways in besides forward, and some members that are not ways in."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, x: Tensor) -> Tensor:
        return self.decoder(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    @staticmethod
    def name() -> str:
        return "coder"

    @property
    def width(self) -> int:
        return 4
