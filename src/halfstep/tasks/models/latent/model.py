"""Autoencoder, denoiser and noise as one model, whose parts are called by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from halfstep.precision.precision import widen
from halfstep.tasks._latents.moments import bounded
from halfstep.tasks.models.latent.autoencoder import stride_of
from halfstep.tasks.models.latent.conditions import Condition, ImageCondition
from halfstep.tasks.models.latent.denoiser import Asked
from halfstep.tasks.models.latent.noise import NoiseSchedule

Draw = Callable[[Tensor], Tensor]
"""Random numbers in the shape of a tensor."""
MOMENTUM = 0.02
"""How far a batch moves a scale that is measured while the autoencoder learns."""


class LatentDiffusion(nn.Module):
    """Images to latents, noise out of latents, latents to images.

    Latents are in fp32, and multiplied by `latent_scale` so that they vary as much as the noise does. Without an
    autoencoder they are the pixels. A frozen autoencoder stays in evaluation, also after `train()`.
    """

    latent_scale: Tensor
    """0 until it is measured, and then taken as 1."""

    def __init__(
        self,
        autoencoder: AutoencoderKL | None,
        denoiser: nn.Module | None,
        noise: NoiseSchedule,
        asked: Asked,
        condition: ImageCondition | None = None,
    ) -> None:
        super().__init__()
        self.autoencoder, self.denoiser, self.noise, self.condition = autoencoder, denoiser, noise, condition
        self.asked = asked
        self.frozen = self.measures_scale = False
        self.register_buffer("latent_scale", torch.zeros(()))

    def freeze_autoencoder(self) -> None:
        """It is not trained, from now on."""
        self.frozen = True
        if self.autoencoder is not None:
            self.autoencoder.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> LatentDiffusion:
        super().train(mode)
        if self.frozen and self.autoencoder is not None:
            self.autoencoder.eval()
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """The parts are called, and never the whole; so they are what is compiled."""
        vae = self.autoencoder
        parts = [self.denoiser, self.condition, *([vae.encoder, vae.decoder] if vae is not None else [])]
        for part in parts:
            if part is not None:
                part.compile(*args, **kwargs)

    def moments(self, images: Tensor) -> Tensor:
        """The mean of each image's latents, and the logarithm of their variance, before any scale."""
        assert self.autoencoder is not None
        return widen(self.autoencoder.encode(images).latent_dist.parameters)

    def latents(self, moments: Tensor, draw: Draw = torch.randn_like) -> Tensor:
        """Latents drawn from their moments, scaled; `torch.zeros_like` draws their mean."""
        mean, spread = bounded(widen(moments))
        latents = mean + (0.5 * spread).exp() * draw(mean)
        if self.measures_scale and self.training:
            self._measure(latents.detach())
        return latents * self._scale()

    def pixels(self, latents: Tensor) -> Tensor:
        """Images, about between -1 and 1."""
        if self.autoencoder is None:
            return latents
        return widen(self.autoencoder.decode(latents / self._scale()).sample)

    def denoise(self, noisy: Tensor, timesteps: Tensor, condition: Condition | None) -> Tensor:
        """What the denoiser says of noisy latents; `timesteps` are integers, and stay so until they are embedded."""
        assert self.denoiser is not None
        if condition is None:
            return self._said(noisy, timesteps)
        if self.asked.kind == "class":
            absent = torch.full_like(condition.given, self.asked.classes)
            return self._said(noisy, timesteps, class_labels=torch.where(condition.kept, condition.given, absent))
        if self.asked.kind == "embedding":
            return self._said(noisy, timesteps, encoder_hidden_states=condition.or_zero(condition.given))
        assert self.condition is not None
        seen = condition.or_zero(widen(self.condition(condition.given)))
        return self._said(torch.cat([noisy, seen], dim=1), timesteps)

    def latent_shape(self, images: int, channels: int, size: int) -> tuple[int, int, int, int]:
        """Of the latents of so many images, with channels and a size."""
        if self.autoencoder is None:
            return images, channels, size, size
        config = self.autoencoder.config
        side = size // stride_of(config)
        return images, config["latent_channels"], side, side

    def _said(self, noisy: Tensor, timesteps: Tensor, **how: Tensor) -> Tensor:
        assert self.denoiser is not None
        said: Tensor = self.denoiser(noisy, timesteps, **how).sample
        return said

    def _scale(self) -> Tensor:
        # A new tensor: what backward keeps must not change when the next batch is measured.
        return torch.where(self.latent_scale > 0.0, self.latent_scale, 1.0)

    @torch.no_grad()
    def _measure(self, latents: Tensor) -> None:
        now = 1.0 / latents.std().clamp(min=1e-6)
        moved = self.latent_scale.lerp(now, MOMENTUM)
        self.latent_scale.copy_(torch.where(self.latent_scale > 0.0, moved, now))
