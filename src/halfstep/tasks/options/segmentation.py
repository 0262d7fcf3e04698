"""The recipe schema of segmentation. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from halfstep.errors import BadRecipe
from halfstep.recipe.schema import MOST_DRAWN, Also, DataOptions, Fraction, LossOptions, ModelOptions, Recipe

Color = Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(min_length=3, max_length=3)]


class SegmentationModel(ModelOptions):
    name: str = "unet"
    """`unet` (the classic one), or an architecture of segmentation-models-pytorch: `smp-unet`, `fpn`, `manet`."""
    width: PositiveInt = 64
    """unet: channels at the first level; each level below it has twice as many."""
    depth: Annotated[int, Field(ge=1, le=8)] = 4
    """unet: how many times the image is halved."""
    encoder: str = "resnet34"
    """Other models: the encoder, by its name in segmentation-models-pytorch."""


class SegmentationData(DataOptions):
    name: Literal["pairs", "shards", "shapes"] = "pairs"
    """`pairs` (a folder of images and one of masks), `shards` (WebDataset), or `shapes` (drawn here, no download)."""
    path: Annotated[str, Also("data_dir")] = "data"
    """The folder that holds `images` and `masks`, or the shards; `cache:NAME` is a download of `halfstep data get`."""
    masks: str | None = None
    """pairs: the folder of masks, if it is not next to the images; `path` is then the folder of images."""
    val: Fraction | str = 0.2
    """Validation data: a share of the samples, or a folder with the same layout, inside `path` or elsewhere."""
    classes: Annotated[int, Field(ge=2, le=255)] = 2
    """The number of classes, background included. Two classes are background and foreground."""
    names: list[str] = Field(default=[])
    """Class names for tables; by default the class indices."""
    channels: Annotated[int, Field(ge=1, le=64)] = 3
    """Channels of an image."""
    ignore_index: Annotated[int, Field(ge=0, le=255)] | None = None
    """The value of mask pixels without a class, which the loss ignores."""
    palette: list[Color] | None = None
    """For color masks: the RGB color of each class."""
    max_side: PositiveInt | None = None
    """Shrink images and masks whose longer side has more pixels than this; predictions keep the original size."""
    crop: PositiveInt = 256
    """The size of the random crops that training sees; smaller images are padded."""
    tile: PositiveInt = 512
    """Larger images are evaluated and predicted in tiles of this size."""
    overlap: NonNegativeInt = 64
    """Pixels that neighboring tiles share."""
    augment: bool = True
    """Flip crops at random and, in color images, change brightness, contrast and saturation slightly."""
    size: PositiveInt = 64
    """shapes: the size of an image."""
    samples: Annotated[int, Field(ge=2, le=MOST_DRAWN)] = 256
    """shapes: the number of images, validation included."""


class SegmentationLoss(LossOptions):
    dice: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """The share of the Dice loss; the rest is cross-entropy."""


SCHEMA = Recipe[SegmentationModel, SegmentationData, SegmentationLoss]
NEEDS = ("torchvision", "PIL")
STRIDES = {"unet": 1, "smp": 32}
"""The number that height and width of an image must be a multiple of: for the classic U-Net, and for smp's models."""


def check(recipe: Any) -> None:
    """Raise `BadRecipe` for settings that exclude each other."""
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
