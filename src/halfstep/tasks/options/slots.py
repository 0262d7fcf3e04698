"""The recipe schema of slots. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from halfstep.errors import BadRecipe
from halfstep.recipe.schema import MOST_DRAWN, Also, DataOptions, Fraction, LossOptions, ModelOptions, Recipe


class SlotsModel(ModelOptions):
    slots: Annotated[int, Field(ge=1, le=255), Also("num_slots")] = 7
    """How many things a clip is divided into, with its background."""
    width: Annotated[PositiveInt, Also("slot_dim")] = 64
    """Numbers that describe a slot."""
    iterations: PositiveInt = 2
    """Rounds of attention in each frame; the first frame has one more."""
    backbone: str = "none"
    """A frozen model of timm that reads the frames instead of the encoder: `vit_small_patch16_224.dino`, or `none`."""
    backbone_weights: str = "pretrained"
    """The backbone's weights: `pretrained` (timm's), `none` (random), or a path to a .safetensors or .pt file."""
    encoder_width: PositiveInt = 64
    """Channels of the layers that read a frame."""
    encoder_stride: Literal[1, 2, 4] = 1
    """How many pixels, across, become one place that slots compete for."""
    predictor_layers: Annotated[int, Field(ge=0, le=8)] = 1
    """Layers that predict the initial slots of the next frame from those of this one; 0 copies them."""
    decoder: Literal["broadcast", "autoregressive"] = "broadcast"
    """How slots are judged: by painting their pixels, or by predicting the tokens of a discrete autoencoder."""
    decoder_width: PositiveInt = 64
    """Channels of the decoder."""
    decoder_layers: PositiveInt = 4
    """Layers of the decoder."""
    heads: PositiveInt = 4
    """autoregressive: heads of its attention; the width is a multiple of them."""
    vocabulary: Annotated[int, Field(ge=2, le=65_536), Also("vocab_size")] = 512
    """autoregressive: tokens that the discrete autoencoder knows."""
    token_stride: Literal[2, 4, 8] = 4
    """autoregressive: how many pixels, across, one token stands for."""


class SlotsData(DataOptions):
    name: Literal["sprites", "shapes", "frames", "videos", "movi"] = "frames"
    """`sprites` (moving dSprites), `shapes` (drawn here), `frames` (a folder for each clip), `videos`, or `movi`."""
    path: Annotated[str, Also("data_dir")] = "data"
    """The folder with clips, or the sprites; `cache:NAME` is a download of `halfstep data get`."""
    val: Fraction | str = 0.1
    """Validation data: a share of the clips, a folder with the same layout, or for movi the split's name."""
    channels: Literal[3] = 3
    """Red, green and blue."""
    size: Annotated[PositiveInt, Also("image_size", "img_size")] = 64
    """Height and width of a frame, as the model sees it."""
    frames: Annotated[int, Field(ge=1, le=256), Also("episode_length", "clip_length")] = 6
    """Frames of a clip."""
    every: PositiveInt = 1
    """videos, frames and movi: take one frame of so many."""
    objects: Annotated[int, Field(ge=1, le=32)] = 4
    """sprites and shapes: the most that a clip has; at least half as many are drawn."""
    samples: Annotated[int, Field(ge=2, le=MOST_DRAWN)] = 512
    """sprites and shapes: how many clips there are, with those for validation."""


class SlotsLoss(LossOptions):
    contrast: NonNegativeFloat = 0.01
    """The weight of what keeps a slot on its thing from frame to frame; 0 is off, and too much hides the things."""
    temperature: PositiveFloat = 0.1
    """The temperature of the contrast: smaller values weight the most similar slots more."""
    tokens: NonNegativeFloat = 1.0
    """autoregressive: the weight of the token loss relative to the discrete autoencoder's loss."""


SCHEMA = Recipe[SlotsModel, SlotsData, SlotsLoss]
NEEDS = ("PIL",)


def check(recipe: Any) -> None:
    """Raise `BadRecipe` for settings that exclude each other."""
    model, data = recipe.model, recipe.data
    if model.weights == "pretrained":
        raise BadRecipe("model.weights=pretrained for slots", allowed="none, or a path", do="write model.weights=none")
    strides = {"encoder_stride": model.encoder_stride} if model.backbone == "none" else {}
    if model.decoder == "autoregressive":
        strides["token_stride"] = model.token_stride
    for field, stride in strides.items():
        if data.size % stride:
            raise BadRecipe(
                f"data.size={data.size} with model.{field}={stride}",
                allowed=f"multiples of {stride}",
                do=f"write data.size={-(-data.size // stride) * stride}",
            )
    if model.decoder == "autoregressive" and model.decoder_width % model.heads:
        raise BadRecipe(
            f"model.decoder_width={model.decoder_width} with model.heads={model.heads}",
            allowed="a width that is a multiple of the heads",
            do=f"write model.decoder_width={-(-model.decoder_width // model.heads) * model.heads}",
        )
