"""Define sources of samples, order the samples of an epoch, and read them.

A source gives samples by number, decoded and not yet transformed. Each is transformed with its own seed; those that
cannot be read are replaced.

The order is a function of (seed, epoch, position), and of nothing else: not of the number of devices, of workers, or of
interruptions. A step takes the next window of the epoch's order; devices and micro-batches divide the window. With the
same number of samples per step, a step has the same samples on one device and on a thousand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from halfstep.data.layout import FEW, Rule, compute_split_positions, select_validation_by_position
from halfstep.errors import BadData, HalfstepError
from halfstep.errors import BadSample as BadSample
from halfstep.numbers import format_counted_noun
from halfstep.random_state import preserve_host_random_state

if TYPE_CHECKING:
    from halfstep.data.shards import Shards

Sample = dict[str, Tensor]
"""Tensors by name: `image` and, depending on the task, `mask` or `label`."""
Transform = Callable[[Sample], Sample]
"""Draws from torch's default generator, which is seeded for each sample of each epoch."""
Collate = Callable[[list[Sample]], Sample]
"""Collates samples; draws from torch's default generator, which is seeded for each batch."""


class Source(Protocol):
    """Samples by number. Safe to use from several processes at once.

    A source may also have `key(index)`, a name that stays when the whole set is moved, and `keys_of(numbers)`, the same
    for several samples; `files_of(index)`, so that a resumed run notices changed contents (samples may share a file;
    all have some, or none has), and `every_file()`, each of these files once; `without_image(index)`; and
    `prefetch(numbers)`, which reads the files of the next samples and yields the place of each before. One that notices
    by itself where a file changes under a run, or that reads no file after its start, has `notices_changes = True`.
    """

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """Return the sample; raise BadSample if it cannot be read."""
        ...

    def name(self, index: int) -> str:
        """Return the name for display: a path, or a member of a shard."""
        ...


Files = Iterable[tuple[str, str | Path]]
"""Files with names that do not change when the whole set is moved."""


def list_sample_files(source: Source, index: int) -> Files:
    """Return the files of a sample; none if the source does not name them."""
    # isinstance with a protocol takes 20 µs, and there may be a million samples.
    say: Callable[[int], Files] | None = getattr(source, "files_of", None)
    return say(index) if say else ()


def every_file(source: Source) -> Files:
    """Return the files of all samples, repeated where samples share them; a source may list each once itself."""
    say: Callable[[], Files] | None = getattr(source, "every_file", None)
    if say is not None:
        return say()
    # There may be a billion samples that are drawn.
    numbers = range(len(source)) if has_sample_files(source) else ()
    return (file for number in numbers for file in list_sample_files(source, number))


def has_sample_files(source: Source) -> bool:
    """Return whether a source names the files of its samples; it does so for all of them, or for none."""
    return len(source) > 0 and any(True for _ in list_sample_files(source, 0))


def can_detect_changes(source: object) -> bool:
    """Return whether a source needs no record of its files, by which their changes would be noticed."""
    return bool(getattr(source, "notices_changes", False))


class Seal(NamedTuple):
    """The seal of a source that has an index."""

    shards: Shards
    """The indexed samples that the source reads."""
    chosen: str
    """Digits that stand for which of them, and in which order; empty for all."""


def find_seal(source: Source) -> Seal | None:
    """Return the seal of a source; None if it has no index."""
    seal: Seal | None = getattr(source, "seal", None)
    return seal


def resolve_index_number(source: Source, index: int) -> int:
    """Return the number that a sample of a source with an index has in it."""
    while isinstance(source, WrappedSource):
        index, source = source.index_in_source(index), source.source
    return index


def read_without_image(source: Source, index: int) -> Sample:
    """Return a sample without its image, which is decoded only where the source has no other way."""
    rest: Callable[[int], Sample] | None = getattr(source, "without_image", None)
    return rest(index) if rest else {name: part for name, part in source.read(index).items() if name != "image"}


