"""Define sources of samples, order the samples of an epoch, and read them.

A source gives samples by number, decoded and not yet transformed. Each is transformed with its own seed; those that
cannot be read are replaced.

The order is a function of (seed, epoch, position), and of nothing else: not of the number of devices, of workers, or of
interruptions. A step takes the next window of the epoch's order; devices and micro-batches divide the window. With the
same number of samples per step, a step has the same samples on one device and on a thousand.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from halfstep.data.layout import Rule, compute_split_positions, select_validation_by_position
from halfstep.errors import BadData, HalfstepError
from halfstep.errors import BadSample as BadSample
from halfstep.numbers import format_counted_noun
from halfstep.random_state import preserve_host_random_state

Sample = dict[str, Tensor]
"""Tensors by name: `image` and, depending on the task, `mask` or `label`."""
Transform = Callable[[Sample], Sample]
"""Draws from torch's default generator, which is seeded for each sample of each epoch."""
Collate = Callable[[list[Sample]], Sample]
"""Collates samples; draws from torch's default generator, which is seeded for each batch."""


Files = Iterable[tuple[str, str | Path]]
"""Files with names that do not change when the whole set is moved."""


class Source(ABC):
    """Samples by number. Safe to use from several processes at once.

    A kind of data defines `__len__`, `read` and `name`; the other methods have defaults.
    """

    notices_changes: bool = False
    """Whether it notices files that change under a run by itself, or reads no file after its start."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Sample:
        """Return the sample; raise BadSample if it cannot be read."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name for display: a path, or a member of a shard."""

    def without_image(self, index: int) -> Sample:
        """Return the sample without its image, which is decoded only where there is no other way."""
        return {name: part for name, part in self.read(index).items() if name != "image"}

    def prefetch(self, numbers: Sequence[int]) -> Iterator[int]:
        """Read the bytes of the next samples before `read` decodes them; yield the place of each before."""
        return iter(())

    def key(self, index: int) -> str:
        """Return the name that does not change when the whole set is moved."""
        return self.name(index)

    def keys_of(self, numbers: Sequence[int]) -> list[str]:
        """Return the keys of several samples."""
        return [self.key(number) for number in numbers]

    def files_of(self, index: int) -> Files:
        """Return the files of a sample, whose contents a resumed run compares; all samples have some, or none has."""
        return ()

    @property
    def has_files(self) -> bool:
        """Whether the samples have files."""
        return len(self) > 0 and any(True for _ in self.files_of(0))

    def every_file(self) -> Files:
        """Return the files of all samples, repeated where samples share them."""
        # There may be a billion samples that are drawn.
        numbers = range(len(self)) if self.has_files else ()
        return (file for number in numbers for file in self.files_of(number))

    @property
    def chosen(self) -> str | None:
        """Digits for which samples of an index these are, and in which order; empty for all, None without an index."""
        return None

    @property
    def base(self) -> Source:
        """The source that the samples are read from."""
        return self

    def index_in_base(self, index: int) -> int:
        """Return the number that a sample has in `base`."""
        return index

    def divide(self, fraction: float, rule: Rule) -> tuple[Subset, Subset]:
        """Return the samples for training, and those for validation by `rule`."""
        places = self.split_positions(fraction)
        chosen = rule(places, fraction)
        train, val = [number for number in range(len(places)) if number not in chosen], sorted(chosen)
        return Subset(self, train), Subset(self, val)

    def split_positions(self, fraction: float) -> list[float]:
        """Return the position of each sample, by which a share is chosen; exact where it may decide."""
        return compute_split_positions(self.keys_of(range(len(self))))


class OwnSource(Source):
    """A source of another class, such as that of a task of one's own: its methods, and the defaults for the others."""

    OPTIONAL = ("key", "keys_of", "files_of", "every_file", "without_image", "prefetch", "notices_changes")

    def __init__(self, own: Any) -> None:
        self.own = own
        vars(self).update((name, getattr(own, name)) for name in self.OPTIONAL if hasattr(own, name))

    def __len__(self) -> int:
        return len(self.own)

    def read(self, index: int) -> Sample:
        """Return the sample."""
        sample: Sample = self.own.read(index)
        return sample

    def name(self, index: int) -> str:
        """Return the name for display."""
        return str(self.own.name(index))


def complete_source(found: Any) -> Source:
    """Return a source with all methods: itself, or for an object that has some of them one that adds the others."""
    return found if isinstance(found, Source) else OwnSource(found)


class ReplacedSample(NamedTuple):
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
    replaced: list[ReplacedSample]
    nonfinite: Sequence[int] = ()
    """Samples that were non-finite before mixing."""


