"""Noise that grows over the timesteps: noisy latents, what a denoiser should say of them, and how much it counts."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor, nn

from halfstep.precision.island import island

SEED = 20_011
"""Of the noise that evaluations see."""
MADE_FOR, FIRST, LAST = 1000, 1e-4, 0.02
"""The steps that the usual growth of noise is for, and how much of the variance the first and the last one replace."""
MOST = 0.999
"""That one step may replace: something must be left to go back from."""
PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction"}
"""Our words for what a denoiser says, and diffusers'."""


def schedule_settings(options: Any) -> dict[str, Any]:
    """What every scheduler of diffusers is told, in training and in sampling."""
    # Fewer steps must each add more, or the last one would be far from the noise that samples are begun with.
    longer = MADE_FOR / options.timesteps
    return {
        "num_train_timesteps": options.timesteps,
        "beta_schedule": options.noise,
        "beta_start": FIRST * longer,
        "beta_end": min(LAST * longer, MOST),
        "prediction_type": PREDICTIONS[options.prediction],
    }


class NoiseSchedule(nn.Module):
    """How much of the signal is left at each timestep. Everything is computed in fp32, and nothing is read back."""

    signal: Tensor
    """The share of the variance at a timestep that is the image's; the rest is noise's."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.prediction: str = options.prediction
        # A buffer, so that it is where the model is; from the recipe, so that it is not saved with the weights.
        self.register_buffer("signal", DDPMScheduler(**schedule_settings(options)).alphas_cumprod, persistent=False)

    def __len__(self) -> int:
        return len(self.signal)

    def noisy(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Latents as they are at their timesteps."""
        return _mixed(latents, noise, self.signal[timesteps])

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """What the denoiser should say: the noise, or the velocity."""
        return noise if self.prediction == "epsilon" else _velocity(latents, noise, self.signal[timesteps])

    def weights(self, timesteps: Tensor, min_snr: float | None) -> Tensor:
        """How much each sample counts: with `min_snr`, less where there is more signal than that against the noise."""
        signal = self.signal[timesteps]
        if min_snr is None:
            return torch.ones_like(signal)
        snr = signal / (1.0 - signal)
        # Not min(snr, most) / snr, which is 0 / 0 where no signal is left.
        return (min_snr / snr).clamp(max=1.0) if self.prediction == "epsilon" else snr.clamp(max=min_snr) / (snr + 1.0)


class Draws:
    """Random numbers: torch's own in training, and the same ones every time in evaluation.

    So evaluations can be compared, with one another and with those of a twin in another precision. Theirs are drawn in
    the main memory, which makes them the same on every device.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    @classmethod
    def for_model(cls, model: nn.Module) -> Draws:
        return cls() if model.training else cls.same_each_time()

    @classmethod
    def same_each_time(cls) -> Draws:
        return cls(torch.Generator().manual_seed(SEED))

    def normal(self, like: Tensor) -> Tensor:
        if self.generator is None:
            return torch.randn_like(like)
        return torch.randn(like.shape, generator=self.generator).to(like.device)

    def timesteps(self, like: Tensor, of: int) -> Tensor:
        """A timestep for each sample: by chance, or spread evenly over the batch."""
        count = len(like)
        if self.generator is None:
            return torch.randint(of, (count,), device=like.device)
        return (2 * torch.arange(count, device=like.device) + 1) * of // (2 * count)


@island
def _mixed(latents: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    signal = signal.view(-1, 1, 1, 1)
    return signal.sqrt() * latents + (1.0 - signal).sqrt() * noise


@island
def _velocity(latents: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    signal = signal.view(-1, 1, 1, 1)
    return signal.sqrt() * noise - (1.0 - signal).sqrt() * latents
