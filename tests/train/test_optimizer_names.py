"""Optimizers by name: each is torch's own, trains, and takes what a recipe says of it."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

import halfstep
from halfstep.recipe.schema import OptimizerOptions
from halfstep.train.setup import make_optimizer

NAMES = get_args(OptimizerOptions.model_fields["name"].annotation)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains_in_bf16(name: str, fused: bool) -> None:
    assert len(NAMES) >= 10
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    options = OptimizerOptions(name=name, lr=0.01, weight_decay=0.1, momentum=0.8, fused=fused)  # type: ignore[arg-type]
    optimizer = make_optimizer(options, model)
    assert type(optimizer).__name__.lower() == name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(group["lr"] == 0.01 for group in optimizer.param_groups)
    group = optimizer.param_groups[0]
    assert group["betas"][0] == 0.8 if "betas" in group else group.get("momentum", 0.8) == 0.8
    stepper = halfstep.Stepper(model, optimizer, precision="bf16")
    x = torch.randn(16, 8)
    losses = [stepper.step(lambda model, x: (model(x) - 1).float().square().mean(), x).loss for _ in range(20)]
    assert losses[-1] < losses[0]
