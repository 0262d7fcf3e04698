"""The average rides on the step, and is fp32 whatever the model computes in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome
from zoo.p25_average_that_never_moves.plain import DECAY, STEPS, model, move, way


def run() -> Outcome:
    unet = model()
    first = {name: parameter.detach().clone() for name, parameter in unet.named_parameters()}
    ema = halfstep.Ema(unet, DECAY)
    move(unet)
    # A learning rate of zero keeps the weights there, where the right answer is known.
    stepper = halfstep.Stepper(unet, torch.optim.SGD(unet.parameters(), lr=0.0), precision="bf16", ema=ema)
    for _ in range(STEPS):
        stepper.step(loss_fn, torch.ones(1, 1, 4, 4))
    averages = ema.averages()
    found, right = way((averages[name] for name in first), first.values()), 1 - DECAY**STEPS
    return Outcome(
        good=abs(found - right) < 0.01 * right and {a.dtype for a in averages.values()} == {torch.float32},
        seen=f"{STEPS} updates, decay {DECAY}: {found:.1%} of the way, by arithmetic {right:.1%}",
    )


def loss_fn(unet: nn.Module, x: Tensor) -> Tensor:
    return unet(x, torch.zeros(1, dtype=torch.long)).sample.float().mean()  # type: ignore[no-any-return]
