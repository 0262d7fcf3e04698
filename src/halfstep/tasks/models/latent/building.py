"""The model that a recipe for diffusion names: its parts, which of them are frozen, and which are islands."""

from __future__ import annotations

from typing import Any

from halfstep.precision.island import island
from halfstep.tasks.models.latent.autoencoder import stride_of
from halfstep.tasks.models.latent.checks import check_channels, check_size
from halfstep.tasks.models.latent.conditions import ImageCondition
from halfstep.tasks.models.latent.denoiser import Asked
from halfstep.tasks.models.latent.model import LatentDiffusion
from halfstep.tasks.models.latent.noise import NoiseSchedule
from halfstep.tasks.models.latent.origins import Origins


def latent_diffusion(options: Any, data: Any, asked: Asked, origins: Origins) -> LatentDiffusion:
    """A denoiser's autoencoder is frozen; one that was published with a scale for its latents keeps it."""
    autoencoder, scale = origins.autoencoder()
    stride, channels = 1, data.channels
    if autoencoder is not None:
        stride, channels = stride_of(autoencoder.config), autoencoder.config["latent_channels"]
        check_channels(data.channels, autoencoder.config["in_channels"], options.autoencoder)
    denoiser = origins.denoiser(channels, data.size // stride, asked)
    lower: Any = None if denoiser is None else denoiser.config
    check_size(data, stride if lower is None else stride * stride_of(lower))
    condition = ImageCondition(asked.channels, options.condition_width, stride) if asked.kind == "image" else None
    model = LatentDiffusion(autoencoder, denoiser, NoiseSchedule(options), asked, condition)
    if scale is not None:
        model.latent_scale.fill_(scale)
    model.measures_scale = options.stage == "both" and autoencoder is not None and scale is None
    if options.stage == "denoiser":
        model.freeze_autoencoder()
    if autoencoder is not None and is_island(options):
        island(model, "autoencoder")
    if denoiser is not None:
        # Neighbouring timesteps differ by less than 16 bits can tell.
        island(model, "denoiser.time_proj", "denoiser.time_embedding")
    return model


def is_island(options: Any) -> bool:
    """Whether the autoencoder computes in fp32, whatever the run does."""
    frozen = options.stage == "denoiser"
    return bool(options.autoencoder_island == "always" or (frozen and options.autoencoder_island == "frozen"))
