"""What a sample is asked for with: a class, an image or an embedding, which may be absent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Condition:
    """What was asked for, a row for each sample, and which rows count; the others are absent."""

    given: Tensor
    """Class numbers; or images, as many channels as they have; or embeddings, tokens × width."""
    kept: Tensor
    """True where it counts."""

    @classmethod
    def of(cls, given: Tensor) -> Condition:
        return cls(given, torch.ones(len(given), dtype=torch.bool, device=given.device))

    def dropped(self, share: float) -> Condition:
        """Without a random share of the rows."""
        return Condition(self.given, self.kept & (torch.rand(len(self.given), device=self.given.device) >= share))

    def absent(self) -> Condition:
        return Condition(self.given, torch.zeros_like(self.kept))

    def twice(self) -> Condition:
        """All rows, and once more as absent: what guidance compares."""
        return Condition(torch.cat([self.given, self.given]), torch.cat([self.kept, torch.zeros_like(self.kept)]))

    def or_zero(self, tensor: Tensor) -> Tensor:
        """What was made of the rows, and zeros for those that are absent."""
        return torch.where(self.kept.view(-1, *[1] * (tensor.ndim - 1)), tensor, 0.0)


class ImageCondition(nn.Module):
    """A condition image in the latents' size: convolutions, each halving it until it is there."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        halvings = stride.bit_length() - 1
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.halving = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(halvings))
        self.last = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.silu(self.first(image))
        for convolution in self.halving:
            x = F.silu(convolution(x))
        out: Tensor = self.last(x)
        return out
