"""A class for each image: any of timm's models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchvision.transforms import v2  # type: ignore[import-untyped]

from halfstep.errors import BadRecipe
from halfstep.precision.island import island
from halfstep.tasks import _pixels
from halfstep.tasks._sources import labelled
from halfstep.tasks.models.imagewise import expected_pixels, imagewise_model
from halfstep.tasks.options.classification import SCHEMA, Data
from halfstep.train.data.reading import scaled
from halfstep.train.data.source import Sample, Source
from halfstep.train.task import Picture, Prediction, Split, Task

RIGHT, WRONG = (0, 158, 115), (213, 94, 0)


class Classification(Task):
    schema: ClassVar[Any] = SCHEMA
    metric: ClassVar[str] = "top1"
    tiny: ClassVar[Mapping[str, Any]] = {
        "model": {"name": "resnet10t"},
        "data": {"name": "shapes", "size": 32, "samples": 20, "classes": 6, "crop": "shift", "mixup": 0.2},
        "loss": {"label_smoothing": 0.1},
    }

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        data = recipe.data
        if data.augment == "randaugment" and data.channels not in (1, 3):
            raise BadRecipe(
                f"data.augment=randaugment with data.channels={data.channels}",
                allowed="grey or colour: 1 or 3 channels",
                do="write data.augment=flip",
            )
        self.pixels = expected_pixels(recipe.model, data.channels)
        self._classes: list[str] = []
        self._sources: dict[Split, Source] = {}
        self._views: dict[Split, v2.Transform] = {"train": _varied(data), "val": _plain(data)}
        self._strong = v2.RandAugment() if data.augment == "randaugment" else nn.Identity()

    @property
    def classes(self) -> list[str]:
        """The names of the classes: remembered from training, or read from the data."""
        if not self._classes:
            self._read()
        return self._classes

    def facts(self) -> dict[str, Any]:
        return {"classes": self.classes, "mean": list(self.pixels.mean), "std": list(self.pixels.std)}

    def remember(self, facts: Mapping[str, Any]) -> None:
        self._classes = list(facts.get("classes", self._classes))
        mean, std = facts.get("mean", self.pixels.mean), facts.get("std", self.pixels.std)
        self.pixels = _pixels.Pixels(tuple(mean), tuple(std))

    def model(self) -> nn.Module:
        data = self.recipe.data
        return imagewise_model(self.recipe.model, data.channels, len(self.classes), data.size)

    def source(self, split: Split) -> Source:
        if not self._sources:
            self._read()
        return self._sources[split]

    def transform(self, split: Split, sample: Sample) -> Sample:
        # Few operations know 16-bit integers.
        image = sample["image"] if sample["image"].dtype == torch.uint8 else scaled(sample["image"])
        image = self._views[split](image)
        # Colours are kept between 0 and 1, which floating numbers in a file need not be.
        if split == "train" and not sample["image"].is_floating_point():
            image = self._strong(image)
        return {**sample, "image": self.pixels.normalised(image)}

    def collate(self, split: Split, samples: list[Sample]) -> Sample:
        batch: Sample = default_collate(samples)
        mixes = self._mixes() if split == "train" else []
        if not mixes:
            return batch
        image, label = v2.RandomChoice(mixes)(batch["image"], batch["label"])
        return {"image": image, "label": label}

    def loss(self, model: nn.Module, batch: Sample, metrics: MetricCollection | None = None) -> Tensor:
        logits = model(batch["image"])
        if metrics is not None:
            metrics.update(logits.detach(), _numbers(batch["label"]))
        return _cross_entropy(logits, batch["label"], self.recipe.loss.label_smoothing)

    def metrics(self) -> MetricCollection:
        classes = len(self.classes)
        # With five classes or fewer, one of the first five is always right.
        return MetricCollection(
            {
                f"top{k}": MulticlassAccuracy(classes, top_k=k, average="micro", validate_args=False)
                for k in (1, 5)
                if k == 1 or classes > k
            },
            compute_groups=False,
        )

    def pictures(self, model: nn.Module, batch: Sample) -> list[Picture]:
        """Images in a frame: green where the model is right, red where it is not."""
        right = (model(batch["image"]).argmax(1) == _numbers(batch["label"])).tolist()
        return [
            _framed(self.pixels.shown(image), RIGHT if ok else WRONG)
            for image, ok in zip(batch["image"], right, strict=True)
        ]

    @torch.no_grad()
    def predict(self, model: nn.Module, image: Tensor) -> Prediction:
        device = next(model.parameters()).device
        batch = self.transform("val", {"image": image})["image"].unsqueeze(0).to(device)
        scores, numbers = _chances(model(batch))[0].topk(min(5, len(self.classes)))
        best = [(self.classes[n], score) for n, score in zip(numbers.tolist(), scores.tolist(), strict=True)]
        return Prediction(
            values={
                "class": best[0][0],
                "score": best[0][1],
                "top5": ", ".join(f"{name} {score:.3f}" for name, score in best),
            }
        )

    def _read(self) -> None:
        self._sources, names = labelled(self.recipe.data)
        self._classes = self._classes or names

    def _mixes(self) -> list[v2.Transform]:
        kinds = ((v2.MixUp, self.recipe.data.mixup), (v2.CutMix, self.recipe.data.cutmix))
        return [kind(alpha=alpha, num_classes=len(self.classes)) for kind, alpha in kinds if alpha > 0]


@island
def _cross_entropy(logits: Tensor, label: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, label, label_smoothing=smoothing)


@island
def _chances(logits: Tensor) -> Tensor:
    return logits.softmax(1)


def _numbers(label: Tensor) -> Tensor:
    """Class numbers; of mixed labels, the larger part."""
    return label.argmax(1) if label.ndim == 2 else label


def _varied(data: Data) -> v2.Transform:
    """What training sees."""
    if data.augment == "none":
        return _plain(data)
    steps: list[nn.Module] = []
    if data.crop == "resize":
        steps.append(v2.RandomResizedCrop(data.size, antialias=True))
    else:
        steps += [_plain(data), v2.RandomCrop(data.size, padding=data.size // 8)]
    steps.append(v2.RandomHorizontalFlip())
    return v2.Compose(steps)


def _plain(data: Data) -> v2.Transform:
    """What evaluation sees: the middle of an image. Photographs have a border of an eighth that is left out."""
    side = round(data.size / 0.875) if data.crop == "resize" else data.size
    return v2.Compose([v2.Resize(side, antialias=True), v2.CenterCrop(data.size)])


def _framed(picture: Picture, colour: tuple[int, int, int], width: int = 3) -> Picture:
    framed = picture.copy()
    for edge in (framed[:width], framed[-width:], framed[:, :width], framed[:, -width:]):
        edge[:] = colour
    return framed
