"""A GAN ported from fp32: `scaler.step` was added, and one old `step()` stayed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.outcome import Outcome


def make_gan() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"generator": nn.Linear(4, 8), "discriminator": nn.Linear(8, 1)})


def losses(gan: nn.ModuleDict, real: Tensor) -> dict[str, Tensor]:
    generator, discriminator = gan["generator"], gan["discriminator"]
    fake = generator(torch.ones(len(real), 4))
    fooled = (discriminator(fake).float() - 1).square().mean()
    caught = (discriminator(real).float() - 1).square().mean() + discriminator(fake.detach()).float().square().mean()
    return {"generator": fooled, "discriminator": caught}


def run() -> Outcome:
    gan = make_gan()
    optimizers = {name: torch.optim.SGD(gan[name].parameters(), lr=0.01) for name in ("generator", "discriminator")}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for real in (torch.ones(8, 8), torch.full((8, 8), 1000.0)):  # the second batch overflows in the discriminator
        with torch.autocast("cpu", dtype=torch.float16):
            both = losses(gan, real)
        for name, optimizer in optimizers.items():
            gradients = torch.autograd.grad(scaler.scale(both[name]), list(gan[name].parameters()))
            for parameter, gradient in zip(gan[name].parameters(), gradients, strict=True):
                parameter.grad = gradient
            scaler.step(optimizer)
        optimizers["discriminator"].step()
        scaler.update()
    finite = {name: all(bool(p.isfinite().all()) for p in gan[name].parameters()) for name in optimizers}
    return Outcome(
        good=all(finite.values()), seen=f"after an overflow that the scaler skipped, weights finite: {finite}"
    )
