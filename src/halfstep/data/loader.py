"""Load batches onto the device, in order, with any number of workers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from halfstep.data.dataset import (
    Batch,
    Collate,
    Key,
    Order,
    RankShare,
    ReadSample,
    Samples,
    ValSamples,
    derive_seed,
    is_finite,
    seed_generators_temporarily,
)
from halfstep.data.worker_processes import (
    POLL,
    SampleTimeout,
    SentKeys,
    WorkerDeadline,
    WorkerInitializer,
    iterate_worker_batches,
)
from halfstep.errors import ENDED_FROM_OUTSIDE, BadData, HalfstepError, WorkerLost
from halfstep.out_of_memory import convert_worker_error
from halfstep.step.to_device import move_to_device

if TYPE_CHECKING:
    from halfstep.data.shard_check import ShardSpotCheck

# -- loader -----------------------------------------------------------------------------------------------------------


Read = Batch | HalfstepError
GivenUp = Callable[[str, str], None]
"""A callback with the name of a sample that took too long, and the reason, at the moment it is given up."""


def _ignore_slow_sample(name: str, reason: str) -> None: ...


class TrainLoader:
    """The windows of an epoch. Workers live for one call of `windows`, so that they know the quarantined samples."""

    def __init__(
        self,
        samples: Samples,
        order: Order,
        *,
        batch_size: int,
        microbatches: int = 1,
        collate: Collate,
        workers: int = 0,
        device: torch.device | str,
        channels_last: bool = False,
        rank: int = 0,
        size: int = 1,
        timeout: float = 0.0,
    ) -> None:
        self.samples, self.order, self.timeout = samples, order, timeout
        self.while_waiting: Callable[[], None] = lambda: None
        """Called every second in which the workers have no batch; may raise."""
        self.given_up: GivenUp = _ignore_slow_sample
        self.background: ShardSpotCheck | None = None
        """Verifies some of the data while an epoch is read."""
        self.announce: Callable[[list[tuple[int, int]]], None] = lambda chunks: None
        """Called with the chunks that are read from some step on, each its first sample and one past its last."""
        self.announces_next_epoch = False
        """Whether the first chunks of an epoch are announced at the end of the one before."""
        self.share = RankShare(batch_size, microbatches, rank, size, order.has_lanes)
        self._collate, self.workers = SeededCollate(collate, samples.seed), workers
        self._to_device = DeviceMover(torch.device(device), channels_last)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch."""
        return self.share.steps_per_epoch(self.order.size)

    def windows(self, epoch: int, first: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step, from step `first` to the end of the epoch."""
        keys = self._keys(epoch, first)
        reading = LoaderOptions(self.workers, self._to_device.pins, self.timeout, self.while_waiting, self.given_up)
        read = _read_batches(self.samples, keys, self._collate, reading)
        windows = self._windows_of(read)
        yield from self.background.verified(epoch, windows) if self.background else windows

    def _keys(self, epoch: int, first: int) -> Iterator[list[Key]]:
        openings = self.order.openings(epoch, self.share, first)
        for count, batch in enumerate(self.share.batches(self.order.numbers(epoch), first)):
            if count % self.share.microbatches == 0 and (chunks := next(openings, None)):
                self.announce(chunks)
            yield [(epoch, number) for number in batch]
        if self.announces_next_epoch and (chunks := next(self.order.openings(epoch + 1, self.share, 0), None)):
            self.announce(chunks)

    def _windows_of(self, read: Iterator[Batch]) -> Iterator[list[Batch]]:
        while window := list(islice(read, self.share.microbatches)):
            yield [self._to_device(batch) for batch in window]

    def read_batch(self) -> Batch:
        """Return the first batch, read in this process and left on the host."""
        keys = ([(0, number) for number in batch] for batch in self.share.batches(self.order.numbers(0)))
        return next(iter(_read_batches(self.samples, keys, self._collate, LoaderOptions())))


class ValLoader:
    """Every sample once over all ranks, in order of their numbers; bad ones are left out and reported."""

    def __init__(
        self,
        samples: ValSamples,
        *,
        batch_size: int,
        collate: Collate,
        workers: int = 0,
        device: torch.device | str,
        channels_last: bool = False,
        rank: int = 0,
        size: int = 1,
        timeout: float = 0.0,
        neighboring: bool = False,
    ) -> None:
        self.samples, self.timeout = samples, timeout
        self.share = RankShare(batch_size, 1, rank, size, neighboring)
        self.while_waiting: Callable[[], None] = lambda: None
        """Called every second in which the workers have no batch; may raise."""
        self.given_up: GivenUp = _ignore_slow_sample
        self._collate, self._workers = SeededCollate(collate, samples.seed), workers
        self._to_device = DeviceMover(torch.device(device), channels_last)

    def __len__(self) -> int:
        """Return the number of batches if all samples are good."""
        return sum(1 for _ in self.share.once(len(self.samples)))

    def read(self, numbers: Sequence[int]) -> Batch:
        """Return these samples as one batch, read in this process, without the bad ones."""
        keys = iter([[(0, number) for number in numbers]])
        return self._to_device(next(iter(_read_batches(self.samples, keys, self._collate, LoaderOptions()))))

    def __iter__(self) -> Iterator[Batch]:
        keys = ([(0, number) for number in batch] for batch in self.share.once(len(self.samples)))
        reading = LoaderOptions(self._workers, self._to_device.pins, self.timeout, self.while_waiting, self.given_up)
        read = _read_batches(self.samples, keys, self._collate, reading)
        yield from map(self._to_device, _skip_empty_batches(read))


class SeededCollate:
    """A collate function in the worker. Mixing depends on the batch, not on the worker."""

    def __init__(self, collate: Collate, seed: int) -> None:
        self.collate, self.seed = collate, seed

    def __call__(self, items: list[ReadSample]) -> Read:
        for item in items:
            if item.error is not None:
                return item.error
        replaced = [one for item in items for one in item.replaced]
        good = [(item.sample, item.number) for item in items if item.sample is not None]
        if not good:
            return Batch({}, [], replaced)
        # Before mixing: afterward, a sample mixed with a bad one looks just as bad.
        nonfinite = [number for sample, number in good if not is_finite(sample)]
        try:
            with seed_generators_temporarily(derive_seed(self.seed, "batch", items[0].epoch, items[0].number)):
                tensors = self.collate([sample for sample, _ in good])
        except HalfstepError as error:
            return error
        return Batch(tensors, [number for _, number in good], replaced, nonfinite)


class DeviceMover:
    """The transfer of a batch to the device, in the memory format of the model."""

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self.device, self.channels_last = device, channels_last
        here = torch.empty(0, device=device)
        # Copies from pinned memory are asynchronous on these devices.
        self.pins = here.is_cuda or here.is_xpu

    def __call__(self, batch: Batch) -> Batch:
        move = functools.partial(
            move_to_device, device=self.device, channels_last=self.channels_last, non_blocking=self.pins
        )
        return batch._replace(tensors={name: move(tensor) for name, tensor in batch.tensors.items()})


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are read: by how many workers, and what happens while they are waited for."""

    workers: int = 0
    pins: bool = False
    timeout: float = 0.0
    """Seconds for a sample; 0 for no limit."""
    while_waiting: Callable[[], None] = lambda: None
    given_up: GivenUp = _ignore_slow_sample


def _read_batches(
    samples: Samples | ValSamples, keys: Iterator[list[Key]], collate_fn: SeededCollate, how: LoaderOptions
) -> Iterator[Batch]:
    """Yield the batches of these keys in order; raise a worker's error as if it had happened here.

    A sample that takes too long is from then on as bad as an unreadable one: its batch is read again without it, by new
    workers.
    """
    given = SentKeys(keys)
    while not given.are_back():
        try:
            for read in _read_with_workers(samples, given, collate_fn, how):
                if isinstance(read, HalfstepError):
                    raise read
                yield read
        except SampleTimeout as slow:
            samples.too_slow[slow.number] = slow.reason
            how.given_up(samples.source.name(slow.number), slow.reason)
            given = given.unread()


def _read_with_workers(
    samples: Samples | ValSamples, given: SentKeys, collate_fn: SeededCollate, how: LoaderOptions
) -> Iterator[Read]:
    try:
        worker = WorkerInitializer(how.workers) if how.workers else None
    except OSError as error:  # its numbers are in shared memory
        raise convert_worker_error(error) or error from error
    loader: Any = DataLoader(
        samples,
        batch_sampler=given,  # type: ignore[arg-type]
        collate_fn=collate_fn,
        num_workers=how.workers,
        pin_memory=how.pins,
        worker_init_fn=worker,
        timeout=POLL if worker else 0,
        # Without a generator, DataLoader draws its base seed from the training's generator.
        generator=torch.Generator(),
    )
    if worker is None:
        for read in loader:
            given.came_back()
            yield read
        return
    deadline = WorkerDeadline(worker.at, how.timeout)

    def wait() -> None:
        how.while_waiting()
        deadline.look()

    yield from _replace_worker_errors(iterate_worker_batches(loader, given, worker, wait))


def _replace_worker_errors(batches: Iterator[Read]) -> Iterator[Read]:
    try:
        yield from batches
    except (RuntimeError, OSError) as error:
        if (failed := convert_worker_error(error)) is not None:
            raise failed from error
        if not str(error).startswith("DataLoader worker"):
            raise
        raise WorkerLost(
            f"a process that reads samples {ENDED_FROM_OUTSIDE}: {error}",
            allowed="workers and batches that fit into the main memory",
            do="run the same command again; if it fails again, with a smaller train.num_workers",
        ) from error


def _skip_empty_batches(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches that have samples; the report of an empty one goes to a neighbor."""
    held: Batch | None = None
    orphans: list[Any] = []
    for batch in batches:
        if not batch.ids:
            orphans += batch.replaced
            continue
        if held is not None:
            yield held
        held, orphans = batch._replace(replaced=orphans + batch.replaced), []
    if held is not None:
        yield held._replace(replaced=held.replaced + orphans)
    elif orphans:
        raise BadData(
            f"none of {len(orphans)} validation samples can be read; {orphans[0].name}: {orphans[0].reason}",
            allowed="validation data in which most samples are good",
            do="check this file and the disk",
        )


# -- number of workers ------------------------------------------------------------------------------------------------
# Choose the number of workers: measured once, in a few seconds, with a reason.


LONGEST = 3.0
"""Seconds that the measurement may take, apart from the batch in progress."""
MOST = 16
NOTHING = 0.002
"""Seconds per batch below which the transfer between processes costs as much as reading."""
FAST_STEP = 0.05
"""Seconds: reading should keep up with steps as short as this."""


@dataclass(frozen=True)
class ReadPace:
    """The time it takes to read a batch in this process."""

    seconds: float
    waiting: float
    """The share of the time spent waiting for a disk or a network."""


def choose_workers(
    samples: Samples, order: Order, collate: Collate, batch_size: int, *, cores: int, computes_on_cores: bool
) -> tuple[int, str]:
    """Return the number of workers for each device, and the reason. `cores` are those that this device may use."""
    pace = measure_read_pace(samples, order, collate, batch_size)
    return choose_workers_for_pace(pace, cores, computes_on_cores)


def choose_workers_for_pace(pace: ReadPace, cores: int, computes_on_cores: bool) -> tuple[int, str]:
    """Return the number of workers for this pace, and the reason."""
    took = f"a batch takes {pace.seconds * 1e3:.3g} ms to read"
    if pace.seconds < NOTHING:
        return 0, f"{took}, less than sending it from another process"
    if computes_on_cores:
        return _choose_workers_beside_training(pace, cores, took)
    wanted = max(2, round(pace.seconds / FAST_STEP + 0.5))
    workers = max(1, min(wanted, cores - 1, MOST))
    limit = f", of {wanted} that would keep up with steps of {FAST_STEP * 1e3:.0f} ms" if workers < wanted else ""
    return workers, f"{took}, and there are {cores} cores{limit}"


def _choose_workers_beside_training(pace: ReadPace, cores: int, took: str) -> tuple[int, str]:
    if pace.waiting > 0.5:
        return min(2, max(1, cores)), f"{took}, {pace.waiting:.0%} of it waiting for the disk"
    # With few cores, workers only take time from the training.
    if cores < 4:
        return 0, f"{took}, and the training itself needs the {cores} core{'s' * (cores != 1)}"
    workers = min(4, cores // 4)
    return workers, f"{took}, and the training leaves {workers} of {cores} cores for it"


def measure_read_pace(samples: Samples, order: Order, collate: Collate, batch_size: int) -> ReadPace:
    """Return the median of the first few batches; the very first, which warms up caches, does not count."""
    collate_fn = SeededCollate(collate, samples.seed)
    batches = RankShare(batch_size).batches(order.numbers(0))
    times: list[tuple[float, float]] = []
    begin = time.perf_counter()
    for batch in islice(batches, 12):
        wall, busy = time.perf_counter(), time.process_time()
        collate_fn(samples.__getitems__([(0, number) for number in batch]))
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        times.append((wall, max(0.0, 1.0 - busy / wall)))
        if time.perf_counter() - begin > LONGEST:
            break
    counted = sorted(times[1:] or times)
    return ReadPace(*counted[len(counted) // 2])
