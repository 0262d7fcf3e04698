"""A sample by (epoch, number): read, transformed with a generator of its own, and replaced where it cannot be read."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from halfstep.errors import BadData, HalfstepError
from halfstep.train.data.order import derive
from halfstep.train.data.source import BadSample, Replaced, Sample, Source, Transform

QUARANTINED = "quarantined"
"""The reason of a replacement that is no fault of the file: the sample made a step fail."""
TRIES = 8
LEFT_OUT = -1
"""Stands in for a sample that nothing stands in for."""

Key = tuple[int, int]
"""Epoch and number."""


class Item(NamedTuple):
    """What is read for a key. `number` is the sample that was read: the stand-in's, where there is one."""

    sample: Sample | None
    number: int
    replaced: list[Replaced]
    epoch: int
    error: HalfstepError | None = None
    """Carried as a value: torch would wrap an exception of a worker in the text of its traceback."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The generators begin with `seed` inside, and go on outside as if nothing had happened."""
    with generators_aside():
        seed_generators(seed)
        yield


@contextmanager
def generators_aside() -> Iterator[None]:
    """torch's, Python's and NumPy's generators are free inside, and go on outside as if nothing had happened.

    NumPy takes a tenth of a millisecond for it: once for a batch is nothing, once for every sample would be felt.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_generators(seed: int) -> None:
    # torch.manual_seed would also seed the devices', and those are the training's.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # The upper bits: NumPy's generator is torch's, which would draw the same words from the same seed.
    np.random.seed(seed >> 31)


class Keyed(Dataset[Item]):
    """Items by key; the generators of the training are set aside once for all that are asked for together."""

    def __getitem__(self, key: Key) -> Item:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[Item]:
        """What a DataLoader asks for: a batch at a time."""
        with generators_aside():
            return [self._item(*key) for key in keys]

    def _item(self, epoch: int, number: int) -> Item:
        raise NotImplementedError


class Samples(Keyed):
    """For training: a bad sample is replaced by another one, chosen by (seed, epoch, number) alone."""

    def __init__(self, source: Source, transform: Transform, seed: int, quarantined: Iterable[int] = ()) -> None:
        self.source, self.transform, self.seed = source, transform, seed
        self.quarantined = set(quarantined)

    def __len__(self) -> int:
        return len(self.source)

    def _item(self, epoch: int, number: int) -> Item:
        try:
            return self._first_good(epoch, number)
        except HalfstepError as error:
            return Item(None, number, [], epoch, error)

    def _first_good(self, epoch: int, number: int) -> Item:
        failed: list[tuple[int, str, str]] = []
        for candidate in self._candidates(epoch, number):
            try:
                if candidate in self.quarantined:
                    raise BadSample(self.source.name(candidate), QUARANTINED)
                sample = prepared(self, epoch, candidate)
            except BadSample as bad:
                failed.append((candidate, bad.name, bad.reason))
            else:
                return Item(sample, candidate, [Replaced(*one, by=candidate) for one in failed], epoch)
        _, name, reason = failed[0]
        raise BadData(
            f"{name}: {reason}; and none of {TRIES} others that were tried in its place can be read",
            allowed="data in which most samples are good",
            do=f"look at {failed[-1][1]} ({failed[-1][2]}) as well, and at the disk",
        )

    def _candidates(self, epoch: int, number: int) -> Iterator[int]:
        yield number
        for attempt in range(TRIES):
            yield derive(self.seed, "instead", epoch, number, attempt) % len(self.source)


class ValSamples(Keyed):
    """For evaluation: a bad sample is left out and reported. Another in its place would count twice in the metric."""

    def __init__(self, source: Source, transform: Transform, seed: int) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
        return len(self.source)

    def _item(self, epoch: int, number: int) -> Item:
        try:
            return Item(prepared(self, epoch, number), number, [], epoch)
        except BadSample as bad:
            return Item(None, number, [Replaced(number, bad.name, bad.reason, LEFT_OUT)], epoch)
        except HalfstepError as error:
            return Item(None, number, [], epoch, error)


def prepared(samples: Samples | ValSamples, epoch: int, number: int) -> Sample:
    """What is drawn depends on (seed, epoch, number): not on the worker that does it, nor on what it did before."""
    seed_generators(derive(samples.seed, "augment", epoch, number))
    return samples.transform(samples.source.read(number))
