"""The protocol between a job and the loop: model, data, loss, metrics, and what to show."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn
from torch.utils.data import default_collate

from halfstep.precision.precision import Precision
from halfstep.train.data.source import Sample, Source
from halfstep.train.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Split = Literal["train", "val"]
Picture = np.ndarray[Any, Any]
"""Height × width × 3, uint8."""
Told = Callable[[int, int], None]
"""Hears how much of a long job is done, and of how much."""


def unheard(done: int, of: int) -> None:
    """Where nobody watches."""


class LeftOut(NotImplementedError):
    """A method that a task does without; torch raises the plain error too, where a device lacks an operation."""


@dataclass(frozen=True)
class Prediction:
    """What a model says about one input: values for a table, and pictures where there are any."""

    values: Mapping[str, object] = field(default_factory=dict)
    mask: np.ndarray[Any, Any] | None = None
    """Height × width, a class number for each pixel."""
    overlay: Picture | None = None
    frames: Sequence[Picture] = ()
    """Pictures that follow one another, for an animation."""


class Task(ABC):
    """A job. Knows no dtype and no device: what must stay in fp32 is an `island`, wide sums are `widen`ed."""

    schema: ClassVar[Any] = Recipe[ModelOptions, DataOptions, LossOptions]
    """The recipe of this task: `Recipe[MyModel, MyData, MyLoss]`."""
    metric: ClassVar[str]
    """The metric that decides which weights are best; `loss` is allowed."""
    higher_is_better: ClassVar[bool] = True
    tiny: ClassVar[Mapping[str, Any]] = {}
    """Sections of a recipe for a small model on drawn data: what the contract tests run."""

    def __init__(self, recipe: Any) -> None:
        self.begin(recipe)

    def begin(self, recipe: Any) -> None:
        """Take the recipe of a run; what is derived from it belongs here, for tasks given to `fit` as objects."""
        self.recipe = recipe

    def facts(self) -> dict[str, Any]:
        """What must be known to predict without the data, such as the names of classes: plain data, kept with a run."""
        return {}

    def remember(self, facts: Mapping[str, Any]) -> None:  # noqa: B027 - most tasks have nothing to remember
        """Take what `facts` gave when the model was trained; called before anything else."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The model, with random or `pretrained` weights as `recipe.model.weights` says; paths are read by the loop."""

    def ready(self, model: nn.Module, precision: Precision, told: Told = unheard) -> list[str]:
        """What is measured or computed once, with the model where it will run; the lines are told with the run's start.

        Called by every process before the first step, also of a run that goes on: its buffers are then restored.
        """
        return []

    @abstractmethod
    def source(self, split: Split) -> Source:
        """Where the samples of a split come from."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Sample, metrics: MetricCollection | None = None) -> Any:
        """The loss, or `(sum, count)`; tells `metrics`, where given, what the model said. Training and evaluation."""

    def transform(self, split: Split, sample: Sample) -> Sample:
        """From the disk to the model: crops, flips, numbers between 0 and 1. Runs in the workers."""
        return sample

    def collate(self, split: Split, samples: list[Sample]) -> Sample:
        """Samples to one batch. Runs in the workers."""
        batch: Sample = default_collate(samples)
        return batch

    def metrics(self) -> MetricCollection:
        """New metrics, which add up in fp32 or wider."""
        from torchmetrics import MetricCollection

        return MetricCollection({})

    def pictures(self, model: nn.Module, batch: Sample) -> list[Picture]:
        """What the model makes of a validation batch, for people to look at."""
        return []

    def predict(self, model: nn.Module, image: Tensor) -> Prediction:
        """What the model says about one image, channels × height × width, as it was read."""
        raise LeftOut(f"{type(self).__name__} predicts nothing")

    def sample(self, model: nn.Module, count: int, told: Told) -> list[Picture]:
        """Pictures that the model makes by itself; what is drawn at random comes from torch's own generator."""
        raise LeftOut(f"{type(self).__name__} makes nothing by itself")
