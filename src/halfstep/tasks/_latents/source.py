"""Samples with their latents in place of their images, as soon as there are any."""

from __future__ import annotations

from halfstep.tasks._latents.cache import CachedLatents
from halfstep.train.data.source import BadSample, Files, Sample, Source, files_of, without_image
from halfstep.train.data.split import key_of


class LatentSource:
    """The samples of a source. From when `latents` is set, each has `moments` instead of `image`, which is not read.

    A run asks for its sources before there is a model, and encodes when there is one: `latents` is set in between.
    Workers begin later still, and get this object as it is then.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.latents: CachedLatents | None = None

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Sample:
        if self.latents is None:
            return self.source.read(index)
        moments = self.latents.moments(index)
        if moments is None:
            self.source.read(index)  # says itself what is wrong with it
            raise BadSample(self.name(index), "it has no latents: it could not be read when they were encoded")
        return {**without_image(self.source, index), "moments": moments}

    def without_image(self, index: int) -> Sample:
        return without_image(self.source, index)

    def name(self, index: int) -> str:
        return self.source.name(index)

    def key(self, index: int) -> str:
        return key_of(self.source, index)

    def files_of(self, index: int) -> Files:
        """The source's own: what a run's data is does not depend on whether latents are kept."""
        return files_of(self.source, index)
