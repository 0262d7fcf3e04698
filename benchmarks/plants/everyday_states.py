"""Weights, statistics and attributes that were spoilt before a step began, where people have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.plants.models import Perceptron, Pictures, batch_for, squares
from benchmarks.plants.plant import Expected, Plant, Scene, plants

TWO, ONE = "bf16 fp32", "fp32"
GOOD = 3
"""Steps before something is spoilt."""


def _spoilt(
    model: nn.Module, spoil: Callable[[Any], object], loss_fn: Any = squares, batch: Any = None, **given: Any
) -> Scene:
    def before(step: int) -> None:
        if step == GOOD:
            with torch.no_grad():
                spoil(model)

    batch = batch_for(model) if batch is None else batch
    return Scene(model, loss_fn, batch, steps=GOOD + 2, scale=256.0, before=before, **given)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[:, None].expand(-1, 3, -1))[0][:, -1])


def recurrent_weight() -> Scene:
    return _spoilt(Recurrent(), lambda m: m.rnn.weight_hh_l0[2].fill_(torch.nan))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8)) for _ in range(3))
        self.heads = nn.ModuleDict({"main": nn.Linear(8, 4), "other": nn.Linear(8, 4)})
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return self.gain * (self.heads["main"](x) + self.heads["other"](x))


class Positions(nn.Module):
    """A table of positions that is neither a weight nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.table = torch.randn(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x) + self.table)


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def tied_row() -> Scene:
    ids = torch.arange(6)
    return _spoilt(
        Tied(),
        lambda m: m.table.weight[4].fill_(torch.nan),
        lambda m, b: F.cross_entropy(m(b[0]).float(), b[1]),
        (ids, ids.flip(0)),
    )


def teacher_statistics() -> Scene:
    """The running variance of a teacher in eval mode, which only the loss function holds."""
    teacher = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval().requires_grad_(False)

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return (m(b[0]).float() - teacher(b[0]).float()).square().mean()

    return _spoilt(Perceptron(), lambda _: teacher[1].running_var.fill_(torch.nan), loss_fn)


def criterion_weights() -> Scene:
    """Class weights of a criterion, as a buffer of it."""
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4))
    labels = torch.tensor([0, 1, 2, 3, 0, 1])

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return criterion(m(b[0]).float(), labels)

    return _spoilt(Perceptron(), lambda _: criterion.weight.fill_(torch.nan), loss_fn)


def momentum_of_sgd() -> Scene:
    """A momentum that a damaged checkpoint left infinite: the next update makes the weight so."""
    made: list[torch.optim.Optimizer] = []

    def build(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(model.parameters(), rate, momentum=0.9))
        return made[0]

    def spoil(model: Any) -> None:
        made[0].state[model.head.bias]["momentum_buffer"].fill_(torch.inf)

    return _spoilt(Perceptron(), spoil, optimizer=build)


def loaded_in_the_middle() -> Scene:
    """A state_dict that is loaded between two steps, as a restart from another run does."""
    model = Perceptron()
    other = {name: value.clone() for name, value in model.state_dict().items()}
    other["body.0.bias"][3] = torch.nan
    return _spoilt(model, lambda m: m.load_state_dict(other))


def from_a_damaged_file() -> Scene:
    model = Pictures()
    model.normal.running_mean.fill_(torch.nan)
    model.normal.eval()
    return Scene(model, squares, batch_for(model), scale=256.0, checkpoint="epoch-7.ckpt")


def negative_in_pictures() -> Scene:
    def spoil(model: Any) -> None:
        model.normal.eval()
        model.normal.running_var[2] = -0.5

    return _spoilt(Pictures(), spoil)


def weight_norm_of_nothing() -> Scene:
    """A parametrised weight whose magnitude is NaN."""
    model = Perceptron()
    nn.utils.parametrizations.weight_norm(model.head)
    return _spoilt(model, lambda m: m.head.parametrizations.weight.original0.fill_(torch.nan))


def all_of_them() -> list[Plant]:
    last = (f"step {GOOD}, the last that was applied",)

    def state(outside: str | None, *words: str) -> Expected:
        return Expected("state", outside=outside, words=words)

    return [
        *plants("recurrent_weight", ONE, recurrent_weight, state("weight rnn.weight_hh_l0", "row 2", *last)),
        *plants("group_norm_scale", TWO, lambda: _spoilt(Grouped(), lambda m: m.blocks[1][1].weight.fill_(torch.inf)),
                state("weight blocks.1.1.weight", *last)),
        *plants("one_of_two_heads", TWO, lambda: _spoilt(Grouped(), lambda m: m.heads["other"].bias.fill_(torch.nan)),
                state("weight heads.other.bias", *last)),
        *plants("single_number", TWO, lambda: _spoilt(Grouped(), lambda m: m.gain.fill_(torch.nan)),
                state("weight gain", *last)),
        *plants("table_of_positions", TWO, lambda: _spoilt(Positions(), lambda m: m.table[:2].fill_(torch.nan)),
                state("tensor table", *last)),
        *plants("tied_row", TWO, tied_row, state("weight table.weight", "in row 4", *last)),
        *plants("teacher_statistics", TWO, teacher_statistics, state("buffer teacher.1.running_var", *last)),
        *plants("criterion_weights", TWO, criterion_weights, state("buffer criterion.weight", *last)),
        *plants("momentum_of_sgd", TWO, momentum_of_sgd, state("weight head.bias", f"step {GOOD + 1}, the last")),
        *plants("loaded_in_the_middle", TWO, loaded_in_the_middle, state("weight body.0.bias", *last)),
        *plants("from_a_damaged_file", TWO, from_a_damaged_file,
                state("buffer normal.running_mean", "came with the checkpoint epoch-7.ckpt")),
        *plants("negative_in_pictures", TWO, negative_in_pictures, state("buffer normal.running_var", "negative")),
        *plants("weight_norm_of_nothing", ONE, weight_norm_of_nothing, state(None)),
    ]  # fmt: skip
