"""The noise schedule: noisy latents, the denoiser's target, loss weights, and the losses themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor, nn

from halfstep.precision.island import island
from halfstep.tasks.latent_cache.encoding import split_moments
from halfstep.train.metrics import Metric

SEED = 20_011
"""The seed of the noise in evaluations."""
MADE_FOR, FIRST, LAST = 1000, 1e-4, 0.02
"""The number of timesteps the usual schedule is for, and its first and last beta."""
MOST = 0.999
"""The largest beta: a step that replaced all of the signal could not be reversed."""
PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction"}
"""Recipe values of `model.prediction`, and diffusers' names for them."""


def build_schedule_settings(options: Any) -> dict[str, object]:
    """Return the scheduler settings of diffusers, the same for training and sampling."""
    # With fewer timesteps each must add more noise; otherwise the last would be far from the pure noise sampling starts
    # from.
    longer = MADE_FOR / options.timesteps
    return {
        "num_train_timesteps": options.timesteps,
        "beta_schedule": options.noise,
        "beta_start": FIRST * longer,
        "beta_end": min(LAST * longer, MOST),
        "prediction_type": PREDICTIONS[options.prediction],
    }


class NoiseSchedule(nn.Module):
    """The signal left at each timestep. Everything is computed in fp32 and without device synchronization."""

    signal: Tensor
    """The image's share of the variance at each timestep (alphas_cumprod); the rest is noise."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.prediction: str = options.prediction
        # A buffer, to follow the model's device; not persistent, because the recipe determines it.
        self.register_buffer(
            "signal", DDPMScheduler(**build_schedule_settings(options)).alphas_cumprod, persistent=False
        )

    def __len__(self) -> int:
        return len(self.signal)

    def noisy(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return latents with the noise of their timesteps."""
        return _mix_noise(latents, noise, self.signal[timesteps])

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the denoiser's target: the noise, or the velocity."""
        return noise if self.prediction == "epsilon" else _compute_velocity(latents, noise, self.signal[timesteps])

    def weights(self, timesteps: Tensor, min_snr: float | None) -> Tensor:
        """Return the loss weight of each sample; with `min_snr`, samples with a higher signal-to-noise ratio count
        less.
        """
        signal = self.signal[timesteps]
        if min_snr is None:
            return torch.ones_like(signal)
        snr = signal / (1.0 - signal)
        # Not min(snr, min_snr) / snr: that is 0 / 0 if no signal is left.
        return (min_snr / snr).clamp(max=1.0) if self.prediction == "epsilon" else snr.clamp(max=min_snr) / (snr + 1.0)


class Draws:
    """Random numbers: torch's own in training, and the same ones every time in evaluation.

    Evaluations are thus comparable, with one another and with a twin run in another precision. Their numbers are drawn
    on the host, because generators of different devices give different numbers.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    @classmethod
    def for_model(cls, model: nn.Module) -> Draws:
        """Return random draws for a model in training mode, fixed ones otherwise."""
        return cls() if model.training else cls.same_each_time()

    @classmethod
    def same_each_time(cls) -> Draws:
        """Return draws from a fixed seed."""
        return cls(torch.Generator().manual_seed(SEED))

    def normal(self, like: Tensor) -> Tensor:
        """Return normally distributed numbers in the shape and on the device of `like`."""
        if self.generator is None:
            return torch.randn_like(like)
        # Drawn on the host: the generators of different devices yield different numbers for one seed.
        return torch.randn(like.shape, generator=self.generator).to(like.device)

    def timesteps(self, like: Tensor, of: int) -> Tensor:
        """Return a timestep per sample: random in training, evenly spaced over the batch in evaluation."""
        count = len(like)
        if self.generator is None:
            return torch.randint(of, (count,), device=like.device)
        # The middle of equal intervals: even a small batch covers all noise levels.
        return (2 * torch.arange(count, device=like.device) + 1) * of // (2 * count)


@island
def _mix_noise(latents: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    signal = signal.view(-1, 1, 1, 1)
    return signal.sqrt() * latents + (1.0 - signal).sqrt() * noise


@island
def _compute_velocity(latents: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    signal = signal.view(-1, 1, 1, 1)
    return signal.sqrt() * noise - (1.0 - signal).sqrt() * latents


@island
def compute_reconstruction_loss(predicted: Tensor, image: Tensor) -> Tensor:
    """Return the mean squared error per pixel."""
    return F.mse_loss(predicted, image)


@island
def compute_kl_divergence(moments: Tensor, image: Tensor) -> Tensor:
    """Return the KL divergence of latents from a normal distribution, per number of the image, as a mean over the
    batch.

    Both parts of the autoencoder's loss are then per number of the image, so `loss.kl` means the same for every image
    size.
    """
    mean, spread = split_moments(moments)
    return 0.5 * (mean.square() + spread.exp() - 1.0 - spread).sum() / image.numel()


@island
def compute_squared_errors(predicted: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of each sample."""
    return (predicted - target).square().flatten(1).mean(1)


PARTS = 4


class DenoisingByNoise(Metric):
    """The mean squared error in each quarter of the timesteps; `denoising_0` has the least noise.

    A quarter without samples is left out.
    """

    errors_in: Tensor
    samples_in: Tensor

    def __init__(self, timesteps: int) -> None:
        zeros = torch.zeros(PARTS, dtype=torch.float64)
        super().__init__(errors_in=zeros, samples_in=zeros.long())
        self.timesteps = timesteps

    def update(self, errors: Tensor, at: Tensor) -> None:
        """Add the error of each sample and its timestep."""
        quarter = (at * PARTS // self.timesteps).clamp(max=PARTS - 1)
        # Summed by index, without asking the device which quarters occur.
        self.errors_in = self.errors_in.index_add(0, quarter, errors.to(self.errors_in.dtype))
        self.samples_in = self.samples_in.index_add(0, quarter, torch.ones_like(quarter))

    def compute(self) -> dict[str, Tensor]:
        """Return the mean error of each quarter that has samples."""
        errors, samples = self.total("errors_in"), self.total("samples_in")
        means = errors / samples.clamp(min=1.0)
        there = samples.nonzero().flatten().tolist()
        return {f"denoising_{quarter}": means[quarter] for quarter in there}
