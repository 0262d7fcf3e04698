"""A class for each pixel: the classic U-Net or any of smp's models, trained on crops and judged on whole images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchmetrics import MetricCollection
from torchvision import tv_tensors  # type: ignore[import-untyped]
from torchvision.transforms import v2  # type: ignore[import-untyped]

from halfstep.errors import BadRecipe
from halfstep.tasks import _colours, _pixels
from halfstep.tasks._overlap import Overlap, overlap_loss
from halfstep.tasks._sources import drawn_masks, masked
from halfstep.tasks._tiles import each_in_its_size, tiled
from halfstep.tasks.models.pixelwise import STRIDES, pixelwise_model
from halfstep.tasks.options.segmentation import SCHEMA, Data
from halfstep.train.data.reading import scaled
from halfstep.train.data.source import Sample, Source
from halfstep.train.task import Picture, Prediction, Split, Task


class Segmentation(Task):
    schema: ClassVar[Any] = SCHEMA
    metric: ClassVar[str] = "iou"
    tiny: ClassVar[Mapping[str, Any]] = {
        "model": {"width": 8, "depth": 2},
        "data": {"name": "shapes", "size": 48, "samples": 20, "classes": 3, "crop": 32, "tile": 32, "overlap": 8},
        "loss": {},
    }

    def begin(self, recipe: Any) -> None:
        super().begin(recipe)
        _check(recipe)
        self.classes = _names(recipe.data)
        self.pixels = _pixels.usual(recipe.data.channels)
        # Padding belongs to no class either. With at most 255 classes this number is never one of them.
        self.ignored: int = 255 if recipe.data.ignore_index is None else recipe.data.ignore_index
        self._sources: dict[Split, Source] = {}
        self._augmented = _augmentation(recipe.data, self.ignored)
        self._coloured = _jitter(recipe.data)

    def facts(self) -> dict[str, Any]:
        return {"classes": self.classes}

    def remember(self, facts: Mapping[str, Any]) -> None:
        self.classes = list(facts.get("classes", self.classes))

    def model(self) -> nn.Module:
        # Two classes need one number a pixel: foreground or not.
        outputs = 1 if self.recipe.data.classes == 2 else self.recipe.data.classes
        return pixelwise_model(self.recipe.model, self.recipe.data.channels, outputs)

    def source(self, split: Split) -> Source:
        if not self._sources:
            self._sources = masked(self.recipe.data)
        return self._sources[split]

    def transform(self, split: Split, sample: Sample) -> Sample:
        image, mask = sample["image"], sample["mask"]
        if split == "train":
            # Few operations know 16-bit integers; 8-bit ones are cropped first, which is cheaper.
            image = image if image.dtype == torch.uint8 else scaled(image)
            image, mask = self._augmented(tv_tensors.Image(image), tv_tensors.Mask(mask))
            # Colours are kept between 0 and 1, which floating numbers in a file need not be.
            image = image if sample["image"].is_floating_point() else self._coloured(image)
            image, mask = image.as_subclass(Tensor), mask.as_subclass(Tensor)
        return {"image": self.pixels.normalised(image), "mask": mask}

    def collate(self, split: Split, samples: list[Sample]) -> Sample:
        if split == "train":
            batch: Sample = default_collate(samples)
            return batch
        sizes = torch.tensor([sample["mask"].shape for sample in samples])
        high, wide = sizes.amax(0).tolist()
        return {
            "image": torch.stack([_padded(sample["image"], high, wide, 0.0) for sample in samples]),
            "mask": torch.stack([_padded(sample["mask"], high, wide, self.ignored) for sample in samples]),
            "size": sizes,
        }

    def loss(self, model: nn.Module, batch: Sample, metrics: MetricCollection | None = None) -> Tensor:
        logits = model(batch["image"]) if model.training else self._whole(model, batch)
        if metrics is not None:
            metrics.update(_chosen(logits), batch["mask"].long())
        return overlap_loss(logits, batch["mask"], self.ignored, self.recipe.loss.dice)

    def metrics(self) -> MetricCollection:
        return MetricCollection({"overlap": Overlap(self.classes, self.ignored)})

    def pictures(self, model: nn.Module, batch: Sample) -> list[Picture]:
        """Image, truth and prediction side by side."""
        said = _chosen(self._whole(model, batch))
        return [
            self._row(image[:, :high, :wide], truth[:high, :wide], answer[:high, :wide])
            for image, truth, answer, (high, wide) in zip(
                batch["image"], batch["mask"], said, batch["size"].tolist(), strict=True
            )
        ]

    @torch.no_grad()
    def predict(self, model: nn.Module, image: Tensor) -> Prediction:
        device = next(model.parameters()).device
        batch = self.collate("val", [self.transform("val", {"image": image, "mask": torch.zeros(image.shape[-2:])})])
        classes = len(self.classes)
        mask = _chosen(self._whole(model, {"image": batch["image"].to(device), "size": batch["size"]}))[0].cpu()
        shares = torch.bincount(mask.flatten(), minlength=classes).double() / mask.numel()
        drawn = mask.to(torch.uint8).numpy()
        return Prediction(
            values={f"pixels_{name}": share for name, share in zip(self.classes, shares.tolist(), strict=True)},
            mask=drawn * 255 if classes == 2 else drawn,
            overlay=_colours.laid_over(_pixels.as_picture(image), drawn, classes),
        )

    def _whole(self, model: nn.Module, batch: Sample) -> Tensor:
        """Logits of whole images, each in its own size, in tiles where it is large."""
        data, stride = self.recipe.data, STRIDES.get(self.recipe.model.name, STRIDES["smp"])
        sizes = [(high, wide) for high, wide in batch["size"].tolist()]
        return each_in_its_size(lambda x: tiled(model, x, data.tile, data.overlap, stride), batch["image"], sizes)

    def _row(self, image: Tensor, truth: Tensor, answer: Tensor) -> Picture:
        painted = [
            _colours.painted(torch.where(truth == self.ignored, -1, mask.long()).cpu().numpy(), len(self.classes))
            for mask in (truth, answer)
        ]
        return _pixels.side_by_side([self.pixels.shown(image), *painted])


def _names(data: Data) -> list[str]:
    if data.names or data.name != "shapes":
        return data.names or [str(number) for number in range(data.classes)]
    return drawn_masks(data).classes


def _chosen(logits: Tensor) -> Tensor:
    """The class of each pixel."""
    return (logits.squeeze(1) > 0).long() if logits.shape[1] == 1 else logits.argmax(1)


def _padded(tensor: Tensor, high: int, wide: int, value: float) -> Tensor:
    return F.pad(tensor, (0, wide - tensor.shape[-1], 0, high - tensor.shape[-2]), value=value)


def _augmentation(data: Data, ignored: int) -> v2.Transform:
    """Image and mask together: where one is cut and flipped, so is the other."""
    fill = {tv_tensors.Image: 0, tv_tensors.Mask: ignored}
    steps: list[nn.Module] = [v2.RandomCrop(data.crop, pad_if_needed=True, fill=fill)]
    if data.augment:
        steps += [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
    return v2.Compose(steps)


def _jitter(data: Data) -> nn.Module:
    if not data.augment or data.channels != 3:
        return nn.Identity()
    jitter: nn.Module = v2.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2)
    return jitter


def _check(recipe: Any) -> None:
    data, stride = recipe.data, STRIDES.get(recipe.model.name, STRIDES["smp"])
    if data.overlap >= data.tile:
        raise BadRecipe(
            f"data.overlap={data.overlap} with data.tile={data.tile}",
            allowed="tiles that share less than all of their pixels",
            do=f"write data.overlap={data.tile // 8}",
        )
    if data.names and len(data.names) != data.classes:
        raise BadRecipe(
            f"{len(data.names)} data.names for data.classes={data.classes}",
            allowed="a name for each class, or none at all",
            do="write as many names as classes, the background first",
        )
    for field in ("crop", "tile"):
        size = getattr(data, field)
        if size % stride:
            raise BadRecipe(
                f"data.{field}={size} with model.name={recipe.model.name}",
                allowed=f"multiples of {stride} for this model",
                do=f"write data.{field}={-(-size // stride) * stride}",
            )
