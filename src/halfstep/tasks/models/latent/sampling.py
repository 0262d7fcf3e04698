"""Draw samples from noise with DDIM or DDPM and classifier-free guidance."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor

from halfstep.data.dataset import BadSample, Source, Transform
from halfstep.errors import BadData
from halfstep.precision.island import island
from halfstep.precision.precision import widen
from halfstep.status_line import OnProgress
from halfstep.tasks.models.latent.model import Condition, LatentDiffusion
from halfstep.tasks.models.latent.noise import Draws, build_schedule_settings
from halfstep.train.task import ignore_progress


def build_class_conditions(classes: int, count: int, device: torch.device) -> Condition:
    """Return the classes 0, 1, 2, … repeated; a grid with one column per class then has one class in each column."""
    return Condition.of(torch.arange(count, device=device) % classes)


def read_first_conditions(source: Source, ready: Transform, part: str, count: int, device: torch.device) -> Condition:
    """Return the conditions of the first readable samples, repeated where there are fewer than `count`.

    Raise `BadData` if none can be read.
    """
    found: list[Tensor] = []
    for index in range(len(source)):
        if len(found) == count:
            break
        try:
            found.append(ready(source.without_image(index))[part])
        except BadSample:
            continue
    if not found:
        raise BadData(
            "no validation sample can be read, and samples are drawn for their conditions",
            allowed="at least one",
            do="check data.path and data.val in the run's recipe.yaml",
        )
    return Condition.of(torch.stack([found[n % len(found)] for n in range(count)]).to(device))


AT_ONCE = 32
"""Samples per batch: memory is bounded by it, not by how many are drawn."""
FARTHEST = 10.0
"""The largest latent in absolute value, where all have a standard deviation of one."""
SCHEDULERS: dict[str, Any] = {"ddim": DDIMScheduler, "ddpm": DDPMScheduler}


@torch.no_grad()
def generate_images(
    model: LatentDiffusion,
    options: Any,
    shape: tuple[int, int, int, int],
    condition: Condition | None,
    draws: Draws,
    on_progress: OnProgress = ignore_progress,
) -> Tensor:
    """Return one image per row of the condition; `shape` is the shape of all their latents.

    `on_progress` receives the progress after each step of each batch.
    """
    images, steps = [], options.sample_steps
    begins = range(0, shape[0], AT_ONCE)
    for batch, begin in enumerate(begins):
        rows = slice(begin, begin + AT_ONCE)
        part = None if condition is None else Condition(condition.given[rows], condition.kept[rows])
        size = (min(AT_ONCE, shape[0] - begin), *shape[1:])

        def step_done(done: int, before: int = batch * steps) -> None:
            on_progress(before + done, len(begins) * steps)

        images.append(model.pixels(_sample_latents(model, options, size, part, draws, step_done)))
    return torch.cat(images)


def _sample_latents(
    model: LatentDiffusion, options: Any, size: tuple[int, ...], condition: Condition | None, draws: Draws, done: Any
) -> Tensor:
    # At the noisiest timesteps the signal is divided by almost zero: a small error in the noise becomes thousands. Clip
    # it.
    scheduler = SCHEDULERS[options.sampler](
        **build_schedule_settings(options),
        clip_sample=True,
        clip_sample_range=1.0 if model.autoencoder is None else FARTHEST,
        # Starts at the last timestep, where only noise is left; diffusers' default starts at a less noisy one.
        timestep_spacing="trailing",
    )
    scheduler.set_timesteps(options.sample_steps)
    latents = draws.normal(torch.empty(size, device=model.latent_scale.device))
    # With trailing spacing, rounding sometimes gives diffusers one timestep more than requested, below the first.
    for number, timestep in enumerate(scheduler.timesteps.tolist()[: options.sample_steps], 1):
        predicted = _predict_guided(model, latents, timestep, condition, options.guidance)
        latents = _step_latents(scheduler, predicted, timestep, latents, draws.generator)
        done(number)
    return latents


@island
def _step_latents(
    scheduler: Any, predicted: Tensor, timestep: int, latents: Tensor, generator: torch.Generator | None
) -> Tensor:
    stepped: Tensor = scheduler.step(predicted, timestep, latents, generator=generator).prev_sample
    return stepped


def _predict_guided(
    model: LatentDiffusion, latents: Tensor, timestep: int, condition: Condition | None, guidance: float
) -> Tensor:
    """Return the guided prediction: away from the unconditional one, both computed in one batch."""
    # These two need only one of the two predictions, half the work.
    if condition is None or guidance in (0.0, 1.0):
        wanted = condition.absent() if condition is not None and guidance == 0.0 else condition
        return widen(model.denoise(latents, _repeat_timestep(timestep, latents), wanted))
    both = torch.cat([latents, latents])
    with_it, without = widen(model.denoise(both, _repeat_timestep(timestep, both), condition.twice())).chunk(2)
    return without + guidance * (with_it - without)


def _repeat_timestep(timestep: int, latents: Tensor) -> Tensor:
    """Return the same integer timestep for each sample."""
    return torch.full((len(latents),), timestep, device=latents.device)
