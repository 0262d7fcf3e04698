"""A part of the samples for validation, chosen by name: adding a file moves no other, and neither does the seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

from halfstep.errors import BadData
from halfstep.train.data.source import Files, Sample, Source, files_of, without_image


class Keyed(Protocol):
    """A source whose samples have names that do not change when the whole set is moved elsewhere."""

    def key(self, index: int) -> str: ...


class Subset:
    """Some samples of a source, numbered anew."""

    def __init__(self, source: Source, numbers: Sequence[int]) -> None:
        self.source, self.numbers = source, list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, index: int) -> Sample:
        return self.source.read(self.numbers[index])

    def without_image(self, index: int) -> Sample:
        return without_image(self.source, self.numbers[index])

    def name(self, index: int) -> str:
        return self.source.name(self.numbers[index])

    def key(self, index: int) -> str:
        return key_of(self.source, self.numbers[index])

    def files_of(self, index: int) -> Files:
        return files_of(self.source, self.numbers[index])


def split(source: Source, fraction: float) -> tuple[Subset, Subset]:
    """For training, and for validation: about `fraction` of the samples, never none and never all."""
    if len(source) < 2 or not 0.0 < fraction < 1.0:
        raise BadData(
            f"a split of {len(source)} samples with {fraction:g} for validation",
            allowed="at least 2 samples, and a fraction between 0 and 1",
            do="add samples, or give data.val a folder",
        )
    places = [_place(key_of(source, index)) for index in range(len(source))]
    chosen = {index for index, place in enumerate(places) if place < fraction}
    # Where chance leaves a side empty, the sample nearest to it goes over.
    chosen = chosen or {places.index(min(places))}
    if len(chosen) == len(places):
        chosen.remove(places.index(max(places)))
    train, val = [i for i in range(len(places)) if i not in chosen], sorted(chosen)
    return Subset(source, train), Subset(source, val)


def key_of(source: Source, index: int) -> str:
    # isinstance with a protocol takes 20 µs, and there may be a million samples.
    key: Callable[[int], str] = getattr(source, "key", source.name)
    return key(index)


def _place(key: str) -> float:
    digest = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, person=b"halfstep val").digest()
    return int.from_bytes(digest, "big") / 2**64
