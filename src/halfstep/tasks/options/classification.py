"""The recipe schema of classification. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from halfstep.errors import BadRecipe
from halfstep.recipe.schema import MOST_DRAWN, Also, DataOptions, Fraction, LossOptions, ModelOptions, Recipe


class ClassificationModel(ModelOptions):
    name: str = "resnet50"
    """A model of timm, such as resnet50, convnext_tiny or vit_small_patch16_224."""
    drop_rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout before the last layer."""
    small_stem: bool = False
    """ResNets: a first layer for images of about 32 pixels, without downsampling. It is initialized randomly."""


class ClassificationData(DataOptions):
    name: Literal["folder", "shards", "shapes"] = "folder"
    """`folder` (a folder for each class), `shards` (WebDataset), or `shapes` (drawn here, no download)."""
    path: Annotated[str, Also("data_dir")] = "data"
    """The folder that holds `train` and `val`, or the shards; `cache:NAME` is a download of `halfstep data get`."""
    val: Fraction | str = "val"
    """For validation: a folder next to `train`, or any path; or a share of the samples in `path`."""
    classes: Annotated[int, Field(ge=2)] | None = None
    """The number of classes; by default counted in the data."""
    channels: Annotated[int, Field(ge=1, le=64)] = 3
    """Channels of an image."""
    size: Annotated[PositiveInt, Also("image_size", "img_size")] = 224
    """The size of the images that the model sees."""
    crop: Literal["resize", "shift"] = "resize"
    """Training crops: `resize` a random part of an image, or `shift` a small image by up to an eighth of its size."""
    augment: Literal["none", "flip", "randaugment"] = "flip"
    """`none` shows whole images, `flip` crops and flips them, `randaugment` also changes their color and shape."""
    mixup: NonNegativeFloat = 0.0
    """Alpha of mixup, which blends two images and their labels; 0 is off. With cutmix too, each batch draws one."""
    cutmix: NonNegativeFloat = 0.0
    """Alpha of cutmix, which pastes a part of one image into another; 0 is off."""
    samples: Annotated[int, Field(ge=2, le=MOST_DRAWN)] = 512
    """shapes: the number of images, validation included."""


class ClassificationLoss(LossOptions):
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """The share of certainty that is taken from the right class and spread over all."""


SCHEMA = Recipe[ClassificationModel, ClassificationData, ClassificationLoss]
NEEDS = ("torchvision", "timm", "PIL")


def check(recipe: Any) -> None:
    """Raise `BadRecipe` for settings that exclude each other."""
    data = recipe.data
    # RandAugment changes colors, which torchvision defines for gray and RGB images only.
    if data.augment == "randaugment" and data.channels not in (1, 3):
        raise BadRecipe(
            f"data.augment=randaugment with data.channels={data.channels}",
            allowed="gray or color: 1 or 3 channels",
            do="write data.augment=flip",
        )
