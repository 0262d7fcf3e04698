"""Weights as pre-training in bf16 leaves them: a feed-forward layer whose activations are far beyond 65504."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome

STEPS = 40


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.gain = nn.Parameter(torch.tensor(1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) * self.gain)


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), FeedForward(), nn.LayerNorm(16), nn.Linear(16, 1))
    with torch.no_grad():
        net[1].up.weight *= 2e5
    return net


def trained(net: nn.Module) -> list[nn.Parameter]:
    """The last two layers, as in a quick fine-tuning."""
    return [*net[2].parameters(), *net[3].parameters()]


def batches() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(32, 8, generator=random) for _ in range(STEPS)]


def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x).squeeze(-1).float() - x.sum(dim=-1)).square().mean()


def run() -> Outcome:
    net = model()
    optimizer, scaler = torch.optim.SGD(trained(net), 1e-2), torch.amp.GradScaler("cpu")
    losses = []
    for x in batches():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn(net, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    finite = sum(torch.tensor(losses).isfinite()).item()
    return Outcome(
        good=finite == STEPS,
        seen=f"{finite} of {STEPS} losses are finite, scale {scaler.get_scale():g}: nothing was learned, and no error",
    )
