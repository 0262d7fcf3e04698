"""Load batches onto the device, in order, with any number of workers."""

from __future__ import annotations

import atexit
import ctypes
import functools
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any

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
    derive,
    is_finite,
    seeded,
)
from halfstep.data.to_device import moved
from halfstep.errors import BadData, HalfstepError

# -- worker processes -------------------------------------------------------------------------------------------------
# Manage the worker processes: how they start, what signals mean to them, how they end.


PATIENCE = 1.0
"""Seconds that workers have to finish a sample that is no longer needed."""
END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG, from linux/prctl.h."""
ASKED_TO_END = (signal.SIGINT, signal.SIGTERM)


class Worker:
    """The initialization of a worker: the trainer decides what a signal means, and the worker never outlives it."""

    def __init__(self) -> None:
        self.trainer = os.getpid()
        # Not an Event: its lock would deadlock where one signal handler interrupts another.
        self.closing: Any = RawValue("b", 0)

    def __call__(self, worker: int) -> None:
        # Ctrl-C goes to the whole process group; the trainer alone handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._pass_on)
        # Python removes its handlers at exit: a SIGTERM would then kill the worker.
        ignore = (signal.SIGTERM, signal.SIG_IGN)
        multiprocessing.util.Finalize(None, signal.signal, ignore, exitpriority=100)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKED_TO_END)
        _end_with_trainer()
        if self._is_orphan():
            os._exit(0)
        # Several workers with a thread per core each would compete for the same cores.
        torch.set_num_threads(1)

    def close(self) -> bool:
        """Mark the workers as closing, in the trainer; return False where that was done, or in a forked process."""
        if self.closing.value or os.getpid() != self.trainer:
            return False
        self.closing.value = 1
        return True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the trainer: it is meant for the run, unless the trainer itself ends the worker."""
        if self.closing.value or self._is_orphan():
            os._exit(0)
        try:
            os.kill(self.trainer, number)
        except ProcessLookupError:
            os._exit(0)

    def _is_orphan(self) -> bool:
        # Not "the parent is 1": in a container, the trainer may be process 1.
        return not _is_served() and os.getppid() != self.trainer


class SentKeys:
    """The keys on their way to the workers, counted, so that the last batch is recognized."""

    def __init__(self, keys: Iterator[list[Key]]) -> None:
        self._keys, self.count, self.ended = keys, 0, False

    def __iter__(self) -> Iterator[list[Key]]:
        for key in self._keys:
            self.count += 1
            yield key
        self.ended = True


def from_workers(loader: Any, given: SentKeys, worker: Worker) -> Iterator[Any]:
    """Yield what the workers of a DataLoader read; they end with the iteration, however it ends."""
    iterator: Any = None
    back = 0
    # A process that exits in the middle of an iteration terminates its workers by a signal that they would pass on.
    atexit.register(worker.close)
    try:
        with _signals_wait():
            iterator = iter(loader)
        # Asked for one batch more, torch would end its workers before they know that they are closing.
        while not (given.ended and back == given.count):
            yield next(iterator)
            back += 1
    finally:
        atexit.unregister(worker.close)
        if iterator is not None and worker.close():
            _end(iterator)


def _end(iterator: Any) -> None:
    """End the workers, also those in the middle of a long sample."""
    # torch waits 5 s for each worker in turn before it terminates the first busy one. Terminating at once is wrong
    # too: a worker that ends in the middle of a message would block torch's own shutdown forever.
    hurry = threading.Timer(PATIENCE, _hurry, [iterator._workers])
    hurry.start()
    try:
        with suppress(RuntimeError):  # a worker that dies now is no longer needed
            iterator._shutdown_workers()
    finally:
        hurry.cancel()
        hurry.join()
    for process in iterator._workers:
        if process.is_alive():  # stuck in native code, where no Python handler runs
            process.kill()


def _hurry(workers: list[Any]) -> None:
    for process in workers:
        process.terminate()


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Block signals until a process started inside has set its handlers."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    if multiprocessing.get_start_method() != "fork":
        # Otherwise it starts with the first worker, and unblocks signals when it has.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_trainer() -> None:
    """End the worker with a trainer that is killed, even while the worker is busy."""
    if sys.platform == "linux" and not _is_served():
        # PDEATHSIG refers to the parent thread: the one that iterates, which lives as long as it needs batches.
        with suppress(OSError, AttributeError):  # no C library: torch polls for its parent every 5 s
            ctypes.CDLL(None).prctl(END_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_outlived, daemon=True).start()


def _outlived() -> None:
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(0)


def _is_served() -> bool:
    """Return whether the parent is a fork server, which outlives the trainer."""
    return multiprocessing.get_start_method(allow_none=True) == "forkserver"


# -- loader -----------------------------------------------------------------------------------------------------------


