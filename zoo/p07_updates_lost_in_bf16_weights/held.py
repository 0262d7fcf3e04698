"""The same model is refused by name; stored in fp32 and computed in bf16, every weight moves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p07_updates_lost_in_bf16_weights.plain import make_model

BF16 = resolve_precision_name("bf16")
"""The precision itself, not its name: that would become fp32 on a CPU that only emulates bf16."""


def run() -> Outcome:
    model = make_model()
    try:
        make_stepper(model)
        refusal = ""
    except halfstep.HalfstepError as error:
        refusal = error.given
    stepper = make_stepper(model.float())
    before = model.weight.detach().clone()
    for _ in range(10):
        stepper.step(loss_fn, torch.randn(16, 100))
    lost = (model.weight == before).float().mean().item()
    return Outcome(
        good="weight, bias" in refusal and lost < 0.01,
        seen=f"refused: {refusal}; after model.float(), {lost:.0%} of the weights as before after 10 updates",
    )


def make_stepper(model: nn.Module) -> halfstep.Stepper:
    return halfstep.Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-5), precision=BF16)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()