class WrappedSource(Source):
    """A base of sources that read from another one: a sample keeps its name, key and files."""

    def __init__(self, source: Source) -> None:
        self.source = complete_source(source)
        self.notices_changes = self.source.notices_changes

    def __len__(self) -> int:
        return len(self.source)

    def index_in_source(self, index: int) -> int:
        """Return the number that a sample has in the underlying source."""
        return index

    def read(self, index: int) -> Sample:
        """Read a sample; raise BadSample if it cannot be read."""
        return self.source.read(self.index_in_source(index))

    def name(self, index: int) -> str:
        """Return the name for display."""
        return self.source.name(self.index_in_source(index))

    def key(self, index: int) -> str:
        """Return the name that does not depend on where the set is."""
        return self.source.key(self.index_in_source(index))

    def files_of(self, index: int) -> Files:
        """Return the files of the sample: the data's fingerprint does not depend on the wrapper."""
        return self.source.files_of(self.index_in_source(index))

    @property
    def chosen(self) -> str | None:
        """Which samples of an index these are."""
        return self.source.chosen

    @property
    def base(self) -> Source:
        """The source at the bottom."""
        return self.source.base

    def index_in_base(self, index: int) -> int:
        """Return the number that a sample has in `base`."""
        return self.source.index_in_base(self.index_in_source(index))


class Subset(WrappedSource):
    """Some samples of a source, renumbered."""

    def __init__(self, source: Source, numbers: Sequence[int]) -> None:
        super().__init__(source)
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def digest(self) -> str:
        """Digits that stand for the numbers."""
        return f"{derive_seed(0, *self.numbers):016x}"

    @property
    def chosen(self) -> str | None:
        """Which samples of an index these are."""
        return None if (chosen := self.source.chosen) is None else f"{chosen}/{self.digest}"

    def index_in_source(self, index: int) -> int:
        """Return the number that a sample has in the underlying source."""
        return self.numbers[index]

    def keys_of(self, numbers: Sequence[int]) -> list[str]:
        """Return the keys of samples."""
        return self.source.keys_of([self.numbers[number] for number in numbers])

    def prefetch(self, numbers: Sequence[int]) -> Iterator[int]:
        """Read the bytes of samples."""
        return self.source.prefetch([self.numbers[number] for number in numbers])

    def without_image(self, index: int) -> Sample:
        """Return the sample without its image."""
        return self.source.without_image(self.numbers[index])


def split_source(source: Source, fraction: float, rule: Rule = select_validation_by_position) -> tuple[Subset, Subset]:
    """Return the training and validation samples, `fraction` of them for validation by `rule`, never none or all.

    Raises BadData for fewer than two samples or an invalid fraction.
    """
    if len(source) < 2 or not 0.0 < fraction < 1.0:
        raise BadData(
            f"a split of {format_counted_noun(len(source), 'sample')} with {fraction:g} for validation",
            allowed="at least 2 samples, and a fraction between 0 and 1",
            do="add samples, or give data.val a folder",
        )
    return complete_source(source).divide(fraction, rule)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a separate seed for each combination of parts: the same on every machine, and below 2**63."""
    # The type is part of the text, so that 1 and "1" differ; the separator occurs in no part.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class EpochOrder(Protocol):
    """The numbers of an epoch by position, such as a tensor of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: Tensor) -> Tensor: ...