Read = Batch | HalfstepError


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
    ) -> None:
        self.samples, self.order = samples, order
        self.share = RankShare(batch_size, microbatches, rank, size)
        self._collate, self.workers = SeededCollate(collate, samples.seed), workers
        self._to_device = ToDevice(torch.device(device), channels_last)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch."""
        return self.share.steps_per_epoch(self.order.size)

    def windows(self, epoch: int, first: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step, from step `first` to the end of the epoch."""
        batches = self.share.batches(self.order.numbers(epoch), first)
        keys = ([(epoch, number) for number in batch] for batch in batches)
        read = _read(self.samples, keys, self._collate, self.workers, self._to_device.pins)
        while window := list(islice(read, self.share.microbatches)):
            yield [self._to_device(batch) for batch in window]

    def read_batch(self) -> Batch:
        """Return the first batch, read in this process and left on the host."""
        keys = ([(0, number) for number in batch] for batch in self.share.batches(self.order.numbers(0)))
        return next(iter(_read(self.samples, keys, self._collate, 0, pins=False)))


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
    ) -> None:
        self.samples, self.share = samples, RankShare(batch_size, 1, rank, size)
        self._collate, self._workers = SeededCollate(collate, samples.seed), workers
        self._to_device = ToDevice(torch.device(device), channels_last)

    def __len__(self) -> int:
        """Return the number of batches if all samples are good."""
        return sum(1 for _ in self.share.once(len(self.samples)))

    def read(self, numbers: Sequence[int]) -> Batch:
        """Return these samples as one batch, read in this process, without the bad ones."""
        keys = iter([[(0, number) for number in numbers]])
        return self._to_device(next(iter(_read(self.samples, keys, self._collate, 0, pins=False))))

    def __iter__(self) -> Iterator[Batch]:
        keys = ([(0, number) for number in batch] for batch in self.share.once(len(self.samples)))
        read = _read(self.samples, keys, self._collate, self._workers, self._to_device.pins)
        yield from map(self._to_device, _none_empty(read))


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
            with seeded(derive(self.seed, "batch", items[0].epoch, items[0].number)):
                tensors = self.collate([sample for sample, _ in good])
        except HalfstepError as error:
            return error
        return Batch(tensors, [number for _, number in good], replaced, nonfinite)


class ToDevice:
    """The transfer of a batch to the device, in the memory format of the model."""

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self.device, self.channels_last = device, channels_last
        here = torch.empty(0, device=device)
        # Copies from pinned memory are asynchronous on these devices.
        self.pins = here.is_cuda or here.is_xpu

    def __call__(self, batch: Batch) -> Batch:
        move = functools.partial(moved, device=self.device, channels_last=self.channels_last, non_blocking=self.pins)
        return batch._replace(tensors={name: move(tensor) for name, tensor in batch.tensors.items()})


def _read(
    samples: Samples | ValSamples, keys: Iterator[list[Key]], collate_fn: SeededCollate, workers: int, pins: bool
) -> Iterator[Batch]:
    """Yield the batches of these keys in order; raise a worker's error as if it had happened here."""
    given, worker = SentKeys(keys), Worker() if workers else None
    loader: Any = DataLoader(
        samples,
        batch_sampler=given,  # type: ignore[arg-type]
        collate_fn=collate_fn,
        num_workers=workers,
        pin_memory=pins,
        worker_init_fn=worker,
        # Without a generator, DataLoader draws its base seed from the training's generator.
        generator=torch.Generator(),
    )
    for read in loader if worker is None else _while_workers_live(from_workers(loader, given, worker)):
        if isinstance(read, HalfstepError):
            raise read
        yield read


def _while_workers_live(batches: Iterator[Read]) -> Iterator[Read]:
    try:
        yield from batches
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise BadData(
            f"a process that reads samples was ended from outside, as a system does that has no memory left: {error}",
            allowed="workers and batches that fit into the main memory",
            do="fewer train.num_workers, or smaller batches",
        ) from error


def _none_empty(batches: Iterator[Batch]) -> Iterator[Batch]:
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
            do="look at this file, and at the disk",
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
    pace = measured(samples, order, collate, batch_size)
    return chosen(pace, cores, computes_on_cores)


def chosen(pace: ReadPace, cores: int, computes_on_cores: bool) -> tuple[int, str]:
    """Return the number of workers for this pace, and the reason."""
    took = f"a batch takes {pace.seconds * 1e3:.3g} ms to read"
    if pace.seconds < NOTHING:
        return 0, f"{took}, less than to hand it over from another process"
    if computes_on_cores:
        return _workers_beside_training(pace, cores, took)
    wanted = max(2, round(pace.seconds / FAST_STEP + 0.5))
    workers = max(1, min(wanted, cores - 1, MOST))
    limit = f", of {wanted} that would keep up with steps of {FAST_STEP * 1e3:.0f} ms" if workers < wanted else ""
    return workers, f"{took}, and there are {cores} cores{limit}"


def _workers_beside_training(pace: ReadPace, cores: int, took: str) -> tuple[int, str]:
    if pace.waiting > 0.5:
        return min(2, max(1, cores)), f"{took}, {pace.waiting:.0%} of it waiting for the disk"
    # With few cores, workers only take time from the training.
    if cores < 4:
        return 0, f"{took}, and the training itself wants the {cores} core{'s' * (cores != 1)}"
    workers = min(4, cores // 4)
    return workers, f"{took}, and the training leaves {workers} of {cores} cores for it"


def measured(samples: Samples, order: Order, collate: Collate, batch_size: int) -> ReadPace:
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
