"""Small models with a place for a fault: healthy in every precision as long as there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
Change = Callable[[Tensor], Tensor]


def nothing(h: Tensor) -> Tensor:
    return h


class Perceptron(nn.Module):
    """`fault` is a module; `change` is a function that the model's own forward calls."""

    def __init__(self, fault: nn.Module | None = None, change: Change = nothing) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        self.fault, self.change = fault or nn.Identity(), change
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(self.fault(self.body(x))))


class Attention(nn.Module):
    """One head. Nobody looks ahead: -inf in the mask, which is healthy."""

    def __init__(self, fault: nn.Module | None = None, gain: float = 1.0, hide: int | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.fault, self.gain, self.hide = fault or nn.Identity(), gain, hide

    def forward(self, h: Tensor) -> Tensor:
        query, key, value = self.project(h).chunk(3, -1)
        hidden = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).triu(1)
        if self.hide is not None:
            hidden[self.hide] = True
        scores = (query * self.gain) @ key.transpose(1, 2)  # scores overflow
        weights = scores.div(WIDTH**0.5).masked_fill(hidden, -torch.inf).softmax(-1)  # full mask
        return self.fault(weights @ value)


class Transformer(nn.Module):
    """Two blocks of attention; the second one has the fault."""

    def __init__(self, fault: nn.Module | None = None, gain: float = 1.0, hide: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Attention(), Attention(fault, gain, hide)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.norm(h)).mean(1)


class MaskedScores(nn.Module):
    """Attention whose mask came with the batch, as sums of 0 and -inf."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.project, self.gain = nn.Linear(8, 24), gain

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.project(h).chunk(3, -1)
        scores = query @ key.transpose(1, 2)
        large = scores * self.gain  # masked scores
        return (large + mask).softmax(-1) @ value


class Masked(nn.Module):
    """Two of them, with one mask; the second may overflow."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.first, self.second, self.head = MaskedScores(1.0), MaskedScores(gain), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = x + self.first(x, mask)
        return self.head(h + self.second(h, mask)).mean(1)


class Plain(nn.Module):
    """Nothing in it keeps a large number small."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)))


class Pictures(nn.Module):
    """Convolutions and batch statistics."""

    def __init__(self, fault: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.normal = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.fault = fault or nn.Identity()
        self.second, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fault(F.relu(self.normal(self.first(x))))
        return self.head(self.second(h).mean((2, 3)))


class Grows(nn.Module):
    """Each block makes its input `times` as large."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def forward(self, h: Tensor) -> Tensor:
        return h + (self.times - 1) * h  # residual


class Residual(nn.Module):
    """A stream that grows by itself, normalized at the end as in a transformer."""

    def __init__(self, blocks: int, times: float) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.Sequential(*(Grows(times) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        # Between 1 and 2, so that which block overflows can be told beforehand.
        return self.head(self.norm(self.blocks(1.5 + 0.5 * self.embed(x).tanh())))


class Vae(nn.Module):
    """Called by its methods, never by forward."""

    def __init__(self, log_variance: float = 0.0, gain: float = 1.0) -> None:
        super().__init__()
        self.log_variance = log_variance
        self.encoder = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))
        self.decoder = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), Amplifies(gain), nn.Linear(WIDTH, 8))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return mean, log_variance + self.log_variance

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)


class Amplifies(nn.Module):
    """What a badly initialized layer does."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, h: Tensor) -> Tensor:
        return h * self.gain  # amplifies


def vae_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    mean, log_variance = model.encode(batch[0])
    variance = log_variance.exp()  # variance
    spread = variance.sqrt()
    back = model.decode(mean + spread * torch.randn_like(spread))
    divergence = (mean.float().square() + variance.float() - 1 - log_variance.float()).mean()
    return (back.float() - batch[0]).square().mean() + 0.1 * divergence


def squares(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return (model(batch[0]).float() - batch[1]).square().mean()


def batch_for(model: nn.Module, samples: int = 6) -> tuple[Tensor, Tensor]:
    if isinstance(model, Pictures):
        return torch.randn(samples, 3, 6, 6), torch.randn(samples, 4)
    if isinstance(model, Transformer):
        return torch.randn(samples, 5, 8), torch.randn(samples, 4)
    return torch.randn(samples, 8), torch.randn(samples, 4)
