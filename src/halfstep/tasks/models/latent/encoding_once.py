"""What a frozen autoencoder makes of the data: kept on the disk where images are the same in every epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.precision.island import islands
from halfstep.precision.precision import Precision
from halfstep.tasks._latents.cache import cached
from halfstep.tasks._latents.encoding import Encoding
from halfstep.tasks._latents.source import LatentSource
from halfstep.tasks.models.latent.model import LatentDiffusion
from halfstep.train.data.source import Sample
from halfstep.train.task import Split, Told
from halfstep.train.weights import digest


def encoded_once(
    model: LatentDiffusion,
    precision: Precision,
    recipe: Any,
    sources: Mapping[Split, LatentSource],
    image_of: Callable[[Sample], Tensor],
    told: Told,
) -> tuple[Iterable[Tensor], list[str]]:
    """Moments to measure a scale from, and lines to tell; `sources` read moments from now on where they are kept."""
    assert model.autoencoder is not None
    data = recipe.data
    device = next(model.parameters()).device
    encoding = Encoding(functools.partial(_moments, model, precision, device), image_of, device)
    if data.augment != "none" or not data.cache_latents:
        return encoding.spread(sources["train"].source), []
    parts = {
        "autoencoder": digest(model.autoencoder),
        "format": computed_in(model, precision),
        "size": str(data.size),
        "channels": str(data.channels),
    }
    kept = {split: cached(encoding, source.source, parts=parts, told=told) for split, source in sources.items()}
    for split, source in sources.items():
        source.latents = kept[split]
    return kept["train"].spread(), [line for latents in kept.values() for line in latents.notes]


def computed_in(model: LatentDiffusion, precision: Precision) -> str:
    """The format that the autoencoder computes in: the recipe made it an island, or a guard did, or a part of it."""
    assert model.autoencoder is not None
    if not precision.casts:
        return precision.name  # islands compute in tf32 where the run was asked to
    raised = islands(model.autoencoder)
    if "" in raised:
        return "fp32"
    return f"{precision.name} but for {', '.join(sorted(raised))}" if raised else precision.name


def _moments(model: LatentDiffusion, precision: Precision, device: torch.device, images: Tensor) -> Tensor:
    with precision.inference(device):
        return model.moments(images)
