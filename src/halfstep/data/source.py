"""Define the source of samples: by number, decoded, and not yet transformed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from halfstep.data.layout import place_of
from halfstep.errors import BadData
from halfstep.errors import BadSample as BadSample

Sample = dict[str, Tensor]
"""Tensors by name: `image` and, depending on the task, `mask` or `label`."""
Transform = Callable[[Sample], Sample]
"""Draws from torch's default generator, which is seeded for each sample of each epoch."""
Collate = Callable[[list[Sample]], Sample]
"""Collates samples; draws from torch's default generator, which is seeded for each batch."""


class Source(Protocol):
    """Samples by number. Safe to use from several processes at once.

    A source may also have `key(index)`, a name that stays when the whole set is moved; `files_of(index)`, so that a
    resumed run notices changed contents (samples may share a file); and `without_image(index)`.
    """

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """Return the sample; raise BadSample where it cannot be read."""
        ...

    def name(self, index: int) -> str:
        """Return the name for display: a path, or a member of a shard."""
        ...


Files = Iterable[tuple[str, str | Path]]
"""Files with names that do not change when the whole set is moved."""


def files_of(source: Source, index: int) -> Files:
    """Return the files of a sample; none where the source does not name them."""
    # isinstance with a protocol takes 20 µs, and there may be a million samples.
    say: Callable[[int], Files] | None = getattr(source, "files_of", None)
    return say(index) if say else ()


def without_image(source: Source, index: int) -> Sample:
    """Return a sample without its image, which is decoded only where the source has no other way."""
    rest: Callable[[int], Sample] | None = getattr(source, "without_image", None)
    return rest(index) if rest else {name: part for name, part in source.read(index).items() if name != "image"}


class Replaced(NamedTuple):
    """A bad sample, and its replacement."""

    number: int
    name: str
    reason: str
    by: int


class Batch(NamedTuple):
    """A batch of a loader: tensors for the task, and facts for the loop."""

    tensors: Sample
    ids: list[int]
    """The number of each sample in its source."""
    replaced: list[Replaced]
    nonfinite: Sequence[int] = ()
    """Samples that were non-finite before mixing."""


# -- split ------------------------------------------------------------------------------------------------------------
# Split off validation samples by name: neither an added file nor the seed moves any other.


class WrappedSource:
    """A base of sources that read from another one: a sample keeps its name, key and files."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def index_in_source(self, index: int) -> int:
        """Return the number that a sample has in the underlying source."""
        return index

    def name(self, index: int) -> str:
        """Return the name for display."""
        return self.source.name(self.index_in_source(index))

    def key(self, index: int) -> str:
        """Return the name that does not depend on where the set is."""
        return key_of(self.source, self.index_in_source(index))

    def files_of(self, index: int) -> Files:
        """Return the files of the sample: the data's fingerprint does not depend on the wrapper."""
        return files_of(self.source, self.index_in_source(index))


class Subset(WrappedSource):
    """Some samples of a source, renumbered."""

    def __init__(self, source: Source, numbers: Sequence[int]) -> None:
        super().__init__(source)
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def index_in_source(self, index: int) -> int:
        """Return the number that a sample has in the underlying source."""
        return self.numbers[index]

    def read(self, index: int) -> Sample:
        """Read a sample; raise BadSample where it cannot be read."""
        return self.source.read(self.numbers[index])

    def without_image(self, index: int) -> Sample:
        """Return the sample without its image."""
        return without_image(self.source, self.numbers[index])


def split(source: Source, fraction: float) -> tuple[Subset, Subset]:
    """Return the training and validation samples, about `fraction` of them for validation, never none or all.

    Raises BadData for fewer than two samples or an invalid fraction.
    """
    if len(source) < 2 or not 0.0 < fraction < 1.0:
        raise BadData(
            f"a split of {len(source)} samples with {fraction:g} for validation",
            allowed="at least 2 samples, and a fraction between 0 and 1",
            do="add samples, or give data.val a folder",
        )
    places = [place_of(key_of(source, index)) for index in range(len(source))]
    chosen = {index for index, place in enumerate(places) if place < fraction}
    # Where chance leaves a side empty, the nearest sample is moved there.
    chosen = chosen or {places.index(min(places))}
    if len(chosen) == len(places):
        chosen.remove(places.index(max(places)))
    train, val = [i for i in range(len(places)) if i not in chosen], sorted(chosen)
    return Subset(source, train), Subset(source, val)


def key_of(source: Source, index: int) -> str:
    """Return the name of a sample that does not change when the set is moved; its display name where there is none."""
    # isinstance with a protocol takes 20 µs, and there may be a million samples.
    key: Callable[[int], str] = getattr(source, "key", source.name)
    return key(index)
