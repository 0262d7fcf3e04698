"""Runs that are nearly the same: what one of them saved does not fit the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryConfusionMatrix, MulticlassConfusionMatrix

from faults import child
from halfstep import island
from halfstep.journal.events import Journal
from halfstep.recipe.names import Override
from halfstep.recipe.resolve import resolve_recipe
from halfstep.train import setup
from halfstep.train.loop import Loop
from halfstep.train.run import make_loop
from tests.support.tiny_task import Tiny

STEPS = 7


class Net(nn.Module):
    """Two layers of one shape between a first and a last, and whatever a variant makes of them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, width), nn.Linear(width, 1)
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.between = nn.Identity()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.right(self.between(self.left(self.first(x).tanh()))).tanh())
        return out * self.scale.float()


def missing() -> Net:
    net = Net()
    net.right = nn.Linear(16, 16, bias=False)
    return net


def extra() -> Net:
    net = Net()
    net.between = nn.Linear(16, 16)
    return net


def renamed() -> Net:
    class Renamed(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.right(self.left(self.first(x).tanh())).tanh())
            return out * self.scale.float()

    net = Renamed()
    net.head, net.last = net.last, None  # type: ignore[assignment]
    return net


def narrow() -> Net:
    return Net(12)


def wide_buffer() -> Net:
    net = Net()
    net.scale = net.scale.double()  # type: ignore[has-type]
    return net


def tied() -> Net:
    net = Net()
    net.right.weight = net.left.weight
    return net


def normalised() -> Net:
    net = Net()
    net.between = nn.BatchNorm1d(16)
    return net


def with_island() -> Net:
    return island(Net(), "last")


@dataclass(frozen=True)
class Kind:
    """One of the two runs of a pair."""

    net: Callable[[], nn.Module] = Net
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: Callable[[], Any] = lambda: BinaryConfusionMatrix()
    one_group: bool = False


PAIRS: dict[str, tuple[Kind, Kind]] = {
    "a key is missing": (Kind(missing), Kind()),
    "a key is too many": (Kind(extra), Kind()),
    "a key has another name": (Kind(renamed), Kind()),
    "another shape": (Kind(narrow), Kind()),
    "another type": (Kind(wide_buffer), Kind()),
    "weights were tied": (Kind(tied), Kind()),
    "another optimizer": (Kind(settings={"optimizer.name": "sgd"}), Kind()),
    "other groups of parameters": (Kind(one_group=True), Kind()),
    "others are frozen": (Kind(settings={"model.freeze": ["left"]}), Kind(settings={"model.freeze": ["right"]})),
    "an average": (Kind(settings={"train.ema": 0.9}), Kind(settings={"train.ema": None})),
    "another schedule": (Kind(settings={"schedule.name": "step"}), Kind()),
    "statistics of batches": (Kind(normalised), Kind()),
    "an island": (Kind(with_island), Kind()),
    "other metrics": (Kind(metrics=lambda: MulticlassConfusionMatrix(3)), Kind()),
}
"""What saved, and what is to go on."""


class _Variant(Tiny):
    kind: Kind

    def model(self) -> nn.Module:
        return self.kind.net()

    def metrics(self) -> MetricCollection:
        return MetricCollection({"table": self.kind.metrics()})


def loop_of(kind: Kind, folder: Path) -> Loop:
    """A run of this kind, ready for its first step."""
    settings = {**child.RECIPE, "model.batchnorm": False, "checkpoint.background": False, **kind.settings}
    overrides = [Override(key, value) for key, value in settings.items() if key != "task"]
    recipe = resolve_recipe({"task": "tiny"}, Tiny.schema, overrides, "pair").recipe
    task = _Variant(recipe)
    task.kind = kind
    folder.mkdir(exist_ok=True)
    with _grouped(kind.one_group):
        return make_loop(task, recipe, folder, Journal())


def saved_by(kind: Kind, folder: Path) -> None:
    """A checkpoint of such a run, after a few steps."""
    loop = loop_of(kind, folder)
    list(islice(loop.attempts(), STEPS))
    loop.checkpoints.save()
    loop.checkpoints.finish()
    loop.checkpoints.close()


@contextmanager
def _grouped(together: bool) -> Iterator[None]:
    own = setup.make_optimizer
    if together:
        setup.make_optimizer = lambda options, model: optim.AdamW(model.parameters(), lr=options.lr)
    try:
        yield
    finally:
        setup.make_optimizer = own
