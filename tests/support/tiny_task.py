"""A task that trains in milliseconds: a small network learns a curve from sixteen points at a time."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from halfstep.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.train.task import Split, Task


class Model(ModelOptions):
    width: int = 16
    """Hidden numbers."""
    batchnorm: bool = False
    """Normalize the hidden numbers."""


class Data(DataOptions):
    samples: int = 64
    """Points for training; a quarter as many for validation."""
    nan: list[int] = Field(default=[])
    """Training points that are not finite."""
    poison: str = "nan"
    """What they hold: nan, inf or -inf."""
    where: int = 0
    """In which of their two numbers."""
    unreadable: list[int] = Field(default=[])
    """Training points that cannot be read."""
    unreadable_val: list[int] = Field(default=[])
    """Validation points that cannot be read."""


class Points:
    def __init__(self, samples: int, seed: int, unreadable: list[int]) -> None:
        self.x = torch.rand(samples, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self.y = (self.x.prod(1, keepdim=True) * 2).sin()
        self.unreadable = unreadable

    def __len__(self) -> int:
        return len(self.x)

    def read(self, index: int) -> dict[str, Tensor]:
        if index in self.unreadable:
            from halfstep.data.dataset import BadSample

            raise BadSample(self.name(index), "not readable in this test")
        return {"x": self.x[index], "y": self.y[index]}

    def name(self, index: int) -> str:
        return f"point {index}"


class Tiny(Task):
    schema: ClassVar[Any] = Recipe[Model, Data, LossOptions]
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False

    def model(self) -> nn.Module:
        width = self.recipe.model.width
        middle = [nn.BatchNorm1d(width)] if self.recipe.model.batchnorm else []
        return nn.Sequential(nn.Linear(2, width), *middle, nn.Tanh(), nn.Linear(width, 1))

    def source(self, split: Split) -> Points:
        data = self.recipe.data
        if split == "val":
            return Points(data.samples // 4, 2, data.unreadable_val)
        points = Points(data.samples, 1, data.unreadable)
        points.x[data.nan, data.where] = float(data.poison)
        return points

    def loss(self, model: nn.Module, batch: dict[str, Tensor], metrics: Any = None) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])
