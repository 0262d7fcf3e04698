"""A Stepper that changed its precision goes back to what it was built with, not to what is called the same."""

from __future__ import annotations

import dataclasses
import warnings

import torch
from torch import Tensor, nn

from halfstep import DynamicScale, Stepper
from halfstep.precision.precision import Precision, resolve_precision_name
from tests.support.models import plain_model


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def stepper_in(precision: str | Precision, scale: DynamicScale | None = None) -> Stepper:
    model = plain_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Stepper(
            model, torch.optim.SGD(model.parameters(), 1e-3), precision=precision, loss_scale=scale, observe=False
        )


def test_the_callers_loss_scale_is_used_again_and_begins_anew() -> None:
    scale = DynamicScale(init_scale=128.0, cap=256.0, growth_interval=3)
    stepper = stepper_in("fp16", scale)
    for _ in range(4):
        stepper.step(square, torch.randn(6, 8))
    assert scale.value == 256.0
    stepper.change_precision("bf16")
    assert stepper.step(square, torch.randn(6, 8)).loss_scale == 1.0
    stepper.change_precision("fp16")
    assert scale.value == stepper.step(square, torch.randn(6, 8)).loss_scale == 128.0
    assert scale.growth_tracker == 1
    assert stepper.state_dict()["losses"]["loss"]["loss_scale"] == scale.state_dict()


def test_a_precision_that_is_the_callers_own_is_found_again() -> None:
    own = dataclasses.replace(resolve_precision_name("fp16"), name="mine")
    stepper = stepper_in(own)
    findings = list(stepper.findings)
    stepper.change_precision("fp32")
    stepper.change_precision("mine")
    assert stepper.precision is own
    assert stepper.step(square, torch.randn(6, 8)).loss_scale == 2.0**16
    assert stepper.findings == findings
