"""From a frame to its places: what slots compete for."""

from __future__ import annotations

from torch import Tensor, nn

from halfstep.precision.island import island
from halfstep.tasks.models.slots.loudness import as_loud
from halfstep.tasks.models.slots.positions import Positions

LAYERS = 4
"""Convolutions of a frame; the first of them shrink it."""


class FrameEncoder(nn.Module):
    """Convolutions, positions, and a layer for each place by itself; `stride` pixels, across, become a place."""

    def __init__(self, channels: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        halvings = stride.bit_length() - 1
        layers: list[nn.Module] = []
        for number in range(LAYERS):
            step = 2 if number < halvings else 1
            convolution = nn.Conv2d(width if number else channels, width, 5, stride=step, padding=2)
            layers += [as_loud(convolution), nn.ReLU()]
        self.look = nn.Sequential(*layers)
        self.positions = Positions(width)
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))
        island(self, "positions")

    def forward(self, frames: Tensor) -> Tensor:
        """N × places × out."""
        seen = self.positions(self.look(frames))
        out: Tensor = self.mix(seen.flatten(2).transpose(1, 2))
        return out