class Order:
    """The order of `size` samples in each epoch."""

    has_lanes = False
    """Whether a rank reads the fewest files with neighboring slots of a step in all of its micro-batches."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle

    def numbers(self, epoch: int) -> EpochOrder:
        """Return each number from 0 to size - 1 once."""
        if not self.shuffle:
            return torch.arange(self.size)
        # A separate generator: the order must not depend on other code that draws random numbers.
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        return torch.randperm(self.size, generator=generator)

    def openings(self, epoch: int, share: RankShare, first: int) -> Iterator[list[tuple[int, int]]]:
        """Yield, for each step from `first` on, the chunks of neighboring samples to be read from then on.

        A chunk is its first sample, and one past its last. An order of single samples has none.
        """
        return iter(())


@dataclass(frozen=True)
class RankShare:
    """The share of this rank in each window."""

    batch_size: int
    """Samples per device and micro-batch."""
    microbatches: int = 1
    rank: int = 0
    size: int = 1
    neighboring: bool = False
    """Whether the slots of a rank are neighbors, over all micro-batches of a step, and in an evaluation."""

    @property
    def window(self) -> int:
        """Samples per step, over all devices and micro-batches."""
        return self.batch_size * self.size * self.microbatches

    def steps_per_epoch(self, samples: int) -> int:
        """Return the number of steps of an epoch; the last one is filled up."""
        return -(-samples // self.window)

    def repeats(self, samples: int) -> int:
        """Return how many samples an epoch repeats from its beginning to fill the last window."""
        return self.steps_per_epoch(samples) * self.window - samples

    def batches(self, numbers: EpochOrder, first: int = 0) -> Iterator[list[int]]:
        """Yield this rank's micro-batches from step `first` to the end of the epoch."""
        for step in range(first, self.steps_per_epoch(len(numbers))):
            for micro in range(self.microbatches):
                before = self.rank * self.microbatches + micro if self.neighboring else micro * self.size + self.rank
                start = step * self.window + before * self.batch_size
                places = torch.arange(start, start + self.batch_size) % len(numbers)
                yield numbers[places].tolist()

    def once(self, samples: int) -> Iterator[list[int]]:
        """Yield batches with every sample exactly once over all ranks, for evaluation; the last may be short."""
        # In both cases, ranks differ by at most one sample.
        mine = range(self.rank, samples, self.size)
        if self.neighboring:
            mine = range(samples * self.rank // self.size, samples * (self.rank + 1) // self.size)
        for start in range(0, len(mine), self.batch_size):
            yield list(mine[start : start + self.batch_size])


class BadSampleBudget:
    """A count of distinct bad samples by name; a sample that recurs in a later epoch counts once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bad: set[str] = set()

    def spend(self, replaced: Iterable[ReplacedSample]) -> None:
        """Raise BadData at the first sample beyond the limit; quarantined samples were readable, and do not count."""
        for one in replaced:
            if one.reason == QUARANTINED:
                continue
            self.bad.add(one.name)
            if len(self.bad) > self.limit:
                raise BadData(
                    f"{len(self.bad)} samples cannot be read, the last of them {one.name}: {one.reason}",
                    allowed=f"data.bad_samples={self.limit}",
                    do="fix or remove the files named in the journal, or increase data.bad_samples",
                )


def is_finite(sample: Sample) -> bool:
    """Return whether all floating-point tensors of a sample are finite."""
    tensors = [value for value in sample.values() if isinstance(value, Tensor) and value.is_floating_point()]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def find_nonfinite_samples(batch: Batch) -> list[int]:
    """Return the numbers of the non-finite samples, in batch order; empty if the step itself went non-finite.

    Samples noted before mixing count; otherwise the batch itself is checked.
    """
    # Mixed batches spread a bad value over good samples.
    if batch.nonfinite:
        return list(batch.nonfinite)
    bad = torch.zeros(len(batch.ids), dtype=torch.bool)
    for tensor in batch.tensors.values():
        if tensor.is_floating_point() and tensor.dim() and len(tensor) == len(batch.ids):
            finite = torch.isfinite(tensor).reshape(len(tensor), -1).all(1)
            bad |= ~finite.to(bad.device)
    return [number for number, is_bad in zip(batch.ids, bad.tolist(), strict=True) if is_bad]


QUARANTINED = "quarantined"
"""The reason of a replacement that is not the file's fault: the sample made a step fail."""
TRIES = 8
LEFT_OUT = -1
"""The replacement number of a sample that is left out."""

Key = tuple[int, int]
"""Epoch and number."""


class ReadSample(NamedTuple):
    """The result for a key. `number` is the sample that was read, which may be the replacement."""

    sample: Sample | None
    number: int
    replaced: list[ReplacedSample]
    epoch: int
    error: HalfstepError | None = None
    """An error as a value: torch would wrap a worker's exception in the text of its traceback."""


@contextmanager
def seed_generators_temporarily(seed: int) -> Iterator[None]:
    """Seed the generators inside the context, and restore them after it."""
    with preserve_host_random_state():
        seed_generators(seed)
        yield


def seed_generators(seed: int) -> None:
    """Seed the host generators of torch, Python and NumPy."""
    # torch.manual_seed would also seed the devices, whose generators belong to the training.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # The upper bits: NumPy and torch share the algorithm, and would draw the same words from the same seed.
    np.random.seed(seed >> 31)


def report_no_change(number: int) -> str:
    """Return no change, for samples whose files were not recorded."""
    return ""


class KeyedDataset(Dataset[ReadSample]):
    """A dataset of items by key; the generators are saved and restored once per batch."""

    source: Source
    IDLE = -1
    """The number that `begin` gets after the last sample of a batch."""

    def __init__(self) -> None:
        self.too_slow: dict[int, str] = {}
        """Samples that a worker did not get done with, and the reason: they are as bad as unreadable ones."""
        self.begin: Callable[[int], None] | None = None
        """In a worker: called with the number of each sample before its files are read ahead, and before it is read."""
        self.change_of: Callable[[int], str] = report_no_change
        """Called with the number of each sample after it was read: how its files have changed under the run."""

    def __getitem__(self, key: Key) -> ReadSample:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Key]) -> list[ReadSample]:
        """Return the items of a batch, up to the first error; DataLoader calls it once per batch."""
        items: list[ReadSample] = []
        try:
            with preserve_host_random_state():
                numbers = [number for _, number in keys if number not in self.too_slow]
                for place in self.source.prefetch(numbers):
                    if self.begin is not None:
                        self.begin(numbers[place])
                for key in keys:
                    items.append(self._item(*key))
                    # It ends the run; each further sample would be waited for as long, where a store does not answer.
                    if items[-1].error is not None:
                        break
            return items
        finally:
            if self.begin is not None:
                self.begin(self.IDLE)

    def _item(self, epoch: int, number: int) -> ReadSample:
        raise NotImplementedError


