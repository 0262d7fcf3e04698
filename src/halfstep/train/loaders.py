"""Both loaders of a run, as its recipe says."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from halfstep import world
from halfstep.errors import BadData, RanksDisagree
from halfstep.train.data.fingerprint import fingerprint
from halfstep.train.data.loader import TrainLoader, ValLoader
from halfstep.train.data.order import Order
from halfstep.train.data.samples import Samples, ValSamples
from halfstep.train.data.source import Collate, Source
from halfstep.train.data.workers import choose_workers
from halfstep.train.setup import AnyRecipe
from halfstep.train.start import cores_each, decided_once
from halfstep.train.task import Split, Task


@dataclass(frozen=True)
class Loaders:
    train: TrainLoader
    val: ValLoader
    workers: int
    data: dict[str, Any]
    """What the samples are; see `data.fingerprint`."""
    notes: list[str] = field(default_factory=list)


def make_loaders(task: Task, recipe: AnyRecipe, device: torch.device, workers: int | None = None) -> Loaders:
    """The loaders of this process; `workers` is what `auto` came to when the run began."""
    source = _filled(task, "train")
    _same_everywhere(source, _filled(task, "val"))
    train, reason = _train_loader(source, task, recipe, device, workers)
    val = make_val_loader(task, recipe, device, train.workers)
    data = _fingerprint(source, val.samples.source)
    return Loaders(train, val, train.workers, data, [reason] if reason else [])


def make_train_loader(task: Task, recipe: AnyRecipe, device: torch.device) -> TrainLoader:
    """For those who read batches without a run around them: what the samples are is not looked into."""
    return _train_loader(_filled(task, "train"), task, recipe, device, None)[0]


def _train_loader(
    source: Source, task: Task, recipe: AnyRecipe, device: torch.device, workers: int | None
) -> tuple[TrainLoader, str]:
    """The loader, and why it has as many workers as it has."""
    train, seed = recipe.train, recipe.train.seed or 0
    samples = Samples(source, functools.partial(task.transform, "train"), seed)
    order = Order(len(source), seed)
    collate = functools.partial(task.collate, "train")
    workers, reason = _workers(samples, order, collate, recipe, device, workers)
    loader = TrainLoader(
        samples,
        order,
        batch_size=train.batch_size,
        microbatches=train.microbatches,
        collate=collate,
        workers=workers,
        device=device,
        channels_last=train.channels_last,
        rank=world.rank(),
        size=world.size(),
    )
    return loader, reason


def make_val_loader(task: Task, recipe: AnyRecipe, device: torch.device, workers: int = 0) -> ValLoader:
    train, seed = recipe.train, recipe.train.seed or 0
    return ValLoader(
        ValSamples(_filled(task, "val"), functools.partial(task.transform, "val"), seed),
        batch_size=train.batch_size,
        collate=functools.partial(task.collate, "val"),
        workers=workers,
        device=device,
        channels_last=train.channels_last,
        rank=world.rank(),
        size=world.size(),
    )


def _filled(task: Task, split: Split) -> Source:
    source = task.source(split)
    if not len(source):
        raise BadData(f"the {split} split holds no samples", allowed="one sample or more", do="look at data.path")
    return source


def _same_everywhere(*sources: Source) -> None:
    """Processes must divide the same samples: one that sees others would train on its own, or wait for ever."""
    seen = " and ".join(f"{len(source)} samples from {source.name(0)}" for source in sources)
    told = world.from_all(seen)
    other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
    if other is not None:
        raise RanksDisagree(
            f"rank {other} has {told[other]}, rank 0 {told[0]}",
            allowed="the same data on every process",
            do="copy the data to every machine, at the same path",
        )


def _fingerprint(*sources: Source) -> dict[str, Any]:
    """Read by rank 0, for all: what the processes divide among them is the same."""
    found: dict[str, Any] = json.loads(decided_once(lambda: json.dumps(fingerprint(*sources).as_dict())))
    return found


def _workers(
    samples: Samples, order: Order, collate: Collate, recipe: AnyRecipe, device: torch.device, measured: int | None
) -> tuple[int, str]:
    """As many as the recipe says; `auto` is measured on rank 0, for all, and once for a run."""
    if recipe.train.num_workers != "auto":
        return recipe.train.num_workers, ""
    if measured is not None:
        return measured, f"num_workers {measured}: as measured when the run began"
    here = torch.empty(0, device=device).is_cpu

    def measure() -> str:
        size = recipe.train.batch_size
        return json.dumps(choose_workers(samples, order, collate, size, cores=cores_each(), computes_on_cores=here))

    number, reason = json.loads(decided_once(measure))
    return number, f"num_workers {number}: {reason}"
