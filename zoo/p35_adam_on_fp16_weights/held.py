"""The same model: refused before the first step, by name."""

from __future__ import annotations

import torch

import halfstep
from zoo.outcome import Outcome
from zoo.p35_adam_on_fp16_weights.plain import make_model


def run() -> Outcome:
    model = make_model()
    before = model.weight.detach().clone()
    try:
        halfstep.Stepper(model, torch.optim.Adam(model.parameters()), precision="fp16")
    except halfstep.HalfstepError as error:
        return Outcome(
            good="weight, bias" in error.given and "float" in error.do and torch.equal(before, model.weight),
            seen=f"before the first step: {error.given}; {error.do}",
        )
    return Outcome(good=False, seen="nothing was refused")
