"""The gradient that a layer returns is compared with the product that it should be, before the first update."""

from __future__ import annotations

import torch

import halfstep
from halfstep.errors import StartCheckFailed
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p52_gradients_of_zeros_only.plain import batch, loss_fn, model


def run() -> Outcome:
    net = model()
    stepper = halfstep.Stepper(
        net, torch.optim.SGD(net.parameters(), lr=0.1), precision=resolve_precision_name("bf16"), check=True
    )
    try:
        stepper.step(loss_fn, batch())
    except StartCheckFailed as error:
        return Outcome(good=error.module == "2" and error.id == "start.no_gradient", seen=error.given)
    return Outcome(good=False, seen="nothing was said")
