"""A stepper's state is one piece: optimizer, schedule, scale, average and counters."""

from __future__ import annotations

import torch
from torch import nn

import halfstep
from zoo.outcome import Outcome
from zoo.p16_resuming_without_the_scale.plain import loss_fn


def run() -> Outcome:
    model, stepper = start()
    train(stepper, 40)
    checkpoint = {"model": model.state_dict(), "stepper": stepper.state_dict()}
    model, stepper = start()
    model.load_state_dict(checkpoint["model"])
    stepper.load_state_dict(checkpoint["stepper"])
    wasted = train(stepper, 40)
    del checkpoint["stepper"]["losses"]
    try:
        stepper.load_state_dict(checkpoint["stepper"])
        refusal = ""
    except halfstep.HalfstepError as error:
        refusal = f"refused, {error.given}, wanted {error.allowed}"
    return Outcome(
        good=wasted == 0 and "losses" in refusal,
        seen=f"{wasted} of the first 40 steps after resuming skipped; a state with a part missing: {refusal}",
    )


def start() -> tuple[nn.Module, halfstep.Stepper]:
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    return model, halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-6), precision="fp16")


def train(stepper: halfstep.Stepper, steps: int) -> int:
    reports = [stepper.step(loss_fn, torch.randn(8, 16)) for _ in range(steps)]
    return sum(not report.applied for report in reports)
