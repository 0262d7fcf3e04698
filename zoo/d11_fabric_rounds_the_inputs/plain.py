"""Fabric in bf16-mixed, and a model that is given its timesteps as floats."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome
from zoo.real_lightning import fabric_in, quiet

TIMESTEPS = 1000
EXAMPLES = (257, 513, 999)


class Denoiser(nn.Module):
    """Embeds its timesteps with sines, as diffusion models do, and keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8 + 16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.given = torch.empty(0)
        self.computed_in: set[torch.dtype] = set()
        self.net[0].register_forward_hook(lambda module, given, out: self.computed_in.add(out.dtype))

    def forward(self, noisy: Tensor, timesteps: Tensor) -> Tensor:
        self.given = timesteps.detach().float()
        angles = timesteps.float()[:, None] / 1000 ** torch.linspace(0, 1, 8)
        return self.net(torch.cat([noisy, angles.sin(), angles.cos()], dim=1))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(TIMESTEPS, 8), torch.arange(TIMESTEPS).float()


def run() -> Outcome:
    fabric = fabric_in("bf16-mixed")
    with quiet():
        net = Denoiser()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        fabric.backward(model(*batch()).square().mean())
        optimizer.step()
    return judge(net)


def judge(net: Denoiser) -> Outcome:
    examples = ", ".join(f"{number} as {net.given[number].item():.0f}" for number in EXAMPLES)
    kept = len(net.given.unique())
    return Outcome(
        good=kept == TIMESTEPS and net.computed_in == {torch.bfloat16},
        seen=f"of {TIMESTEPS} timesteps {kept} reach the model: {examples}; it computes in "
        f"{', '.join(map(str, net.computed_in))}",
        word="inputs rounded",
    )
