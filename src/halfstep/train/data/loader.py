"""Batches on the device, in order, from any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from halfstep.errors import BadData, HalfstepError
from halfstep.train.data.beside import Given, Worker, from_workers
from halfstep.train.data.order import Order, Share, derive
from halfstep.train.data.quarantine import is_finite
from halfstep.train.data.samples import Item, Key, Samples, ValSamples, seeded
from halfstep.train.data.source import Batch, Collate
from halfstep.train.placing import moved

Read = Batch | HalfstepError


class TrainLoader:
    """The windows of an epoch. Workers live for one call of `windows`, so they always know whom to leave out."""

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
        self.share = Share(batch_size, microbatches, rank, size)
        self._gather, self.workers = Gather(collate, samples.seed), workers
        self._moving = Moving(torch.device(device), channels_last)

    @property
    def steps_per_epoch(self) -> int:
        return self.share.steps_per_epoch(self.order.size)

    def windows(self, epoch: int, first: int = 0) -> Iterator[list[Batch]]:
        """The micro-batches of each step, from step `first` to the end of the epoch."""
        batches = self.share.batches(self.order.numbers(epoch), first)
        keys = ([(epoch, number) for number in batch] for batch in batches)
        read = _read(self.samples, keys, self._gather, self.workers, self._moving.pins)
        while window := list(islice(read, self.share.microbatches)):
            yield [self._moving(batch) for batch in window]

    def read_batch(self) -> Batch:
        """The first batch, read in this process."""
        keys = ([(0, number) for number in batch] for batch in self.share.batches(self.order.numbers(0)))
        return next(iter(_read(self.samples, keys, self._gather, 0, pins=False)))


class ValLoader:
    """Every sample once over all ranks, in the order of their numbers; bad ones are left out and reported."""

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
        self.samples, self.share = samples, Share(batch_size, 1, rank, size)
        self._gather, self._workers = Gather(collate, samples.seed), workers
        self._moving = Moving(torch.device(device), channels_last)

    def __len__(self) -> int:
        """Batches, if all samples are good."""
        return sum(1 for _ in self.share.once(len(self.samples)))

    def __iter__(self) -> Iterator[Batch]:
        keys = ([(0, number) for number in batch] for batch in self.share.once(len(self.samples)))
        read = _read(self.samples, keys, self._gather, self._workers, self._moving.pins)
        yield from map(self._moving, _none_empty(read))


class Gather:
    """Items to a batch, in the worker. Mixing of samples depends on the batch, not on the worker."""

    def __init__(self, collate: Collate, seed: int) -> None:
        self.collate, self.seed = collate, seed

    def __call__(self, items: list[Item]) -> Read:
        for item in items:
            if item.error is not None:
                return item.error
        replaced = [one for item in items for one in item.replaced]
        good = [(item.sample, item.number) for item in items if item.sample is not None]
        if not good:
            return Batch({}, [], replaced)
        # Before the samples are mixed: afterwards, one that was mixed with a bad one looks as bad.
        nonfinite = [number for sample, number in good if not is_finite(sample)]
        try:
            with seeded(derive(self.seed, "batch", items[0].epoch, items[0].number)):
                tensors = self.collate([sample for sample, _ in good])
        except HalfstepError as error:
            return error
        return Batch(tensors, [number for _, number in good], replaced, nonfinite)


class Moving:
    """From the main memory to the device, and into the layout that it computes in."""

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self.device, self.channels_last = device, channels_last
        here = torch.empty(0, device=device)
        self.pins = here.is_cuda or here.is_xpu

    def __call__(self, batch: Batch) -> Batch:
        return batch._replace(tensors={name: self._moved(tensor) for name, tensor in batch.tensors.items()})

    def _moved(self, tensor: Tensor) -> Tensor:
        return moved(tensor, self.device, self.channels_last, non_blocking=self.pins)


def _read(
    samples: Samples | ValSamples, keys: Iterator[list[Key]], gather: Gather, workers: int, pins: bool
) -> Iterator[Batch]:
    """The batches of these keys, in their order; a worker's error as if it had happened here."""
    given, worker = Given(keys), Worker() if workers else None
    loader: Any = DataLoader(
        samples,
        batch_sampler=given,  # type: ignore[arg-type]
        collate_fn=gather,
        num_workers=workers,
        pin_memory=pins,
        worker_init_fn=worker,
        # Without its own, DataLoader draws its workers' seeds from the training's generator.
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
    """A batch of which nothing is left hands its report to a neighbour."""
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
