"""The same with `weight_format`: both formats go the way of fp32 weights."""

from __future__ import annotations

import torch

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p61_bf16_weights_stand_still.plain import RATE, UPDATES, batch, make_model, way


def way_as(weight_format: str) -> tuple[float, torch.dtype]:
    model = make_model()
    start = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    stepper = halfstep.Stepper(model, optimizer, precision=resolve_precision_name("bf16"), weight_format=weight_format)
    for number in range(UPDATES):
        stepper.step(lambda m, x: m(x).float().square().mean(), batch(number))
    end = model.weight.detach() if stepper.weights is None else stepper.weights.wide(model.weight)
    return way(start, end), model.weight.dtype


def run() -> Outcome:
    fp32, _ = way_as("fp32")
    split, stored = way_as("bf16-split")
    share = split / fp32
    return Outcome(
        good=abs(share - 1) < 0.02 and stored is torch.bfloat16,
        seen=f"bf16-split goes {share:.0%} of the way of fp32 weights in {UPDATES} updates",
    )
