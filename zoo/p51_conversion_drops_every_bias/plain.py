"""A conversion to a narrow format replaces the product of each linear layer, and leaves its bias out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from zoo.outcome import Outcome

STEPS = 20


class Converted(nn.Linear):
    """Computes the product in 16 bits under autocast, as a conversion does, and forgets the bias."""

    def forward(self, x: Tensor) -> Tensor:
        narrow = torch.is_autocast_enabled(x.device.type)
        return functional.linear(x, self.weight) if narrow else super().forward(x)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), Converted(32, 32), nn.GELU(), nn.Linear(32, 4))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(-1)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).float(), batch[1])


def run() -> Outcome:
    net, given = model(), batch()
    before = net[2].bias.detach().clone()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(net, given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moved = not torch.equal(before, net[2].bias)
    return Outcome(
        good=moved,
        seen=f"the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}, and the bias of the converted layer "
        f"{'moves' if moved else f'is in {STEPS} steps what it was'}",
        word="dead bias",
    )
