"""The same batches: a skipped step leaves buffers as they were, too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome
from zoo.p09_batchnorm_keeps_what_was_skipped.plain import judge, make_batches, make_model


def run() -> Outcome:
    model = make_model()
    stepper = halfstep.Stepper(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        precision="fp16",
        loss_scale=halfstep.DynamicScale(init_scale=128.0),
    )
    reports = [stepper.step(loss_fn, x) for x in make_batches()]
    counted = model[1].num_batches_tracked.item()
    outcome = judge(model, reports[-1].loss)
    return Outcome(
        good=outcome.good and counted == stepper.counts.applied,
        seen=f"{outcome.seen}; {stepper.counts.applied} of {len(reports)} batches applied, BatchNorm counted {counted}",
    )


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()
