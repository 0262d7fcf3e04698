"""Attention and layers for each by itself, each added to what it was given."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Each of `x` asks all of `context`; with `causal`, only what is not behind it."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm = nn.LayerNorm(width)
        self.ask = nn.Linear(width, width)
        self.answer = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """`x` itself is the context where none is given."""
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
    """Two layers for each by itself."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out


class Block(nn.Module):
    """Each looks at all, then at itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.mix = FeedForward(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mix(self.attention(x))
        return out


class TellingBlock(nn.Module):
    """Each looks at those before it, then at what is told, then at itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before = Attention(width, heads, causal=True)
        self.told = Attention(width, heads)
        self.mix = FeedForward(width, 4 * width)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        out: Tensor = self.mix(self.told(self.before(x), told))
        return out
