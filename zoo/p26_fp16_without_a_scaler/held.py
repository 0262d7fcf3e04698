"""fp16 brings its scale along, and no other precision accepts one."""

from __future__ import annotations

import torch

import halfstep
from zoo.outcome import Outcome
from zoo.p26_fp16_without_a_scaler.plain import loss_fn, make_model


def run() -> Outcome:
    model = make_model()
    stepper = halfstep.Stepper(model, torch.optim.Adam(model.parameters(), eps=1e-15), precision="fp16")
    before = model[0].weight.detach().clone()
    stepper.step(loss_fn, torch.randn(256, 64))
    stuck = (model[0].weight == before).float().mean().item()
    refusal = refusal_of_a_scale_in_fp32()
    return Outcome(
        good=stuck < 0.01 and "DynamicScale with precision fp32" in refusal,
        seen=f"{stuck:.0%} of the first layer's weights did not move; refused elsewhere: {refusal}",
    )


def refusal_of_a_scale_in_fp32() -> str:
    model = make_model()
    try:
        halfstep.Stepper(
            model, torch.optim.Adam(model.parameters()), precision="fp32", loss_scale=halfstep.DynamicScale()
        )
    except halfstep.HalfstepError as error:
        return error.given
    return ""
