"""What a recipe for segmentation may say. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from halfstep.train.recipe.schema import Also, DataOptions, Fraction, LossOptions, ModelOptions, Recipe

Colour = Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(min_length=3, max_length=3)]


class Model(ModelOptions):
    name: str = "unet"
    """`unet` (the classic one), or an architecture of segmentation-models-pytorch: `smp-unet`, `fpn`, `manet`."""
    width: PositiveInt = 64
    """unet: channels at the first level; each level below it has twice as many."""
    depth: Annotated[int, Field(ge=1, le=8)] = 4
    """unet: how many times the image is halved."""
    encoder: str = "resnet34"
    """Other models: the encoder, by its name in segmentation-models-pytorch."""


class Data(DataOptions):
    name: Literal["pairs", "shards", "shapes"] = "pairs"
    """`pairs` (a folder of images and one of masks), `shards` (WebDataset), or `shapes` (drawn here, no download)."""
    path: Annotated[str, Also("data_dir")] = "data"
    """The folder that holds `images` and `masks`, or the shards; `cache:NAME` is a set that scripts/data got."""
    masks: str | None = None
    """pairs: the folder of masks, where it is not beside the images; `path` is then the folder of images."""
    val: Fraction | str = 0.2
    """For validation: a share of the samples, or a folder of the same layout, in `path` or anywhere."""
    classes: Annotated[int, Field(ge=2, le=255)] = 2
    """How many classes a mask has, with the background. Two classes are background and foreground."""
    names: list[str] = Field(default=[])
    """Names of the classes, for tables; their numbers if they are left out."""
    channels: Annotated[int, Field(ge=1, le=64)] = 3
    """Channels of an image."""
    ignore_index: Annotated[int, Field(ge=0, le=255)] | None = None
    """The value of mask pixels that belong to no class, and that nothing is learnt from."""
    palette: list[Colour] | None = None
    """The colours that stand for the classes, where masks are in colour: red, green and blue for each class."""
    crop: PositiveInt = 256
    """The size of the random crops that training sees; smaller images are padded."""
    tile: PositiveInt = 512
    """Larger images are evaluated and predicted in tiles of this size."""
    overlap: NonNegativeInt = 64
    """Pixels that neighbouring tiles share."""
    augment: bool = True
    """Flip crops, and change their brightness, contrast and saturation a little where they are in colour."""
    size: PositiveInt = 64
    """shapes: the size of an image."""
    samples: Annotated[int, Field(ge=2)] = 256
    """shapes: how many images there are, with those for validation."""


class Loss(LossOptions):
    dice: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """The share of the Dice loss; the rest is cross-entropy."""


SCHEMA = Recipe[Model, Data, Loss]
