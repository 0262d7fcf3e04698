"""Encode samples to latent moments: workers read the images, and the autoencoder encodes them in batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.utils.data import default_collate

from halfstep import distributed
from halfstep.data.dataset import BadSample, Sample, Source, Subset, ValSamples
from halfstep.data.loader import ValLoader
from halfstep.errors import BadData
from halfstep.launch_variables import read_launched_rank


def resolve_local_ranks() -> tuple[int, int]:
    """Return the local rank and the local world size: this rank among those on its host."""
    if "LOCAL_RANK" not in os.environ:
        # Without torchrun's variables, all ranks are taken to be on one host.
        return distributed.rank(), distributed.count_ranks()
    launched = read_launched_rank()
    return launched.local_rank, launched.local_world_size or 1


LEAST, MOST = -30.0, 20.0
"""Bounds of the log variance, the same as diffusers'."""


def split_moments(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the clamped log variance; `moments` is one sample or a batch."""
    mean, spread = moments.chunk(2, dim=-3)
    return mean, spread.clamp(LEAST, MOST)


TRIES = 64
"""How many samples are tried to find one that can be read."""
FAIR = 512
"""How many samples are enough to estimate a standard deviation, where each has to be encoded for it."""


@dataclass(frozen=True)
class MomentEncoder:
    """How the image of a sample becomes latent moments, that is mean and log variance."""

    encode: Callable[[Tensor], Tensor]
    """A function from a batch of images on `device` to moments, with twice as many channels as the latents."""
    image_of: Callable[[Sample], Tensor]
    """A function from a sample to the image the autoencoder sees. It is deterministic and runs in the workers."""
    device: torch.device
    batch_size: int = 16
    workers: int = 0

    def rows(self, source: Source, numbers: Sequence[int]) -> Generator[tuple[int, Tensor | None], None, None]:
        """Yield each number with the moments of its sample, on the host; None for a sample that cannot be read."""
        if not numbers:
            return
        ready = AutoencoderImages(source, numbers, self.image_of, self.shape(source))
        loader = ValLoader(
            ValSamples(ready, _keep_sample, seed=0),
            batch_size=self.batch_size,
            collate=default_collate,
            workers=self.workers,
            device=self.device,
        )
        # Ends the workers even where the caller stops early.
        with closing(iter(loader)) as batches:  # type: ignore[type-var]
            for batch in batches:
                moments = self.moments(batch.tensors["image"])
                for place, row, good in zip(batch.ids, moments, batch.tensors["good"].tolist(), strict=True):
                    yield numbers[place], row if good else None

    def moments(self, images: Tensor) -> Tensor:
        """Return the moments of a batch, in fp32 on the host."""
        with torch.no_grad():
            return self.encode(images).detach().to(torch.float32).cpu().contiguous()

    def shape(self, source: Source) -> tuple[int, ...]:
        """Return the shape of an image as the autoencoder sees it.

        Raise `BadData` if none of the first `TRIES` samples can be read.
        """
        for number in range(min(len(source), TRIES)):
            image = read_finite_image(source, number, self.image_of)
            if image is not None:
                return tuple(image.shape)
        raise BadData(
            f"none of the first {min(len(source), TRIES)} samples can be read; the first is {source.name(0)}",
            allowed="data in which most samples are good",
            do="check this file and the disk",
        )

    def spread(self, source: Source, most: int = FAIR) -> Iterator[Tensor]:
        """Yield the moments of samples spread evenly over the source; each rank yields its share."""
        for _, moments in self.rows(
            source, select_spaced_numbers(len(source), most)[distributed.rank() :: distributed.count_ranks()]
        ):
            if moments is not None:
                yield moments


class AutoencoderImages(Subset):
    """Samples of a source as the autoencoder sees them.

    An unreadable sample becomes an empty image with `good` false, so that the other samples keep their positions.
    """

    def __init__(
        self, source: Source, numbers: Sequence[int], image_of: Callable[[Sample], Tensor], shape: tuple[int, ...]
    ) -> None:
        super().__init__(source, numbers)
        self.image_of, self.shape = image_of, shape

    def read(self, index: int) -> Sample:
        """Return the image of a sample and whether it is good."""
        image = read_finite_image(self.source, self.numbers[index], self.image_of)
        good = torch.tensor(image is not None)
        return {"image": torch.zeros(self.shape) if image is None else image, "good": good}


def read_finite_image(source: Source, number: int, image_of: Callable[[Sample], Tensor]) -> Tensor | None:
    """Return the image of a sample in fp32; None if it cannot be read or has non-finite values."""
    try:
        image = image_of(source.read(number)).to(torch.float32)
    except BadSample:
        return None
    return image if bool(torch.isfinite(image).all()) else None


def select_spaced_numbers(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced numbers below `count`.

    The first samples alone would not do: they may all be of one class.
    """
    taken = min(count, most)
    return [place * count // taken for place in range(taken)]


def _keep_sample(sample: Sample) -> Sample:
    return sample


SMALLEST = 1e-6
"""Standard deviations below this count as zero: the variance that LEAST leaves is smaller still."""

FAR = 4.0
"""The factor by which the standard deviation of scaled latents may differ from 1 before the user is warned."""
ENOUGH = 32
"""Samples per rank that are enough for this warning; without a cache, encoding more could take long."""


def measure_latent_scale(moments: Iterable[Tensor]) -> float:
    """Return 1 / the standard deviation of the latents over all ranks; the result is the same on each.

    Raise `BadData` if the latents are non-finite or constant.
    """
    count, deviation = _measure_spread(moments)
    if not SMALLEST < deviation < math.inf:
        raise BadData(
            f"the standard deviation of {count:,.0f} latent values is {deviation:g}",
            allowed="latents that are finite and not constant",
            do="check the autoencoder's reconstructions, and train it again with a smaller loss.kl",
        )
    return 1.0 / deviation


def describe_scale_misfit(scale: float, moments: Iterable[Tensor]) -> list[str]:
    """Return a warning line where a scale that came with an autoencoder does not fit its latents.

    diffusers writes a scaling_factor into every config, by default that of another autoencoder. Non-finite latents give
    no warning here: the run starts, and its guard locates their origin.
    """
    deviation = scale * _measure_spread(islice(moments, ENOUGH))[1]
    if not math.isfinite(deviation) or 1.0 / FAR <= deviation <= FAR:
        return []
    return [
        f"the autoencoder's own scaling_factor {scale:.4g} gives its latents a standard deviation of {deviation:.2g}, "
        "but denoisers need 1: remove it from its config.json to have it measured"
    ]


def _measure_spread(moments: Iterable[Tensor]) -> tuple[float, float]:
    """Return how many numbers there are and their standard deviation over all ranks, in float64; NaN where there is
    none.

    The variance of latents is the variance of their means plus the mean of their own variances.
    """
    sums = distributed.run_and_gather_results(lambda: _sum_moments(moments))
    count, total, squares, own = (math.fsum(column) for column in zip(*sums, strict=True))
    # Every rank has the sums of all ranks, so all compute the same scale.
    variance = (squares / count - (total / count) ** 2 + own / count) if count else math.nan
    return count, math.sqrt(variance) if variance >= 0 else math.nan


def _sum_moments(moments: Iterable[Tensor]) -> list[float]:
    """Return the count, the sum and the sum of squares of the means, and the sum of the variances."""
    # E[x²] - E[x]² cancels badly, and millions of values are added: float64 keeps enough digits.
    sums = torch.zeros(4, dtype=torch.float64)
    for one in moments:
        mean, logarithm = split_moments(one.detach().cpu().to(torch.float64))
        own = logarithm.exp()
        number = torch.tensor(mean.numel(), dtype=torch.float64)
        sums += torch.stack([number, mean.sum(), mean.square().sum(), own.sum()])
    found: list[float] = sums.tolist()
    return found
