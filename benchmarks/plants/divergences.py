"""Runs that leave their path: the weights, the losses or the gradients have grown, and it can be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.plants.models import Plain, batch_for, squares
from benchmarks.plants.plant import Expected, Plant, Scene, plants

ALL, TWO = "fp16 bf16 fp32", "bf16 fp32"
MANY = 200


def _run(loss_fn: Callable[..., Any], rate: float, **given: Any) -> Scene:
    model = Plain()
    return Scene(model, loss_fn, batch_for(model), rate=rate, steps=MANY, scale=256.0, **given)


def rewarded() -> Scene:
    """The sign of the loss is wrong: the larger the error, the better."""
    return _run(lambda model, batch: -squares(model, batch), 0.5)


def without_end() -> Scene:
    """Nothing keeps the output from growing."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = model(batch[0]).float()
        return -(out * out.abs()).mean()

    return _run(loss_fn, 0.5)


def momentum() -> Scene:
    def build(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), rate, momentum=0.99)

    return _run(squares, 20.0, optimizer=build)


def jump() -> Scene:
    """Ten healthy steps, then a schedule that multiplies the rate by a hundred thousand."""
    made: list[torch.optim.Optimizer] = []

    def build(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(model.parameters(), rate))
        return made[0]

    def before(step: int) -> None:
        if step == 10:
            made[0].param_groups[0]["lr"] *= 1e5

    return _run(squares, 1e-2, optimizer=build, before=before)


class Recurrent(nn.Module):
    """The same weights forty times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = self.step(x)
        return self.head(x)


def recurrent() -> Scene:
    model = Recurrent()
    return Scene(model, squares, batch_for(model), rate=30.0, steps=MANY, scale=256.0)


def _grown(times: float) -> Scene:
    """Five healthy steps, then an update that is far too large; gradients are finite, their squares are not."""
    model = Plain()

    def before(step: int) -> None:
        if step == 5:
            model.head.weight.data *= times

    return Scene(model, squares, batch_for(model), steps=8, scale=256.0, before=before)


def large_decay() -> Scene:
    """A weight decay with the wrong sign."""

    def build(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(model.parameters()), "weight_decay": 0.0}], rate)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        decay = sum((weight.float().square().sum() for weight in model.parameters()), torch.zeros(()))
        return squares(model, batch) - 2.0 * decay

    return _run(loss_fn, 0.5, optimizer=build)


def classifier(build: Callable[..., torch.optim.Optimizer], rate: float) -> Callable[[], Scene]:
    """Labels, and a rate that is thousands of times too high."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    def make() -> Scene:
        hidden = [layer for _ in range(2) for layer in (nn.Linear(32, 32), nn.ReLU())]
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), *hidden, nn.Linear(32, 4))
        batch = torch.randn(16, 8), torch.randint(4, (16,))
        return Scene(
            model,
            loss_fn,
            batch,
            rate=rate,
            steps=MANY,
            scale=256.0,
            optimizer=lambda model, rate: build(model.parameters(), rate),
        )

    return make


def all_of_them() -> list[Plant]:
    cause = Expected("divergence")
    return [
        *plants("rewarded", ALL, rewarded, cause),
        *plants("without_end", ALL, without_end, cause),
        *plants("momentum", ALL, momentum, cause),
        *plants("jump", ALL, jump, cause),
        *plants("recurrent", ALL, recurrent, cause),
        *plants("wrong_decay", ALL, large_decay, cause),
        *plants("classifier", ALL, classifier(torch.optim.SGD, 1e3), cause),
        *plants("classifier_with_adam", ALL, classifier(torch.optim.AdamW, 1e3), cause),
        *plants("grown_beyond_squares", TWO, lambda: _grown(1e15),
                Expected("divergence", words=("the largest weight",))),
        *plants("grown_a_lot", TWO, lambda: _grown(1e25), cause),
    ]  # fmt: skip
