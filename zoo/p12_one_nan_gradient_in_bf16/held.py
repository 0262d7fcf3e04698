"""The finite check guards every precision, and a NaN never reaches the clipping."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from halfstep.precision.precision import resolve_precision_name
from zoo.outcome import Outcome
from zoo.p12_one_nan_gradient_in_bf16.plain import Recommender, judge, loss_of

BF16 = resolve_precision_name("bf16")
"""The precision itself, not its name: that would become fp32 on a CPU that only emulates bf16."""


def run() -> Outcome:
    torch.manual_seed(0)
    model = Recommender()
    stepper = halfstep.Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-2), precision=BF16, clip_norm=1.0)
    bad = stepper.step(loss_fn, torch.arange(16))
    outcome = judge(model, bad.loss)
    clean = stepper.step(loss_fn, torch.arange(1, 17))
    return Outcome(
        good=outcome.good and bad.reason == "gradient_not_finite" and clean.applied,
        seen=f"{outcome.seen}; skipped as {bad.reason}, the next batch applied: {clean.applied}",
    )


def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
    return loss_of(*model(ids))
