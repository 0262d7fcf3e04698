"""The same request runs in fp16; and a model that switches autocast off inside is refused before it trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome
from zoo.p03_precision_asked_for_is_not_what_ran.plain import make_model


class SwitchesOff(nn.Module):
    """As found in models that were once written to be safe."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x)


def run() -> Outcome:
    stepper = stepper_for(make_model())
    stepper.step(loss_fn, torch.randn(8, 16))

    model = SwitchesOff()
    before = model.inner[0].weight.detach().clone()
    try:
        stepper_for(model).step(loss_fn, torch.randn(8, 16))
        message = ""
    except halfstep.HalfstepError as error:
        message = error.given
    refused_in_time = "inner.0 [fp32]" in message and torch.equal(before, model.inner[0].weight)
    return Outcome(
        good=refused_in_time and stepper.observed is not None and stepper.observed.share == 1.0,
        seen=f"observed {stepper.observed}; the other model refused: {message}",
    )


def stepper_for(model: nn.Module) -> halfstep.Stepper:
    return halfstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="fp16")


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()