class Samples(KeyedDataset):
    """Training samples: a bad one is replaced by another, chosen by (seed, epoch, number) alone."""

    def __init__(self, source: Source, transform: Transform, seed: int, quarantined: Iterable[int] = ()) -> None:
        super().__init__()
        self.source, self.transform, self.seed = complete_source(source), transform, seed
        self.quarantined = set(quarantined)

    def __len__(self) -> int:
        return len(self.source)

    def _item(self, epoch: int, number: int) -> ReadSample:
        try:
            return self._first_good(epoch, number)
        except HalfstepError as error:
            return ReadSample(None, number, [], epoch, error)

    def _first_good(self, epoch: int, number: int) -> ReadSample:
        failed: list[tuple[int, str, str]] = []
        for candidate in self._candidates(epoch, number):
            try:
                if candidate in self.quarantined:
                    raise BadSample(self.source.name(candidate), QUARANTINED)
                sample = read_transformed_sample(self, epoch, candidate)
            except BadSample as bad:
                failed.append((candidate, bad.name, bad.reason))
            else:
                return ReadSample(sample, candidate, [ReplacedSample(*one, by=candidate) for one in failed], epoch)
        _, name, reason = failed[0]
        raise BadData(
            f"{name}: {reason}; and none of {TRIES} others that were tried in its place can be read",
            allowed="data in which most samples are good",
            do=f"look at {failed[-1][1]} ({failed[-1][2]}) as well, and the disk",
        )

    def _candidates(self, epoch: int, number: int) -> Iterator[int]:
        yield number
        for attempt in range(TRIES):
            yield derive_seed(self.seed, "instead", epoch, number, attempt) % len(self.source)


class ValSamples(KeyedDataset):
    """Validation samples: a bad one is left out and reported, since a replacement would count twice in the metrics."""

    def __init__(self, source: Source, transform: Transform, seed: int) -> None:
        super().__init__()
        self.source, self.transform, self.seed = complete_source(source), transform, seed

    def __len__(self) -> int:
        return len(self.source)

    def _item(self, epoch: int, number: int) -> ReadSample:
        try:
            return ReadSample(read_transformed_sample(self, epoch, number), number, [], epoch)
        except BadSample as bad:
            return ReadSample(None, number, [ReplacedSample(number, bad.name, bad.reason, LEFT_OUT)], epoch)
        except HalfstepError as error:
            return ReadSample(None, number, [], epoch, error)


def read_transformed_sample(samples: Samples | ValSamples, epoch: int, number: int) -> Sample:
    """Read and transform a sample; its randomness depends on (seed, epoch, number) only, not on the worker."""
    if number in samples.too_slow:
        raise BadSample(samples.source.name(number), samples.too_slow[number])
    if samples.begin is not None:
        samples.begin(number)
    seed_generators(derive_seed(samples.seed, "augment", epoch, number))
    try:
        sample = samples.source.read(number)
    except BadData:
        # A mask that was exchanged may contradict the recipe; that it was exchanged is the reason.
        _check_unchanged(samples, number)
        raise
    # After reading: a file that is replaced in between is noticed.
    _check_unchanged(samples, number)
    return samples.transform(sample)


def _check_unchanged(samples: Samples | ValSamples, number: int) -> None:
    if change := samples.change_of(number):
        raise BadSample(samples.source.name(number), change)
