"""Batches that hold what no model can use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plants.models import Masked, Perceptron, batch_for, squares
from benchmarks.plants.plant import Scene
from halfstep import Window


def pixel(model: Callable[[], nn.Module], value: float) -> Callable[[], Scene]:
    """One number of sample 3."""

    def make() -> Scene:
        built = model()
        x, y = batch_for(built)
        x[3].view(-1)[5] = value
        return Scene(built, squares, (x, y))

    return make


def nan_target() -> Scene:
    """In the second of three micro-batches, which are dicts."""
    batches = [{"input": torch.randn(4, 8), "target": torch.randn(4, 4)} for _ in range(3)]
    batches[1]["target"][2, 1] = torch.nan

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return squares(model, (batch["input"], batch["target"]))

    return Scene(Perceptron(), loss_fn, Window(batches))


def label_weight() -> Scene:
    batch = {"input": torch.randn(6, 8), "target": torch.randn(6, 4), "weight": torch.ones(6)}
    batch["weight"][4] = torch.inf

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        error = (model(batch["input"]).float() - batch["target"]).square().mean(-1)
        return (error * batch["weight"]).mean()

    return Scene(Perceptron(), loss_fn, batch)


def written_in_place() -> Scene:
    """The loss clears what it did not like, too late for this step and in time for the next look."""
    x, y = torch.randn(6, 8), torch.randn(6, 4)
    x[1, 1] = torch.nan

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = squares(model, (batch[0].clone(), batch[1]))
        batch[0].nan_to_num_()
        return loss

    return Scene(Perceptron(), loss_fn, (x, y))


def mask_in_the_batch() -> Scene:
    """The batch has -inf in it, and that is healthy; the second layer's scores are not."""
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    batch = {"input": torch.randn(6, 5, 8), "mask": mask.expand(6, 5, 5).contiguous(), "target": torch.randn(6, 4)}

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["input"], batch["mask"]).float() - batch["target"]).square().mean()

    return Scene(Masked(gain=1e7), loss_fn, batch)


def count_of_zero() -> Scene:
    """Finite numbers, of which the third micro-batch has a zero to divide by."""
    batches = [{"input": torch.randn(4, 8), "target": torch.randn(4, 4), "count": torch.ones(4)} for _ in range(3)]
    batches[2]["count"][1] = 0.0

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        error = (model(batch["input"]).float() - batch["target"]).square().mean(-1)
        return (error / batch["count"]).mean()  # count of zero

    return Scene(Perceptron(), loss_fn, Window(batches))


def written_in_an_object() -> Scene:
    """As `written_in_place`, in a batch of a person's own class."""
    scene = written_in_place()
    x, y = scene.batch

    def loss_fn(model: nn.Module, batch: SimpleNamespace) -> Any:
        return scene.loss_fn(model, (batch.x, batch.y))

    return Scene(scene.model, loss_fn, SimpleNamespace(x=x, y=y))


def read_once() -> Scene:
    """A batch that is empty when it is looked at again."""

    def loss_fn(model: nn.Module, batch: Iterator[tuple[Tensor, Tensor]]) -> Any:
        return squares(model, next(batch)) * torch.nan

    return Scene(Perceptron(), loss_fn, iter([(torch.randn(6, 8), torch.randn(6, 4))]))


def own_random_numbers() -> Scene:
    """The loss draws from a generator of its own: first a negative number, then positive ones."""
    own = torch.Generator().manual_seed(303)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        drawn = torch.randn(1, generator=own)
        return squares(model, batch) + drawn.log().mean()  # own random numbers

    return Scene(Perceptron(), loss_fn, (torch.randn(6, 8), torch.randn(6, 4)))
