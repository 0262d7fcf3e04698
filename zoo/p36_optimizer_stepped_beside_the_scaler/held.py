"""Named optimizers in one step: both move, or neither does."""

from __future__ import annotations

import torch

import halfstep
from zoo.outcome import Outcome
from zoo.p36_optimizer_stepped_beside_the_scaler.plain import losses, make_gan


def run() -> Outcome:
    gan = make_gan()
    optimizers = {name: torch.optim.SGD(gan[name].parameters(), lr=0.01) for name in ("generator", "discriminator")}
    scales = {name: halfstep.DynamicScale(init_scale=1024.0) for name in optimizers}
    stepper = halfstep.Stepper(gan, optimizers, precision="fp16", loss_scale=scales)
    clean = stepper.step(losses, torch.ones(8, 8))
    before = [p.detach().clone() for p in gan.parameters()]
    overflow = stepper.step(losses, torch.full((8, 8), 1000.0))
    unmoved = sum(torch.equal(p, b) for p, b in zip(gan.parameters(), before, strict=True))
    return Outcome(
        good=clean.applied and overflow.reason == "gradient_overflow" and unmoved == len(before),
        seen=f"clean batch applied: {clean.applied}; overflow skipped as {overflow.reason}, "
        f"{unmoved} of {len(before)} tensors as before, in both networks",
    )
