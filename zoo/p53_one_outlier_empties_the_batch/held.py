"""The share of products that became zero is compared with fp32, and such a first step is refused."""

from __future__ import annotations

import torch

import halfstep
from halfstep.errors import StartCheckFailed
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p53_one_outlier_empties_the_batch.plain import batch, loss_fn, model


def run() -> Outcome:
    net = model()
    stepper = halfstep.Stepper(
        net, torch.optim.SGD(net.parameters(), lr=0.1), precision=resolve_precision_name("bf16"), check=True
    )
    try:
        stepper.step(loss_fn, batch())
    except StartCheckFailed as error:
        return Outcome(good=error.module == "0" and error.id == "start.zeros", seen=error.given)
    return Outcome(good=False, seen="nothing was said")
