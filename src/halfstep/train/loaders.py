"""Build the training and validation loaders of a run from its recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

import torch

from halfstep import distributed
from halfstep.data.choose_order import choose_order, measure_nodes
from halfstep.data.dataset import (
    Collate,
    Order,
    Samples,
    Source,
    ValSamples,
    complete_source,
)
from halfstep.data.fingerprint import Fingerprint, fingerprint
from halfstep.data.indexed import find_shards
from halfstep.data.loader import TrainLoader, ValLoader, choose_workers
from halfstep.data.order import RANDPERM, SavedOrder
from halfstep.data.recorded_files import RecordedFiles
from halfstep.errors import BadData, RanksDisagree
from halfstep.launch_variables import count_cores, count_cores_per_rank, read_launched_rank
from halfstep.train.setup import AnyRecipe
from halfstep.train.signals import interrupt_on_signal
from halfstep.train.task import Split, Task

T = TypeVar("T")


@dataclass(frozen=True)
class Loaders:
    """Both loaders of a run, the number of workers, and the fingerprint of the data."""

    train: TrainLoader
    val: ValLoader
    workers: int
    data_fingerprint: Fingerprint
    order: SavedOrder
    notes: list[str] = field(default_factory=list)


def make_loaders(
    task: Task, recipe: AnyRecipe, device: torch.device, workers: int | None = None, order: SavedOrder | None = None
) -> Loaders:
    """Return the loaders of this rank; `workers` and `order` are those chosen at the start of the run.

    Raises BadData for an empty split, and RanksDisagree where ranks see different data.
    """
    # An index of many shards takes minutes: a stop need not wait for it, and stops the other ranks too.
    source = distributed.run_with_shared_errors(lambda: _run_interruptibly(lambda: _require_samples(task, "train")))
    # Before anything is divided: a rank with other samples would leave the others waiting.
    _require_same_data(
        source, distributed.run_with_shared_errors(lambda: _run_interruptibly(lambda: _require_samples(task, "val")))
    )
    chosen = order or _choose_order(source, recipe)
    train, reason = _make_source_loader(source, task, recipe, device, workers, chosen)
    _start_shard_checks(train, source, recipe, chosen)
    val = make_val_loader(task, recipe, device, train.workers)
    # Before the contents are read: what changes in between is noticed.
    recorded = distributed.run_with_shared_errors(
        lambda: _run_interruptibly(lambda: _record_files(train.samples, val.samples))
    )
    # Read by rank 0 for all: the ranks divide the same samples.
    sources = (source, val.samples.source)
    read = distributed.run_on_rank_zero(lambda: _run_interruptibly(lambda: fingerprint(*sources).as_dict()))
    data_fingerprint = replace(Fingerprint.from_dict(read), sources=sources)
    for files, part in zip(recorded, data_fingerprint.parts, strict=True):
        if files is not None:
            files.take_contents(part)
    notes = [reason, _describe_downloads(source, chosen, recipe), *_describe_unread_files(*sources)]
    return Loaders(train, val, train.workers, data_fingerprint, chosen, [note for note in notes if note])


def _describe_unread_files(*sources: Source) -> list[str]:
    """Return a line for each folder with archives that a run does not read."""
    sets = [shards for source in sources if (shards := find_shards(source)) is not None]
    if not sets:
        return []
    from halfstep.data.shard_scan import describe_unread_files

    return list(dict.fromkeys(describe_unread_files(shards.unread, shards.place) for shards in sets))


def make_train_loader(task: Task, recipe: AnyRecipe, device: torch.device) -> TrainLoader:
    """Return a training loader for use without a run; the data is not fingerprinted."""
    source = _require_samples(task, "train")
    return _make_source_loader(source, task, recipe, device, None, _choose_order(source, recipe))[0]


def _choose_order(source: Source, recipe: AnyRecipe) -> SavedOrder:
    """Return the order of a new run; rank 0 chooses it, since it may depend on the memory."""
    if source.chosen is None and recipe.data.window in (None, "all"):
        return RANDPERM
    given = (source, recipe.data.window, _count_step_samples(recipe), _count_nodes(), distributed.count_ranks())
    return SavedOrder(**distributed.run_on_rank_zero(lambda: asdict(choose_order(*given))))


def _count_step_samples(recipe: AnyRecipe) -> int:
    return recipe.train.batch_size * recipe.train.microbatches * distributed.count_ranks()


def _count_nodes() -> int:
    return max(1, distributed.count_ranks() // (read_launched_rank().local_world_size or 1))


def _describe_downloads(source: Source, order: SavedOrder, recipe: AnyRecipe) -> str:
    """Return a warning where the nodes download a set several times in an epoch; empty otherwise."""
    shards = find_shards(source)
    if shards is None or shards.is_local:
        return ""
    return measure_nodes(order, source, shards, _count_step_samples(recipe), _count_nodes()).warning


def _start_shard_checks(train: TrainLoader, source: Source, recipe: AnyRecipe, order: SavedOrder) -> None:
    """Let shards be verified in the background, and their chunks be announced."""
    if (shards := find_shards(source)) is None:
        return
    if shards.is_local:
        # Here, because folders need no shards.
        from halfstep.data.shard_check import ShardSpotCheck

        train.background = ShardSpotCheck(shards, recipe.train.seed or 0, distributed.rank(), distributed.count_ranks())
    train.announces_next_epoch = not shards.is_local
    # Of a store, more chunks than are open at once must not wait: they would be fetched after they were read.
    most = None if shards.is_local else order.window
    from halfstep.data.shard_bytes import Announcer

    train.announce = Announcer(lambda chunks: shards.announce(chunks, source.index_in_base), most)


def _make_source_loader(
    source: Source, task: Task, recipe: AnyRecipe, device: torch.device, workers: int | None, saved: SavedOrder
) -> tuple[TrainLoader, str]:
    """Return the loader, and why it has its number of workers."""
    train, seed = recipe.train, recipe.train.seed or 0
    samples = Samples(source, functools.partial(task.transform, "train"), seed)
    order = saved.of(len(source), seed, train.batch_size * train.microbatches * distributed.count_ranks())
    collate = functools.partial(task.collate, "train")
    workers, reason = _choose_workers(samples, order, collate, recipe, device, workers)
    loader = TrainLoader(
        samples,
        order,
        batch_size=train.batch_size,
        microbatches=train.microbatches,
        collate=collate,
        workers=workers,
        device=device,
        channels_last=train.channels_last,
        rank=distributed.rank(),
        size=distributed.count_ranks(),
        timeout=_compute_sample_timeout(source, recipe),
    )
    return loader, reason


def make_val_loader(task: Task, recipe: AnyRecipe, device: torch.device, workers: int = 0) -> ValLoader:
    """Return the validation loader of this rank."""
    train, seed, source = recipe.train, recipe.train.seed or 0, _require_samples(task, "val")
    shards = find_shards(source)
    return ValLoader(
        ValSamples(source, functools.partial(task.transform, "val"), seed),
        batch_size=train.batch_size,
        collate=functools.partial(task.collate, "val"),
        workers=workers,
        device=device,
        channels_last=train.channels_last,
        rank=distributed.rank(),
        size=distributed.count_ranks(),
        timeout=_compute_sample_timeout(source, recipe),
        # A chunk of a store is fetched by the node that reads it.
        neighboring=shards is not None and not shards.is_local,
    )


def _compute_sample_timeout(source: Source, recipe: AnyRecipe) -> float:
    """Return the seconds for a sample; a store has its own patience before."""
    shards = find_shards(source)
    return recipe.data.timeout + (shards.patience if shards and recipe.data.timeout else 0.0)


def _run_interruptibly(work: Callable[[], T]) -> T:
    with interrupt_on_signal():
        return work()


def _require_samples(task: Task, split: Split) -> Source:
    source = complete_source(task.source(split))
    if not len(source):
        raise BadData(f"the {split} split contains no samples", allowed="one sample or more", do="check data.path")
    return source


def _require_same_data(*sources: Source) -> None:
    """Raise RanksDisagree where ranks see different samples: each would train on its own, or wait forever."""
    # The length and first name suffice to find a wrong path, and cost nothing on a large set.
    seen = " and ".join(f"{len(source)} samples from {source.name(0)}" for source in sources)
    by_rank = distributed.gather_texts(seen)
    other = next((rank for rank, text in enumerate(by_rank) if text != by_rank[0]), None)
    if other is not None:
        raise RanksDisagree(
            f"rank {other} has {by_rank[other]}, rank 0 {by_rank[0]}",
            allowed="the same data on every process",
            do="copy the data to every machine, at the same path",
        )


def _record_files(*both: Samples | ValSamples) -> list[RecordedFiles | None]:
    """Record the files of both splits, so that one that changes under the run is reported, and not used."""
    recorded: list[RecordedFiles | None] = []
    for samples in both:
        files = None
        if samples.source.has_files and not samples.source.notices_changes:
            files = samples.change_of = RecordedFiles(samples.source)
        recorded.append(files)
    return recorded


def _choose_workers(
    samples: Samples, order: Order, collate: Collate, recipe: AnyRecipe, device: torch.device, measured: int | None
) -> tuple[int, str]:
    """Return the recipe's number of workers; `auto` is measured once per run, on rank 0."""
    if recipe.train.num_workers != "auto":
        # Limit the workers to the cores: more only take turns, and torch warns about them in every epoch.
        if recipe.train.num_workers <= (most := count_cores()):
            return recipe.train.num_workers, ""
        return most, f"num_workers {most}: {recipe.train.num_workers} were requested, but this machine has {most} cores"
    if measured is not None:
        return measured, f"num_workers {measured}: as measured when the run began"
    here = torch.empty(0, device=device).is_cpu

    def measure() -> tuple[int, str]:
        size = recipe.train.batch_size
        return choose_workers(samples, order, collate, size, cores=count_cores_per_rank(), computes_on_cores=here)

    number, reason = distributed.run_on_rank_zero(lambda: _run_interruptibly(measure))
    return number, f"num_workers {number}: {reason}"
