"""Layers of the slot models: initialization, positions, attention and the frame encoder."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.precision.island import island

# -- loudness ---------------------------------------------------------------------------------------------------------
# Convolutions initialized to preserve the variance of a signal.


Layer = TypeVar("Layer", nn.Conv2d, nn.ConvTranspose2d)


@torch.no_grad()
def as_loud(layer: Layer) -> Layer:
    """Initialize a layer next to a ReLU so that the signal keeps its variance (He), and return it.

    With torch's default each layer loses more than half of the signal: after four, positions dominate what is seen,
    slots divide the frame into regions, and training does not recover.
    """
    # The fan-in of one output: the kernel of each input channel; for a strided transposed convolution, only a part of
    # it.
    moved = math.prod(layer.stride) if isinstance(layer, nn.ConvTranspose2d) else 1
    added_up = layer.in_channels * math.prod(layer.kernel_size) / moved
    layer.weight.normal_(0.0, math.sqrt(2.0 / added_up))
    if layer.bias is not None:
        layer.bias.zero_()
    return layer


# -- positions --------------------------------------------------------------------------------------------------------
# Position embeddings.


class Positions(nn.Module):
    """Adds a linear embedding of the distances to the four borders.

    The model that contains it makes it an island: in 16 bits, positions of a large frame begin to coincide.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(4, width)

    def forward(self, features: Tensor) -> Tensor:
        """Add positions to N × channels × height × width."""
        high, wide = features.shape[-2:]
        down, across = (torch.linspace(0.0, 1.0, steps, device=features.device) for steps in (high, wide))
        down, across = down[:, None].expand(high, wide), across.expand(high, wide)
        places: Tensor = self.project(torch.stack([down, 1.0 - down, across, 1.0 - across], dim=-1))
        return features + places.permute(2, 0, 1)


# -- transformer ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention from `x` to `context`; with `causal`, only to positions that are not later."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm = nn.LayerNorm(width)
        self.ask = nn.Linear(width, width)
        self.answer = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return `x` plus its attention to `context`, or to itself where none is given."""
        asking = self.norm(x)
        question = self._split(self.ask(asking))
        keys, values = (self._split(part) for part in self.answer(asking if context is None else context).chunk(2, -1))
        found = F.scaled_dot_product_attention(question, keys, values, is_causal=self.causal)
        out: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return x + out

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """A residual two-layer MLP applied to each position."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out


class TransformerBlock(nn.Module):
    """A transformer block: self-attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mix = FeedForward(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mix(self.attention(x))
        return out


class TellingBlock(nn.Module):
    """A transformer decoder block: causal self-attention, cross-attention to the slots, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before = Attention(width, heads, causal=True)
        self.told = Attention(width, heads)
        self.mix = FeedForward(width, 4 * width)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        out: Tensor = self.mix(self.told(self.before(x), told))
        return out


# -- frame encoder ----------------------------------------------------------------------------------------------------
# The encoder from a frame to the positions that slots compete for.


LAYERS = 4
"""Convolutions per frame; the first ones have stride 2."""


class FrameEncoder(nn.Module):
    """Convolutions, positions and an MLP; `stride` pixels per side become one position."""

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
        """Return N × positions × out."""
        seen = self.positions(self.look(frames))
        out: Tensor = self.mix(seen.flatten(2).transpose(1, 2))
        return out
