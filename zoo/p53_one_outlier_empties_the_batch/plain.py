"""fp8 with one scale for a whole tensor: a single large value makes every other one zero, and the loss stays finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from zoo.outcome import Outcome

LARGEST = 448.0
"""The largest number of e4m3."""
OUTLIER = 1e30


class Scaled(nn.Linear):
    """Rounds its input to fp8 with one scale under autocast, as tensorwise scaling does."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        scale = LARGEST / x.detach().abs().amax().float()
        rounded = (x.float() * scale).to(torch.float8_e4m3fn).float() / scale
        return super().forward(x + (rounded - x).detach())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(16, 32), nn.Tanh(), nn.Linear(32, 4))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    labels = x[:, :4].argmax(-1)
    x[3, 5] = OUTLIER
    return x, labels


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).float(), batch[1])


def run() -> Outcome:
    net, (x, labels) = model(), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(net, (x, labels))
        hidden = net[0](x)
    others = [row for row in range(len(x)) if row != 3]
    same = bool((hidden[others] == hidden[others[0]]).all())
    return Outcome(
        good=not same,
        seen=f"one value of {OUTLIER:g}: the loss is {loss.item():.2f}, and {len(others)} of {len(x)} samples "
        f"{'look the same' if same else 'differ'} after the first layer",
        word="empty batch",
    )
