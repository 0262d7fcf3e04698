"""The start check compares the first micro-batch with fp32, by module, and refuses to train without the bias."""

from __future__ import annotations

import torch

import halfstep
from halfstep.errors import StartCheckFailed
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p51_conversion_drops_every_bias.plain import batch, loss_fn, model


def run() -> Outcome:
    net = model()
    stepper = halfstep.Stepper(
        net, torch.optim.SGD(net.parameters(), lr=0.1), precision=resolve_precision_name("bf16"), check=True
    )
    try:
        stepper.step(loss_fn, batch())
    except StartCheckFailed as error:
        return Outcome(good=error.module == "2" and stepper.counts.applied == 0, seen=error.given)
    return Outcome(good=False, seen="nothing was said")
