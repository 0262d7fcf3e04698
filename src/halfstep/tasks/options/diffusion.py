"""The recipe schema of diffusion. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from halfstep.recipe.schema import MOST_DRAWN, Also, DataOptions, Fraction, LossOptions, ModelOptions, Recipe
from halfstep.tasks.models.latent.checks import check as check

Widths = Annotated[list[PositiveInt], Field(min_length=1, max_length=6)]


class DiffusionModel(ModelOptions):
    stage: Literal["autoencoder", "denoiser", "both"] = "denoiser"
    """The part that is trained: the `autoencoder`, the `denoiser` on the latents of a frozen one, or `both` at once."""
    autoencoder: str = "new"
    """`new`, `none` (the denoiser sees pixels), the folder of a run that trained one, or a local diffusers folder."""
    autoencoder_widths: Widths = Field(default=[64, 128])
    """A new autoencoder: channels of each level; each but the first halves the image."""
    autoencoder_layers: PositiveInt = 1
    """A new autoencoder: blocks of each level."""
    latent_channels: PositiveInt = 4
    """A new autoencoder: channels of its latents."""
    autoencoder_island: Literal["frozen", "always", "never"] = "frozen"
    """When the autoencoder is an island in fp32: while it is frozen, always, or never."""
    denoiser: str = "new"
    """`new`, or a local diffusers folder with a UNet."""
    widths: Widths = Field(default=[64, 128, 128])
    """A new denoiser: channels of each level; each but the first halves the latents."""
    layers: PositiveInt = 2
    """A new denoiser: blocks of each level."""
    attention_levels: Annotated[int, Field(ge=0, le=6)] = 1
    """A new denoiser: how many of its lowest levels have attention."""
    condition: Literal["none", "class", "image", "embedding"] = "none"
    """The condition of a sample: nothing, a class, an image, or an embedding that was computed before."""
    condition_width: PositiveInt = 32
    """image: channels of the encoded condition, concatenated with the latents."""
    condition_drop: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """The share of training samples that lose their condition, which guidance needs."""
    timesteps: Annotated[int, Field(ge=2, le=10_000)] = 1000
    """Steps from an image to noise."""
    noise: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "scaled_linear"
    """How the noise grows over the steps, as diffusers calls it."""
    prediction: Literal["epsilon", "v"] = "epsilon"
    """The denoiser's output: the noise, or the velocity between image and noise."""
    sampler: Literal["ddim", "ddpm"] = "ddim"
    """How samples are drawn."""
    sample_steps: PositiveInt = 50
    """Steps from noise to a sample."""
    guidance: NonNegativeFloat = 2.0
    """How much more a sample follows its condition than the data does: 1 is as the data, 0 is no condition."""


class DiffusionData(DataOptions):
    name: Literal["folder", "shards", "shapes", "pairs", "maps"] = "folder"
    """`folder` (of classes, or of images), `shards`, `pairs` (conditions and images), `shapes` or `maps` (drawn)."""
    path: Annotated[str, Also("data_dir")] = "data"
    """The folder that holds `train` and `val`, or the shards; `cache:NAME` is a download of `halfstep data get`."""
    val: Fraction | str = "val"
    """For validation: a folder next to `train`, or any path; or a share of the samples in `path`."""
    classes: Annotated[int, Field(ge=2)] | None = None
    """The number of classes; by default counted in the data."""
    channels: Annotated[int, Field(ge=1, le=64)] = 3
    """Channels of an image."""
    size: Annotated[PositiveInt, Also("image_size", "img_size")] = 64
    """The size of the images that the model sees."""
    augment: Literal["none", "flip"] = "none"
    """`flip` mirrors half of the training images; their latents are then not cached."""
    condition_channels: Annotated[int, Field(ge=1, le=64)] = 1
    """image: channels of a condition."""
    embeddings: str | None = None
    """embedding: a .safetensors file with a tensor for each image, by its name: tokens × width, or width."""
    cache_latents: bool = True
    """Encode each image once, and keep its latents on the disk, where the autoencoder is frozen."""
    samples: Annotated[int, Field(ge=2, le=MOST_DRAWN)] = 256
    """shapes and maps: the number of images, validation included."""


class DiffusionLoss(LossOptions):
    kl: NonNegativeFloat = 1e-6
    """autoencoder: the weight of what keeps latents near a normal distribution."""
    min_snr: PositiveFloat | None = None
    """denoiser: steps with more signal than this, against their noise, count less; 5 is usual."""


SCHEMA = Recipe[DiffusionModel, DiffusionData, DiffusionLoss]
NEEDS = ("torchvision", "diffusers", "PIL")
