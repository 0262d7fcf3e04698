"""The same with `bf16-stochastic`: what else was drawn has no effect."""

from __future__ import annotations

import torch
from torch import Tensor

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p62_replicas_drift_by_global_noise.plain import UPDATES, differing, gradient, make_model


def replica(draws: int) -> Tensor:
    model = make_model()
    optimizer = torch.optim.SGD([model.weight], lr=1e-3)
    stepper = halfstep.Stepper(
        model, optimizer, precision=resolve_precision_name("bf16"), weight_format="bf16-stochastic", observe=False
    )
    torch.manual_seed(7)
    torch.rand(draws)
    for number in range(UPDATES):
        stepper.step(lambda m, g: (m.weight.float() * g).sum(), gradient(number, model.weight))
    return model.weight.detach()


def run() -> Outcome:
    share = differing(replica(0), replica(1))
    return Outcome(good=share == 0.0, seen=f"{share:.0%} of the weights differ after {UPDATES} updates")
