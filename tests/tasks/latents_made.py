"""Samples, and an encoding that is quick and can be checked by hand."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.data.dataset import BadSample, Sample, Source
from halfstep.errors import HalfstepError
from halfstep.tasks.latent_cache.cache import PER_CHUNK, CachedLatents, load_or_encode_latents
from halfstep.tasks.latent_cache.encoding import MomentEncoder, measure_latent_scale

PARTS = {"autoencoder": "a" * 64, "format": "bf16", "size": "4", "channels": "1"}


class Pictures(Source):
    """Small gray images by number, of which some cannot be read."""

    def __init__(self, samples: int, unreadable: tuple[int, ...] = (), word: str = "picture") -> None:
        self.samples, self.unreadable, self.word = samples, unreadable, word
        self.decoded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int) -> Sample:
        if index in self.unreadable:
            raise BadSample(self.name(index), "cut off")
        self.decoded.append(index)
        return {"image": image(index), **self.without_image(index)}

    def without_image(self, index: int) -> Sample:
        return {"label": torch.tensor(index % 7)}

    def name(self, index: int) -> str:
        return f"{self.word} {index}"


def image(number: int) -> Tensor:
    return torch.full((1, 4, 4), number / 100.0) + torch.arange(16.0).view(1, 4, 4) / 16


def encode(images: Tensor) -> Tensor:
    pooled = F.avg_pool2d(images, 2)
    return torch.cat([pooled, -pooled - 1.0], 1)


def ready(sample: Sample) -> Tensor:
    return sample["image"]


def encoding(how: Callable[[Tensor], Tensor] = encode, **more: Any) -> MomentEncoder:
    return MomentEncoder(how, ready, torch.empty(0).device, **{"batch_size": 64, **more})


def expected(number: int) -> Tensor:
    return encode(image(number)[None])[0]


class Counting:
    """Encodes, and knows how many images it saw."""

    def __init__(self) -> None:
        self.images = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.images += len(images)
        return encode(images)


def stop_asked(images: Tensor) -> Tensor:
    """Encodes, in a process that is being asked to stop."""
    signal.raise_signal(signal.SIGTERM)
    return encode(images)


def scale_on(rank: int, numbers: list[int]) -> float | str:
    shares = [list(range(numbers[0])), list(range(numbers[0], sum(numbers)))]
    try:
        return measure_latent_scale([drawn(number) for number in shares[rank]])
    except HalfstepError as error:
        return str(error)


def drawn(number: int) -> Tensor:
    return torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(number)) * (1 + number)


MANY = 2 * PER_CHUNK + 88


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tests of a file that imports it: no other test's latents are found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def kept(source: Any = None, how: Any = encode, **parts: str) -> CachedLatents:
    return load_or_encode_latents(encoding(how), source or Pictures(MANY), parts={**PARTS, **parts})


def moments_of(latents: CachedLatents, number: int) -> Tensor:
    found = latents.moments(number)
    assert found is not None
    return found


def overflows(images: Tensor) -> Tensor:
    found = encode(images)
    found[images.mean(dim=(1, 2, 3)) > 4.4] = torch.inf  # beyond picture 400
    return found
