"""The same micro-batches in windows; the norm is in the report, and the short window counts as what it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome
from zoo.p10_unscaling_inside_an_accumulation_window.right import WINDOW, microbatches, right_weight, start


def run() -> Outcome:
    model = nn.Linear(4, 1, bias=False)
    model.weight.data = start()
    stepper = halfstep.Stepper(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        precision="fp16",
        loss_scale=halfstep.DynamicScale(init_scale=1024.0),
    )
    reports = [stepper.step(loss_fn, window) for window in halfstep.windows(microbatches(), WINDOW)]
    error = (model.weight.detach() - right_weight()).norm() / (start() - right_weight()).norm()
    return Outcome(
        good=error.item() < 0.01 and all(report.applied for report in reports),
        seen=f"{len(reports)} windows applied, the short one too; the weights miss {error.item():.1%} of their way",
    )


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x).float(), y)
