"""Define the protocol between a task and the training loop: model, data, loss, metrics and pictures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn
from torch.utils.data import default_collate

from halfstep.data.dataset import Sample, Source
from halfstep.precision.precision import Precision
from halfstep.recipe.schema import DataOptions, LossOptions, ModelOptions, Recipe
from halfstep.status_line import OnProgress
from halfstep.train.metrics import Metrics

if TYPE_CHECKING:
    from halfstep.train.signature import Signature

Split = Literal["train", "val"]
Picture = np.ndarray[Any, Any]
"""Height × width × 3, uint8."""


def ignore_progress(done: int, of: int) -> None:
    """Ignore the progress."""


class MissingTaskMethod(NotImplementedError):
    """A method that a task does not implement.

    torch raises plain NotImplementedError too, if a device lacks an operation: hence a separate class.
    """


@dataclass(frozen=True)
class Prediction:
    """The output of a model for one input: values for a table, and pictures where there are any."""

    values: Mapping[str, object] = field(default_factory=dict)
    mask: np.ndarray[Any, Any] | None = None
    """Height × width, a class number for each pixel."""
    overlay: Picture | None = None
    frames: Sequence[Picture] = ()
    """Successive pictures for an animation."""
    legend: Sequence[tuple[str, tuple[int, int, int]]] = ()
    """The meaning of the colors in the overlay."""


@dataclass(frozen=True)
class SampleDisplay:
    """A sample for display: pictures of one size by their headings, and a caption."""

    panels: Mapping[str, Picture]
    caption: str = ""
    frame: tuple[int, int, int] | None = None
    """The color of a frame around a single picture."""


@dataclass(frozen=True)
class BatchQuality:
    """The quality of the outputs for a batch, on their own device: reading it synchronizes."""

    counts: Tensor
    """Images or pixels of the batch, by their true class and by the predicted one."""
    figures: Mapping[str, Tensor]
    """Numbers for each sample, by name."""
    quality: Tensor
    """One number for each sample; the smallest is the worst."""
    classes: Mapping[str, Tensor] = field(default_factory=dict)
    """Class numbers for each sample, such as the true one, by name."""


class Task(ABC):
    """A task. It knows no dtype and no device: parts that must stay in fp32 are an `island`, wide sums use `widen`."""

    schema: ClassVar[Any] = Recipe[ModelOptions, DataOptions, LossOptions]
    """The recipe of this task: `Recipe[MyModel, MyData, MyLoss]`."""
    metric: ClassVar[str]
    """The metric that decides which weights are best; `loss` is allowed."""
    higher_is_better: ClassVar[bool] = True
    resolution: ClassVar[str] = ""
    """The setting that the time of a step grows with the square of, such as `data.size`; empty if there is none."""
    forward_methods: ClassVar[Sequence[str]] = ()
    """Methods of the model that `loss` or `pictures` call, besides `forward`: FSDP2 gathers its weights for them."""
    reads: ClassVar[Literal["images", "text"]] = "images"
    """What `predict` takes."""
    tiny: ClassVar[Mapping[str, object]] = {}
    """Sections of a recipe for a small model on synthetic data, used by the contract tests."""

    def __init__(self, recipe: Any) -> None:
        self.begin(recipe)

    def begin(self, recipe: Any) -> None:
        """Set the recipe of a run, and derive from it; called again for tasks that are passed to `fit` as objects."""
        self.recipe = recipe

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample, in which throughput is then reported."""
        return None

    @property
    def generates(self) -> bool:
        """Whether the model draws samples from noise alone, so that `halfstep predict RUN` takes no folder."""
        return False

    def facts(self) -> dict[str, Any]:
        """Return the facts needed to predict without the data, such as class names: plain data, saved with a run."""
        return {}

    def remember(self, facts: Mapping[str, Any]) -> None:  # noqa: B027 - most tasks have nothing to remember
        """Load what `facts` returned when the model was trained; called before anything else."""

    def resume(self, facts: Mapping[str, Any]) -> None:  # noqa: B027 - most tasks decide nothing at a run's start
        """Keep what an earlier launch of this run decided; `facts` are its facts. Called before the data is read."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model, with random or `pretrained` weights by `recipe.model.weights`; the loop loads files."""

    def store_frozen(self, model: nn.Module, precision: Precision) -> list[str]:
        """Store frozen weights in a format that this precision computes with; return lines about it.

        A task whose `ready` calls this trains and predicts with the same weights.
        """
        return []

    def ready(self, model: nn.Module, precision: Precision, on_progress: OnProgress = ignore_progress) -> list[str]:
        """Do one-time measurements and computations with the model on its device; return lines for the run's start.

        Every rank calls it before the first step, also of a resumed run, whose buffers are restored afterward.
        """
        return []

    @abstractmethod
    def source(self, split: Split) -> Source:
        """Return the source of the samples of a split."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Sample, metrics: Metrics | None = None) -> Any:
        """Return the loss or `Counted(sum, count)`, and pass outputs and targets to `metrics` where given."""

    def transform(self, split: Split, sample: Sample) -> Sample:
        """Return the sample as the model takes it: cropped, flipped, scaled. Runs in the workers."""
        return sample

    def collate(self, split: Split, samples: list[Sample]) -> Sample:
        """Collate samples into a batch. Runs in the workers."""
        batch: Sample = default_collate(samples)
        return batch

    def metrics(self) -> Metrics:
        """Return new metrics, which accumulate in fp32 or wider; a MetricCollection of torchmetrics works too."""
        return Metrics()

    def pictures(self, model: nn.Module, batch: Sample) -> list[Picture]:
        """Return pictures of the model's outputs for a validation batch."""
        return []

    def shown(self, model: nn.Module, batch: Sample) -> list[SampleDisplay]:
        """Return the pictures with headings and captions, for tasks that have them."""
        return [SampleDisplay({"": picture}) for picture in self.pictures(model, batch)]

    def legend(self) -> list[tuple[str, tuple[int, int, int]]]:
        """Return the meaning of the colors in the pictures."""
        return []

    def judge(self, said: Tensor, truth: Tensor) -> BatchQuality:
        """Return the quality of each output of a batch; `said` and `truth` are what the metrics get."""
        raise MissingTaskMethod(f"{type(self).__name__} does not score single samples")

    def signature(self) -> Signature:
        """Return a description of the model's inputs and outputs, for use of its weights elsewhere."""
        raise MissingTaskMethod(f"{type(self).__name__} has no signature for its model's input")

    def predict(self, model: nn.Module, image: Tensor) -> Prediction:
        """Return the prediction for one image as read from its file, channels × height × width; or for a prompt."""
        raise MissingTaskMethod(f"{type(self).__name__} predicts nothing")

    def prompt(self, text: str) -> Tensor:
        """Return a text as `predict` takes it, for tasks that read text."""
        raise MissingTaskMethod(f"{type(self).__name__} reads no text")

    def write_folder(self, model: nn.Module, folder: Path, merge: bool = False) -> list[str]:
        """Write the model to a new folder in the layout of another library, verify it, and return lines about it.

        With `merge`, an adapter becomes a part of the weights.
        """
        raise MissingTaskMethod(f"{type(self).__name__} has no layout of another library")

    def sample(self, model: nn.Module, count: int, on_progress: OnProgress) -> list[Picture]:
        """Return pictures that the model generates; randomness comes from torch's default generator."""
        raise MissingTaskMethod(f"{type(self).__name__} does not generate samples")
