"""The same data, clipped at the same norm: the scale finds its level in a few skipped steps."""

from __future__ import annotations

from torch import Tensor, nn

import halfstep
from zoo.d13_fabric_clipping_ends_in_an_overflow.plain import STEPS, batch, make_model
from zoo.outcome import Outcome


def run() -> Outcome:
    model, optimizer = make_model()
    stepper = halfstep.Stepper(model, optimizer, precision="fp16", clip_norm=1.0)
    reports = [stepper.step(loss_fn, batch(number)) for number in range(STEPS)]
    skipped = [report.reason for report in reports if not report.applied]
    return Outcome(
        good=set(skipped) == {"gradient_overflow"} and len(skipped) < STEPS / 2 and reports[-1].applied,
        seen=f"{STEPS - len(skipped)} of {STEPS} steps applied, {len(skipped)} skipped: {sorted(set(skipped))}",
    )


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()
