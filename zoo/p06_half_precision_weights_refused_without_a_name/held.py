"""The same model: refused before the first forward pass, by name."""

from __future__ import annotations

import torch

import halfstep
from zoo.outcome import Outcome
from zoo.p06_half_precision_weights_refused_without_a_name.plain import Net


def run() -> Outcome:
    torch.manual_seed(0)
    model = Net()
    try:
        halfstep.Stepper(model, torch.optim.AdamW(model.parameters()), precision="fp16")
    except halfstep.HalfstepError as error:
        return Outcome(
            good="decoder.weight" in error.given and "decoder.bias" in error.given and "adapter" not in error.given,
            seen=f"before the first step: {error.given}",
        )
    return Outcome(good=False, seen="nothing was refused")
