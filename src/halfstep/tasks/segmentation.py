"""Semantic segmentation with a U-Net or any smp model, trained on crops and evaluated on whole images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchvision import tv_tensors  # type: ignore[import-untyped]
from torchvision.transforms import v2  # type: ignore[import-untyped]

from halfstep.data.dataset import Sample, Source
from halfstep.data.image_io import scale_to_unit_range
from halfstep.precision.precision import widen
from halfstep.tasks.models.smp_models import build_segmentation_model
from halfstep.tasks.options.segmentation import SCHEMA, STRIDES, SegmentationData, check
from halfstep.tasks.shared import images
from halfstep.tasks.shared.confusion import Overlap, compute_overlap_loss, compute_overlaps, count_confusion
from halfstep.tasks.shared.images import ShrunkSource, run_in_tiles, run_without_padding, shrink_image_and_mask
from halfstep.tasks.shared.sources import build_masked_sources, build_shape_masks
from halfstep.train.metrics import Metrics
from halfstep.train.signature import Preprocessing, Signature
from halfstep.train.task import BatchQuality, Picture, Prediction, SampleDisplay, Split, Task

TIES = 1e-3
"""The weight of pixel accuracy relative to the IoU when samples are ranked: it only breaks ties."""


class Segmentation(Task):
    """A task that predicts one class per pixel."""

    schema: ClassVar[Any] = SCHEMA
    metric: ClassVar[str] = "iou"
    resolution: ClassVar[str] = "data.crop"
    tiny: ClassVar[Mapping[str, object]] = {
        "model": {"width": 8, "depth": 2},
        "data": {"name": "shapes", "size": 48, "samples": 20, "classes": 3, "crop": 32, "tile": 32, "overlap": 8},
        "loss": {},
    }

    def begin(self, recipe: Any) -> None:
        """Check the recipe and build the transforms. Raise `BadRecipe` for settings that exclude each other."""
        super().begin(recipe)
        check(recipe)
        self.classes = recipe.data.names or [str(number) for number in range(recipe.data.classes)]
        if recipe.data.name == "shapes" and not recipe.data.names:
            self.classes = build_shape_masks(recipe.data).classes
        self.pixels = images.choose_normalization(recipe.data.channels)
        self.stride = STRIDES.get(recipe.model.name, STRIDES["smp"])
        self.preprocessing = Preprocessing(
            recipe.data.channels,
            self.pixels.mean,
            self.pixels.std,
            max_side=recipe.data.max_side,
            multiple=self.stride,
            tile=recipe.data.tile,
            overlap=recipe.data.overlap,
        )
        # Padding is ignored too. Masks have at most 255 classes (0..254), so 255 is free.
        self.ignored: int = 255 if recipe.data.ignore_index is None else recipe.data.ignore_index
        self._sources: dict[Split, Source] = {}
        self._augmented = _build_augmentation(recipe.data, self.ignored)
        self._colored: nn.Module = nn.Identity()
        # ColorJitter's saturation is defined for RGB images only.
        if recipe.data.augment and recipe.data.channels == 3:
            self._colored = v2.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2)

    def facts(self) -> dict[str, Any]:
        """Return the class names."""
        return {"classes": self.classes}

    def remember(self, facts: Mapping[str, Any]) -> None:
        """Restore the class names of a run."""
        self.classes = list(facts.get("classes", self.classes))

    def model(self) -> nn.Module:
        """Return the segmentation model of the recipe."""
        # Two classes need only one logit per pixel.
        outputs = 1 if self.recipe.data.classes == 2 else self.recipe.data.classes
        return build_segmentation_model(self.recipe.model, self.recipe.data.channels, outputs)

    def source(self, split: Split) -> Source:
        """Return the samples of a split, shrunk to data.max_side; the data is read on the first call."""
        if not self._sources:
            self._sources = build_masked_sources(self.recipe.data, self.recipe.store)
            if self.preprocessing.max_side is not None:
                self._sources = {name: ShrunkSource(one, self.preprocessing) for name, one in self._sources.items()}
        return self._sources[split]

    def transform(self, split: Split, sample: Sample) -> Sample:
        """Shrink and normalize image and mask; for training, crop and augment them too."""
        image, mask = shrink_image_and_mask(sample["image"], sample["mask"], self.preprocessing)
        if split == "train":
            # Few torchvision transforms support 16-bit integers. 8-bit images are cropped before the conversion, which
            # is cheaper.
            image = image if image.dtype == torch.uint8 else scale_to_unit_range(image)
            image, mask = self._augmented(tv_tensors.Image(image), tv_tensors.Mask(mask))
            # ColorJitter clamps to 0..1, and floating-point images in a file may exceed that range.
            image = image if sample["image"].is_floating_point() else self._colored(image)
            # Model and collation get plain tensors, not torchvision's subclasses.
            image, mask = image.as_subclass(Tensor), mask.as_subclass(Tensor)
        return {"image": self.preprocessing.normalized(image), "mask": mask}

    def collate(self, split: Split, samples: list[Sample]) -> Sample:
        """Stack crops for training; pad whole images to one size for evaluation, and record each original `size`."""
        if split == "train":
            batch: Sample = default_collate(samples)
            return batch
        sizes = torch.tensor([sample["mask"].shape for sample in samples])
        high, wide = sizes.amax(0).tolist()
        return {
            "image": torch.stack([_pad_bottom_right(sample["image"], high, wide, 0.0) for sample in samples]),
            "mask": torch.stack([_pad_bottom_right(sample["mask"], high, wide, self.ignored) for sample in samples]),
            "size": sizes,
        }

    def loss(self, model: nn.Module, batch: Sample, metrics: Metrics | None = None) -> Tensor:
        """Return the cross-entropy and Dice loss, on crops in training and on whole images in evaluation."""
        # Evaluation must not depend on a random crop, nor on the sizes of other images in the batch.
        logits = model(batch["image"]) if model.training else self._logits_of_whole_images(model, batch)
        if metrics is not None:
            metrics.update(_predict_classes(logits), batch["mask"].long())
        return compute_overlap_loss(logits, batch["mask"], self.ignored, self.recipe.loss.dice)

    def metrics(self) -> Metrics:
        """Return IoU and Dice over the split."""
        return Metrics({"overlap": Overlap(self.classes, self.ignored)})

    def shown(self, model: nn.Module, batch: Sample) -> list[SampleDisplay]:
        """Return the image, the true mask, the predicted mask, and their differences, for each sample."""
        predicted = _predict_classes(self._logits_of_whole_images(model, batch))
        scores = self.judge(predicted, batch["mask"].long()).figures["iou"].tolist()
        return [
            SampleDisplay(
                self._panels(image[:, :high, :wide], truth[:high, :wide], answer[:high, :wide]), f"IoU {score:.2f}"
            )
            for image, truth, answer, (high, wide), score in zip(
                batch["image"], batch["mask"], predicted, batch["size"].tolist(), scores, strict=True
            )
        ]

    def legend(self) -> list[tuple[str, tuple[int, int, int]]]:
        """Return the colors of the classes, of ignored pixels and of mistakes."""
        named = list(zip(self.classes, images.list_class_colors(len(self.classes)), strict=True))
        none = [] if self.recipe.data.ignore_index is None else [("no class", images.IGNORED)]
        return [*named, *none, ("a mistake", images.MISTAKE)]

    def judge(self, predicted: Tensor, truth: Tensor) -> BatchQuality:
        """Return confusion counts and per-sample figures; samples are ranked by IoU, then by pixel accuracy."""
        classes = len(self.classes)
        # Ignored pixels are counted in an extra row that is then dropped; boolean indexing would synchronize the
        # device.
        rows = torch.where(truth == self.ignored, classes, truth)
        tables = count_confusion(rows, predicted, (classes + 1, classes))[:, :classes]
        figures = compute_overlaps(tables)
        return BatchQuality(tables.sum(0), figures, figures["iou"] + TIES * figures["accuracy"])

    def signature(self) -> Signature:
        """Return the preprocessing, the classes and the outputs of the model."""
        outputs = 1 if self.recipe.data.classes == 2 else self.recipe.data.classes
        return Signature(self.preprocessing, list(self.classes), "mask", outputs, variable_size=True)

    @torch.no_grad()
    def predict(self, model: nn.Module, image: Tensor) -> Prediction:
        """Return the mask of one image in its full size, an overlay, and the share of pixels of each class."""
        device = next(model.parameters()).device
        batch = self.collate("val", [self.transform("val", {"image": image, "mask": torch.zeros(image.shape[-2:])})])
        classes = len(self.classes)
        logits = self._logits_of_whole_images(model, {"image": batch["image"].to(device), "size": batch["size"]}).cpu()
        if logits.shape[-2:] != image.shape[-2:]:  # max_side shrank the image; the mask must have its full size
            # Logits are interpolated, not classes: there is no class between two classes.
            logits = F.interpolate(widen(logits), image.shape[-2:], mode="bilinear")
        mask = _predict_classes(logits)[0]
        shares = torch.bincount(mask.flatten(), minlength=classes).double() / mask.numel()
        drawn = mask.to(torch.uint8).numpy()
        return Prediction(
            values={f"pixels_{name}": share for name, share in zip(self.classes, shares.tolist(), strict=True)},
            # A mask of 0 and 1 would look black in an image viewer.
            mask=drawn * 255 if classes == 2 else drawn,
            overlay=images.overlay_mask(images.convert_to_picture(image), drawn, classes),
            legend=list(zip(self.classes, images.list_class_colors(classes), strict=True))[1:],
        )

    def _logits_of_whole_images(self, model: nn.Module, batch: Sample) -> Tensor:
        """Return logits of whole images, each in its own size and in tiles where it is large."""
        data, sizes = self.recipe.data, [(high, wide) for high, wide in batch["size"].tolist()]
        return run_without_padding(
            lambda x: run_in_tiles(model, x, data.tile, data.overlap, self.stride), batch["image"], sizes
        )

    def _panels(self, image: Tensor, truth: Tensor, answer: Tensor) -> dict[str, Picture]:
        judged = torch.where(truth == self.ignored, -1, answer.long()).cpu().numpy()
        known = torch.where(truth == self.ignored, -1, truth.long()).cpu().numpy()
        picture, classes = self.pixels.shown(image), len(self.classes)
        return {
            "image": picture,
            "truth": images.color_mask(known, classes),
            "prediction": images.color_mask(judged, classes),
            "mistakes": images.mark_mistakes(picture, known != judged),
        }


def _predict_classes(logits: Tensor) -> Tensor:
    """Return the predicted class of each pixel."""
    return (logits.squeeze(1) > 0).long() if logits.shape[1] == 1 else logits.argmax(1)


def _pad_bottom_right(tensor: Tensor, high: int, wide: int, value: float) -> Tensor:
    return F.pad(tensor, (0, wide - tensor.shape[-1], 0, high - tensor.shape[-2]), value=value)


def _build_augmentation(data: SegmentationData, ignored: int) -> v2.Transform:
    """Return the geometric augmentation, applied to both image and mask."""
    # Padding must not teach the background class.
    fill = {tv_tensors.Image: 0, tv_tensors.Mask: ignored}
    steps: list[nn.Module] = [v2.RandomCrop(data.crop, pad_if_needed=True, fill=fill)]
    if data.augment:
        steps += [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
    return v2.Compose(steps)
