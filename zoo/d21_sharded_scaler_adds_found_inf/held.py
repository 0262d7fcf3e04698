"""The same batches and optimizers: the ranks agree on the skip, and no optimizer is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import halfstep
from zoo.d21_sharded_scaler_adds_found_inf.plain import OPTIMIZERS, is_finite, make_batches, make_model
from zoo.outcome import Outcome
from zoo.two_ranks import run_on_two_ranks


class Ended(NamedTuple):
    finite: bool
    reasons: list[str | None]


def run() -> Outcome:
    found = [ended for rank in run_on_two_ranks(train_each) for ended in rank]
    right = sum(ended.finite and ended.reasons == [None, "gradient_overflow"] for ended in found)
    return Outcome(
        good=right == len(found) == 2 * len(OPTIMIZERS),
        seen="fused SGD and fused AdamW, each on 2 ranks: one step applied, one skipped as gradient_overflow, "
        f"and finite weights in {right} of {len(found)} cases",
    )


def train_each(rank: int) -> list[Ended]:
    return [train(rank, make_optimizer) for make_optimizer in OPTIMIZERS.values()]


def train(rank: int, make_optimizer: Callable[..., torch.optim.Optimizer]) -> Ended:
    model = make_model()
    stepper = halfstep.Stepper(
        model,
        make_optimizer(model.parameters()),
        precision="fp16",
        clip_norm=1.0,
        loss_scale=halfstep.DynamicScale(init_scale=1024.0),
        observe=False,
    )
    reasons = [stepper.step(loss_fn, x).reason for x in make_batches(rank)]
    return Ended(is_finite(model), reasons)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.float().square().mean()