def prefetch_samples(source: Source, numbers: Sequence[int]) -> Iterator[int]:
    """Read the bytes of samples before `read` decodes them, where a source can; yield the place of each before."""
    read: Callable[[Sequence[int]], Iterator[int]] | None = getattr(source, "prefetch", None)
    return read(numbers) if read else iter(())


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
        return resolve_sample_key(self.source, self.index_in_source(index))

    def files_of(self, index: int) -> Files:
        """Return the files of the sample: the data's fingerprint does not depend on the wrapper."""
        return list_sample_files(self.source, self.index_in_source(index))

    @property
    def seal(self) -> Seal | None:
        """The seal of the underlying source."""
        return find_seal(self.source)

    @property
    def notices_changes(self) -> bool:
        """Whether the underlying source notices files that change under a run."""
        return can_detect_changes(self.source)


class Subset(WrappedSource):
    """Some samples of a source, renumbered."""

    def __init__(self, source: Source, numbers: Sequence[int]) -> None:
        super().__init__(source)
        # The share of an index is no list, and has a digest.
        self.numbers = numbers if hasattr(type(numbers), "digest") else list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def seal(self) -> Seal | None:
        """The seal of the underlying source, and which of its samples these are."""
        if (seal := find_seal(self.source)) is None:
            return None
        own = getattr(self.numbers, "digest", None) or f"{derive_seed(0, *self.numbers):016x}"
        return seal._replace(chosen=f"{seal.chosen}/{own}")

    def index_in_source(self, index: int) -> int:
        """Return the number that a sample has in the underlying source."""
        return self.numbers[index]

    def read(self, index: int) -> Sample:
        """Read a sample; raise BadSample if it cannot be read."""
        return self.source.read(self.numbers[index])

    def keys_of(self, numbers: Sequence[int]) -> list[str]:
        """Return the keys of samples."""
        return resolve_sample_keys(self.source, [self.numbers[number] for number in numbers])

    def prefetch(self, numbers: Sequence[int]) -> Iterator[int]:
        """Read the bytes of samples."""
        return prefetch_samples(self.source, [self.numbers[number] for number in numbers])

    def without_image(self, index: int) -> Sample:
        """Return the sample without its image."""
        return read_without_image(self.source, self.numbers[index])


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
    # Both rules are the same for many samples, and an index has their positions.
    divided: Callable[[float], tuple[Sequence[int], Sequence[int]]] | None = getattr(source, "divided", None)
    if divided is not None and len(source) >= FEW:
        own, held_out = divided(fraction)
        return Subset(source, own), Subset(source, held_out)
    own_places: Callable[[float], list[float]] | None = getattr(source, "places_for_split", None)
    places = (
        own_places(fraction) if own_places else compute_split_positions(resolve_sample_keys(source, range(len(source))))
    )
    chosen = rule(places, fraction)
    train, val = [i for i in range(len(places)) if i not in chosen], sorted(chosen)
    return Subset(source, train), Subset(source, val)


def resolve_sample_key(source: Source, index: int) -> str:
    """Return the name of a sample that does not change when the set is moved; its display name if there is none."""
    # isinstance with a protocol takes 20 µs, and there may be a million samples.
    key: Callable[[int], str] = getattr(source, "key", source.name)
    return key(index)


def resolve_sample_keys(source: Source, numbers: Sequence[int]) -> list[str]:
    """Return the same names of several samples."""
    say: Callable[[Sequence[int]], list[str]] | None = getattr(source, "keys_of", None)
    if say is not None:
        return say(numbers)
    key: Callable[[int], str] = getattr(source, "key", source.name)
    return [key(number) for number in numbers]


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
                for place in prefetch_samples(self.source, numbers):
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
        self.source, self.transform, self.seed = source, transform, seed
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
        self.source, self.transform, self.seed = source, transform, seed

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
