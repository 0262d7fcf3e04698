"""Where samples come from: by number, as they are on disk, decoded and not yet transformed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

Sample = dict[str, Tensor]
"""Tensors by name: `image` and, as the task wants it, `mask` or `label`."""
Transform = Callable[[Sample], Sample]
"""Draws from torch's own generator, which is seeded for each sample of each epoch."""
Collate = Callable[[list[Sample]], Sample]
"""Samples to a batch; draws from torch's own generator, which is seeded for each batch."""


class Source(Protocol):
    """Samples by number. Safe to use from several processes at once."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """The sample, or BadSample where it cannot be read."""
        ...

    def name(self, index: int) -> str:
        """What a person would look for: a path, or a member of a shard."""
        ...


Files = Iterable[tuple[str, str | Path]]
"""Files with their names, which do not change when the whole set is moved elsewhere."""


class Filed(Protocol):
    """A source that says which files it reads: a run that goes on notices when their contents have changed."""

    def files_of(self, index: int) -> Files:
        """Those that the sample is read from. Samples may share a file."""
        ...


def files_of(source: Source, index: int) -> Files:
    """None for a source that does not say."""
    # isinstance with a protocol takes 20 µs, and there may be a million samples.
    say: Callable[[int], Files] | None = getattr(source, "files_of", None)
    return say(index) if say else ()


def without_image(source: Source, index: int) -> Sample:
    """Every part of a sample but its image, which is decoded only for a source that cannot do without."""
    rest: Callable[[int], Sample] | None = getattr(source, "without_image", None)
    return rest(index) if rest else {name: part for name, part in source.read(index).items() if name != "image"}


class BadSample(Exception):
    """A sample that cannot be read: skipped, replaced and counted."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Replaced(NamedTuple):
    """A bad sample, and the one that stands in for it."""

    number: int
    name: str
    reason: str
    by: int


class Batch(NamedTuple):
    """What a loader yields: tensors for the task, and what the loop wants to know of them."""

    tensors: Sample
    ids: list[int]
    """The number of each sample in its source."""
    replaced: list[Replaced]
    nonfinite: Sequence[int] = ()
    """Numbers of samples that were not finite before the batch was mixed."""
