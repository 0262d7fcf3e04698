"""The same weights and batches, guarded: the module that overflows is kept in fp32, and the rest trains in fp16."""

from __future__ import annotations

import torch

import halfstep
from halfstep.precision.island import find_islands
from zoo.outcome import Outcome
from zoo.p21_fp16_after_bf16_pretraining.plain import batches, loss_fn, model, trained


def run() -> Outcome:
    net = model()
    stepper = halfstep.Stepper(net, torch.optim.SGD(trained(net), 1e-2), precision="fp16")
    guardian = halfstep.Guardian(stepper, mode="repair", tell=lambda told: None)
    reports = [guardian.step(loss_fn, x) for x in batches()]
    applied = [report.loss for report in reports if report.applied]
    kept = ", ".join(find_islands(net))
    return Outcome(
        good=(stepper.precision.name, kept) == ("fp16", "1") and len(applied) > 30 and applied[-1] < applied[0],
        seen=f"{len(applied)} of {len(reports)} steps applied in {stepper.precision.name} with {kept} in fp32; "
        f"loss {applied[0]:.2f} to {applied[-1]:.2f}",
    )
