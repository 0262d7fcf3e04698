"""From samples to the moments of their latents: images are read by workers, and encoded in batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import default_collate

from halfstep import world
from halfstep.errors import BadData
from halfstep.train.data.loader import ValLoader
from halfstep.train.data.samples import ValSamples
from halfstep.train.data.source import BadSample, Sample, Source

TRIES = 64
"""Samples that are looked at for one that can be read."""
FAIR = 512
"""Samples that say enough about all of them, where each has to be encoded for it."""


@dataclass(frozen=True)
class Encoding:
    """How the image of a sample becomes the moments of its latents: their mean, and the logarithm of their variance."""

    encode: Callable[[Tensor], Tensor]
    """Images, one batch on `device`, to moments: twice as many channels as the latents have."""
    image_of: Callable[[Sample], Tensor]
    """The image of a sample as the autoencoder sees it; always the same one. Runs in the workers."""
    device: torch.device
    batch_size: int = 16
    workers: int = 0

    def rows(self, source: Source, numbers: Sequence[int]) -> Generator[tuple[int, Tensor | None], None, None]:
        """Each number with its sample's moments, in main memory; None for a sample that cannot be read."""
        if not numbers:
            return
        ready = Ready(source, numbers, self.image_of, self.shape(source))
        loader = ValLoader(
            ValSamples(ready, _as_it_is, seed=0),
            batch_size=self.batch_size,
            collate=default_collate,
            workers=self.workers,
            device=self.device,
        )
        with closing(iter(loader)) as batches:  # type: ignore[type-var]
            for batch in batches:
                moments = self.moments(batch.tensors["image"])
                for place, row, good in zip(batch.ids, moments, batch.tensors["good"].tolist(), strict=True):
                    yield numbers[place], row if good else None

    def moments(self, images: Tensor) -> Tensor:
        """Of a batch where the autoencoder is; in main memory, as they are kept."""
        with torch.no_grad():
            return self.encode(images).detach().to(torch.float32).cpu().contiguous()

    def shape(self, source: Source) -> tuple[int, ...]:
        """Of an image as the autoencoder sees it."""
        for number in range(min(len(source), TRIES)):
            image = ready_image(source, number, self.image_of)
            if image is not None:
                return tuple(image.shape)
        raise BadData(
            f"none of the first {min(len(source), TRIES)} samples can be read; the first is {source.name(0)}",
            allowed="data in which most samples are good",
            do="look at this file, and at the disk",
        )

    def spread(self, source: Source, most: int = FAIR) -> Iterator[Tensor]:
        """Moments of some samples from all over the source; each process has its share of them."""
        for _, moments in self.rows(source, evenly(len(source), most)[world.rank() :: world.size()]):
            if moments is not None:
                yield moments


class Ready:
    """Some samples of a source as the autoencoder sees them. One that cannot be read is an empty image, and not `good`:
    it must not move the others out of their places."""

    def __init__(
        self, source: Source, numbers: Sequence[int], image_of: Callable[[Sample], Tensor], shape: tuple[int, ...]
    ) -> None:
        self.source, self.numbers, self.image_of, self.shape = source, numbers, image_of, shape

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, index: int) -> Sample:
        image = ready_image(self.source, self.numbers[index], self.image_of)
        good = torch.tensor(image is not None)
        return {"image": torch.zeros(self.shape) if image is None else image, "good": good}

    def name(self, index: int) -> str:
        return self.source.name(self.numbers[index])


def ready_image(source: Source, number: int, image_of: Callable[[Sample], Tensor]) -> Tensor | None:
    """The image of a sample in fp32; None where it cannot be read, or holds numbers that are not finite."""
    try:
        image = image_of(source.read(number)).to(torch.float32)
    except BadSample:
        return None
    return image if bool(torch.isfinite(image).all()) else None


def evenly(count: int, most: int) -> list[int]:
    """At most `most` numbers below `count`, evenly spaced: the first ones alone may all be of one class."""
    taken = min(count, most)
    return [place * count // taken for place in range(taken)]


def _as_it_is(sample: Sample) -> Sample:
    return sample
