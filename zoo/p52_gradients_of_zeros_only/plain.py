"""A kernel that returns gradients of zeros in one format: the loss is right, and nothing behind it is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zoo.outcome import Outcome

STEPS = 20


class Product(torch.autograd.Function):
    """A product whose backward, in the narrow format, writes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.shapes = x, weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.shapes
        return torch.zeros_like(x), torch.zeros_like(weight)


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        found: Tensor = Product.apply(x.bfloat16(), self.weight.bfloat16())  # type: ignore[no-untyped-call]
        return found + self.bias


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), Layer(32, 32), nn.GELU(), nn.Linear(32, 4))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    return x, x[:, :4].argmax(-1)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).float(), batch[1])


def run() -> Outcome:
    net, given = model(), batch()
    before = net[0].weight.detach().clone()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(net, given)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    moved = not torch.equal(before, net[0].weight)
    return Outcome(
        good=moved,
        seen=f"the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}, and the first layer "
        f"{'moves' if moved else f'is in {STEPS} steps what it was'}",
        word="zero gradients",
    )
