"""Both optimizers in one step: the momentum and the weights change together, or not at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfstep
from zoo.outcome import Outcome
from zoo.p64_muon_momentum_takes_the_overflow.plain import judge, make_batches, make_model


def run() -> Outcome:
    model, hidden, others = make_model()
    muon = torch.optim.Muon(hidden, lr=0.02)
    stepper = halfstep.Stepper(
        model,
        {"muon": muon, "adamw": torch.optim.AdamW(others, lr=1e-3)},
        precision="fp16",
        loss_scale=halfstep.DynamicScale(init_scale=1024.0),
        observe=False,
    )
    reports = [stepper.step(loss_fn, x) for x in make_batches()]
    return judge(model, [muon], reports[-1].loss_scale)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.float().square().mean()
