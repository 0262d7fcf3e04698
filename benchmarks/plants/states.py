"""Weights and statistics that are bad before a step begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plants.models import Perceptron, Pictures, batch_for, squares
from benchmarks.plants.plant import Expected, Plant, Scene, plants

TWO = "bf16 fp32"
GOOD = 4
"""Steps before something is spoilt."""


def _spoilt(model: nn.Module, spoil: Callable[[Any], object], loss_fn: Any = squares, at: int = GOOD) -> Scene:
    def before(step: int) -> None:
        if step == at:
            with torch.no_grad():
                spoil(model)

    return Scene(model, loss_fn, batch_for(model), steps=at + 2, scale=256.0, before=before)


class Words(nn.Module):
    """A table of words, of which each batch looks up a few."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def bad_word() -> Scene:
    """Row 7 of the table is NaN from the beginning, and the third batch is the first to ask for it."""
    model = Words()
    model.table.weight.data[7] = torch.nan
    target = torch.randn(4, 4)
    batches = [(torch.tensor([1, 2, 3, 4]), target), (torch.tensor([5, 6, 7, 8]), target)]
    return Scene(model, squares, batches[0], steps=4, scale=256.0, batch_at=lambda step: batches[step >= 2])


def bad_teacher() -> Scene:
    """A second network that only the loss function knows."""
    teacher = nn.Linear(8, 4)
    model = Perceptron()

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            target = teacher(batch[0])
        return (model(batch[0]).float() - target).square().mean()

    return _spoilt(model, lambda _: teacher.weight.fill_(torch.nan), loss_fn)


class Centered(nn.Module):
    """Takes a center away that is registered nowhere, as that of a teacher often is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.center = nn.Linear(8, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) - self.center


class Running(nn.Module):
    """Statistics by hand, under the name that everybody gives them."""

    running_var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x / (self.running_var + 1e-5).sqrt())


class Normal(nn.Module):
    """Batch statistics that are not learned any more."""

    def __init__(self) -> None:
        super().__init__()
        self.normal, self.head = nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.normal(x))


def from_a_checkpoint() -> Scene:
    """The run goes on from a checkpoint in which a bias is NaN."""
    model = Perceptron()
    saved = model.state_dict()
    saved["head.bias"] = torch.full_like(saved["head.bias"], torch.nan)
    model.load_state_dict(saved)
    return Scene(model, squares, batch_for(model), scale=256.0, checkpoint="step-00000400")


def from_the_beginning() -> Scene:
    """An initialization that divides by a fan-in of 0."""
    model = Perceptron()
    model.head.weight.data.fill_(torch.inf)
    return Scene(model, squares, batch_for(model), scale=256.0)


def frozen() -> Scene:
    model = Perceptron()
    model.body[0].weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    return _spoilt(model, lambda model: model.body[0].weight[0].fill_(torch.nan))


def spoilt_by_the_optimizer() -> Scene:
    """A second moment below zero, as a damaged checkpoint has it: the update makes NaN of its root."""
    model = Perceptron()
    made: list[torch.optim.Optimizer] = []

    def build(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(model.parameters(), rate))
        return made[0]

    def before(step: int) -> None:
        if step == GOOD:
            made[0].state[model.head.weight]["exp_avg_sq"].fill_(-1.0)

    return Scene(model, squares, batch_for(model), steps=GOOD + 3, scale=256.0, before=before, optimizer=build)


def all_of_them() -> list[Plant]:
    later, first = (f"step {GOOD}, the last that was applied",), ("before the first step",)
    return [
        *plants("bad_word", TWO, bad_word,
                Expected("state", outside="weight table.weight", words=("in row 7", "or did not use it"))),
        *plants("bad_teacher", TWO, bad_teacher, Expected("state", outside="weight teacher.weight", words=later)),
        *plants("bad_center", TWO, lambda: _spoilt(Centered(), lambda m: m.center.fill_(torch.nan)),
                Expected("state", outside="tensor center", words=later)),
        *plants("bad_mean", TWO, lambda: _spoilt(Normal(), lambda m: m.normal.running_mean.fill_(torch.nan)),
                Expected("state", outside="buffer normal.running_mean", words=later)),
        *plants("infinite_variance", TWO, lambda: _spoilt(Normal(), lambda m: m.normal.running_var.fill_(torch.nan)),
                Expected("state", outside="buffer normal.running_var", words=later)),
        *plants("negative_by_hand", TWO, lambda: _spoilt(Running(), lambda m: m.running_var.fill_(-2.0)),
                Expected("state", outside="buffer running_var", words=("negative",))),
        *plants("bad_scale_of_a_norm", TWO, lambda: _spoilt(Perceptron(), lambda m: m.body[2].weight.fill_(torch.nan)),
                Expected("state", outside="weight body.2.weight", words=later)),
        *plants("bad_bias", TWO, lambda: _spoilt(Perceptron(), lambda m: m.head.bias.fill_(-torch.inf)),
                Expected("state", outside="weight head.bias", words=later)),
        *plants("bad_filter", TWO, lambda: _spoilt(Pictures(), lambda m: m.second.weight[1].fill_(torch.nan)),
                Expected("state", outside="weight second.weight", words=later)),
        *plants("from_a_checkpoint", TWO, from_a_checkpoint,
                Expected("state", outside="weight head.bias", words=("came with the checkpoint step-00000400",))),
        *plants("from_the_beginning", TWO, from_the_beginning,
                Expected("state", outside="weight head.weight", words=first)),
        *plants("frozen", TWO, frozen, Expected("state", outside="weight body.0.weight", words=later)),
        *plants("spoilt_by_the_optimizer", TWO, spoilt_by_the_optimizer,
                Expected("state", outside="weight head.weight", words=(f"step {GOOD + 1}, the last",))),
    ]  # fmt: skip
