"""Image classification with any timm model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchvision.transforms import v2  # type: ignore[import-untyped]

from halfstep.data.dataset import Sample, Source
from halfstep.data.image_io import scale_to_unit_range
from halfstep.precision.island import island
from halfstep.tasks.models.timm_models import build_timm_model, choose_pixel_normalization
from halfstep.tasks.options.classification import SCHEMA, ClassificationData, check
from halfstep.tasks.shared import images
from halfstep.tasks.shared.confusion import count_confusion
from halfstep.tasks.shared.sources import build_labeled_sources
from halfstep.train.metrics import Metrics, TopK
from halfstep.train.signature import Preprocessing, Signature
from halfstep.train.task import BatchQuality, Prediction, SampleDisplay, Split, Task

RIGHT, WRONG = (0, 158, 115), (213, 94, 0)


class Classification(Task):
    """A task that predicts one class per image; mixup, cutmix and RandAugment are optional."""

    schema: ClassVar[Any] = SCHEMA
    metric: ClassVar[str] = "top1"
    resolution: ClassVar[str] = "data.size"
    tiny: ClassVar[Mapping[str, object]] = {
        "model": {"name": "resnet10t"},
        "data": {"name": "shapes", "size": 32, "samples": 20, "classes": 6, "crop": "shift", "mixup": 0.2},
        "loss": {"label_smoothing": 0.1},
    }

    def begin(self, recipe: Any) -> None:
        """Check the recipe and build the transforms. Raise `BadRecipe` for settings that exclude each other."""
        super().begin(recipe)
        check(recipe)
        data = recipe.data
        self._expect(choose_pixel_normalization(recipe.model, data.channels))
        self._classes: list[str] = []
        self._sources: dict[Split, Source] = {}
        self._varied = _build_training_transform(data, self.preprocessing.resized)
        self._strong = v2.RandAugment() if data.augment == "randaugment" else nn.Identity()

    @property
    def classes(self) -> list[str]:
        """Return the class names, either restored from a finished run or read from the data."""
        if not self._classes:
            self._read()
        return self._classes

    def facts(self) -> dict[str, Any]:
        """Return the class names and the normalization, which predicting needs without the data."""
        return {"classes": self.classes, "mean": list(self.pixels.mean), "std": list(self.pixels.std)}

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Restore the class names and the normalization of a run."""
        self._classes = list(facts.get("classes", self._classes))
        mean, std = facts.get("mean", self.pixels.mean), facts.get("std", self.pixels.std)
        self._expect(images.PixelNormalization(tuple(mean), tuple(std)))

    def model(self) -> nn.Module:
        """Return the timm model of the recipe."""
        data = self.recipe.data
        return build_timm_model(self.recipe.model, data.channels, len(self.classes), data.size)

    def source(self, split: Split) -> Source:
        """Return the samples of a split; the data is read on the first call."""
        if not self._sources:
            self._read()
        return self._sources[split]

    def transform(self, split: Split, sample: Sample) -> Sample:
        """Crop, augment and normalize the image of a sample."""
        if split == "val":
            image = self.preprocessing.resized(sample["image"])
        else:
            # Few torchvision transforms support 16-bit integers.
            image = self._varied(
                sample["image"] if sample["image"].dtype == torch.uint8 else scale_to_unit_range(sample["image"])
            )
            # RandAugment clamps to 0..1, and floating-point images in a file may exceed that range.
            image = image if sample["image"].is_floating_point() else self._strong(image)
        return {**sample, "image": self.preprocessing.normalized(image)}

    def collate(self, split: Split, samples: list[Sample]) -> Sample:
        """Collate samples; training batches get mixup or cutmix, chosen at random per batch where both are on."""
        batch: Sample = default_collate(samples)
        # MixUp and CutMix combine samples, so they run here and not in `transform`.
        mixes = self._mixes() if split == "train" else []
        if not mixes:
            return batch
        image, label = v2.RandomChoice(mixes)(batch["image"], batch["label"])
        return {"image": image, "label": label}

    def loss(self, model: nn.Module, batch: Sample, metrics: Metrics | None = None) -> Tensor:
        """Return the cross-entropy of a batch."""
        logits = model(batch["image"])
        if metrics is not None:
            metrics.update(logits.detach(), _convert_to_class_indices(batch["label"]))
        return _compute_cross_entropy(logits, batch["label"], self.recipe.loss.label_smoothing)

    def metrics(self) -> Metrics:
        """Return the top-1 accuracy, and top-5 with more than five classes."""
        classes = len(self.classes)
        # With five classes or fewer, top-5 accuracy is always 1.
        return Metrics({f"top{k}": TopK(k) for k in (1, 5) if k == 1 or classes > k})

    def shown(self, model: nn.Module, batch: Sample) -> list[SampleDisplay]:
        """Return each image with its label and its prediction; the frame is green where the two agree."""
        scores, predicted = _compute_probabilities(model(batch["image"])).max(1)
        rows = zip(_convert_to_class_indices(batch["label"]).tolist(), predicted.tolist(), scores.tolist(), strict=True)
        return [
            SampleDisplay(
                {"": self.pixels.shown(image)},
                f"truth: {self.classes[truth]}\nanswer: {self.classes[answer]} ({score:.2f})",
                frame=RIGHT if answer == truth else WRONG,
            )
            for image, (truth, answer, score) in zip(batch["image"], rows, strict=True)
        ]

    def legend(self) -> list[tuple[str, tuple[int, int, int]]]:
        """Return the meaning of the frame colors."""
        return [("right", RIGHT), ("wrong", WRONG)]

    def judge(self, predicted: Tensor, truth: Tensor) -> BatchQuality:
        """Return confusion counts and per-sample scores; samples are ranked by the probability of their true class."""
        classes, chances = len(self.classes), _compute_probabilities(predicted)
        scores, answers = chances.max(1)
        right = chances.gather(1, truth.unsqueeze(1)).squeeze(1)
        counts = count_confusion(truth.unsqueeze(0), answers.unsqueeze(0), (classes, classes))[0]
        return BatchQuality(
            counts, {"score": scores, "score_of_truth": right}, right, {"truth": truth, "answer": answers}
        )

    def signature(self) -> Signature:
        """Return the preprocessing, the classes and the outputs of the model."""
        return Signature(self.preprocessing, list(self.classes), "class", len(self.classes))

    @torch.no_grad()
    def predict(self, model: nn.Module, image: Tensor) -> Prediction:
        """Return the most likely class of one image, its score, and the five best classes."""
        device = next(model.parameters()).device
        batch = self.transform("val", {"image": image})["image"].unsqueeze(0).to(device)
        scores, numbers = _compute_probabilities(model(batch))[0].topk(min(5, len(self.classes)))
        best = [(self.classes[n], score) for n, score in zip(numbers.tolist(), scores.tolist(), strict=True)]
        return Prediction(
            values={
                "class": best[0][0],
                "score": best[0][1],
                "top5": ", ".join(f"{name} {score:.3f}" for name, score in best),
            }
        )

    def _expect(self, pixels: images.PixelNormalization) -> None:
        data = self.recipe.data
        self.pixels = pixels
        # The shorter side before the center crop: photographs lose a border of one eighth (224 of 256 pixels, the
        # ImageNet convention); small images lose none.
        side = round(data.size / 0.875) if data.crop == "resize" else data.size
        self.preprocessing = Preprocessing(data.channels, pixels.mean, pixels.std, resize=side, crop=data.size)

    def _read(self) -> None:
        self._sources, names = build_labeled_sources(self.recipe.data, self._classes, self.recipe.store)
        # Names restored from a run win: the weights are ordered by them.
        self._classes = self._classes or names

    def _mixes(self) -> list[v2.Transform]:
        # With an alpha of 0 the Beta distribution is undefined; the transform is left out instead.
        kinds = ((v2.MixUp, self.recipe.data.mixup), (v2.CutMix, self.recipe.data.cutmix))
        return [kind(alpha=alpha, num_classes=len(self.classes)) for kind, alpha in kinds if alpha > 0]


@island
def _compute_cross_entropy(logits: Tensor, label: Tensor, smoothing: float) -> Tensor:
    # An island: the log-sum-exp of many classes loses too much accuracy in 16 bits.
    return F.cross_entropy(logits, label, label_smoothing=smoothing)


@island
def _compute_probabilities(logits: Tensor) -> Tensor:
    return logits.softmax(1)


def _convert_to_class_indices(label: Tensor) -> Tensor:
    """Return class indices; for mixed labels, the class with the larger share."""
    return label.argmax(1) if label.ndim == 2 else label


def _build_training_transform(
    data: ClassificationData, plain: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return the training transform; `plain` is that of validation."""
    if data.augment == "none":
        return plain
    first = v2.RandomResizedCrop(data.size, antialias=True)
    if data.crop != "resize":
        # 4 pixels of padding for 32-pixel images, as is usual for CIFAR.
        first = v2.Compose([v2.Lambda(plain), v2.RandomCrop(data.size, padding=data.size // 8)])
    varied: Callable[[Tensor], Tensor] = v2.Compose([first, v2.RandomHorizontalFlip()])
    return varied
