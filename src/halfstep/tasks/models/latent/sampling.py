"""From noise to samples: DDIM or DDPM, with guidance towards the condition."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor

from halfstep.precision.island import island
from halfstep.precision.precision import widen
from halfstep.tasks.models.latent.conditions import Condition
from halfstep.tasks.models.latent.model import LatentDiffusion
from halfstep.tasks.models.latent.noise import Draws, schedule_settings
from halfstep.train.task import Told, unheard

AT_ONCE = 32
"""Samples of one batch: memory is bounded by it, not by how many are asked for."""
FARTHEST = 10.0
"""That a latent is from zero, where all of them have a standard deviation of one."""
SCHEDULERS: dict[str, Any] = {"ddim": DDIMScheduler, "ddpm": DDPMScheduler}


@torch.no_grad()
def sampled(
    model: LatentDiffusion,
    options: Any,
    shape: tuple[int, int, int, int],
    condition: Condition | None,
    draws: Draws,
    told: Told = unheard,
) -> Tensor:
    """Images for a condition with a row for each; `shape` is that of their latents.

    `told` hears of each step of each batch.
    """
    images, steps = [], options.sample_steps
    begins = range(0, shape[0], AT_ONCE)
    for batch, begin in enumerate(begins):
        rows = slice(begin, begin + AT_ONCE)
        part = None if condition is None else Condition(condition.given[rows], condition.kept[rows])
        size = (min(AT_ONCE, shape[0] - begin), *shape[1:])

        def step_done(done: int, before: int = batch * steps) -> None:
            told(before + done, len(begins) * steps)

        images.append(model.pixels(_latents(model, options, size, part, draws, step_done)))
    return torch.cat(images)


def _latents(
    model: LatentDiffusion, options: Any, size: tuple[int, ...], condition: Condition | None, draws: Draws, done: Any
) -> Tensor:
    # Where hardly any signal is left, the noise is off by little and what is made of it by thousands: it is bounded.
    scheduler = SCHEDULERS[options.sampler](
        **schedule_settings(options),
        clip_sample=True,
        clip_sample_range=1.0 if model.autoencoder is None else FARTHEST,
        timestep_spacing="trailing",
    )
    scheduler.set_timesteps(options.sample_steps)
    latents = draws.normal(torch.empty(size, device=model.latent_scale.device))
    # Rounding makes diffusers count one more than it was asked for, now and then: a timestep before the first.
    for number, timestep in enumerate(scheduler.timesteps.tolist()[: options.sample_steps], 1):
        said = _guided(model, latents, timestep, condition, options.guidance)
        latents = _stepped(scheduler, said, timestep, latents, draws.generator)
        done(number)
    return latents


@island
def _stepped(scheduler: Any, said: Tensor, timestep: int, latents: Tensor, generator: torch.Generator | None) -> Tensor:
    stepped: Tensor = scheduler.step(said, timestep, latents, generator=generator).prev_sample
    return stepped


def _guided(
    model: LatentDiffusion, latents: Tensor, timestep: int, condition: Condition | None, guidance: float
) -> Tensor:
    """What the denoiser says with the condition, and away from what it says without: both in one batch."""
    if condition is None or guidance in (0.0, 1.0):
        wanted = condition.absent() if condition is not None and guidance == 0.0 else condition
        return widen(model.denoise(latents, _all_at(timestep, latents), wanted))
    both = torch.cat([latents, latents])
    with_it, without = widen(model.denoise(both, _all_at(timestep, both), condition.twice())).chunk(2)
    return without + guidance * (with_it - without)


def _all_at(timestep: int, latents: Tensor) -> Tensor:
    """The same timestep for each sample, as an integer."""
    return torch.full((len(latents),), timestep, device=latents.device)
