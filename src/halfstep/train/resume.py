"""Resume an unfinished run: find its newest whole checkpoint, compare it with the run, and restore it."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.checkpoint.chunks import ChunkedTensor
from halfstep.checkpoint.packing import unpack_state
from halfstep.checkpoint.paths import (
    BAD,
    CHECKPOINTS,
    CheckpointDir,
    Disk,
    remove_old_set_aside,
    remove_unfinished_saves,
)
from halfstep.checkpoint.reading import (
    Like,
    build_none_intact_error,
    find_newest_intact,
    load_rank_tensors,
    read_rank_json,
)
from halfstep.checkpoint.sealed import Manifest, read_manifest
from halfstep.data.dataset import derive_seed
from halfstep.data.order import SavedOrder
from halfstep.errors import StateMismatch, WrongUse, advise_adding_option, format_option
from halfstep.files import find_draft_target
from halfstep.guard.repair.remedies import Remedies
from halfstep.journal import events
from halfstep.journal.jsonl import (
    JOURNAL,
    check_journal_format,
    iterate_saved_events,
    read_journal_sizes,
    read_last_time,
    truncate_journal,
)
from halfstep.precision.environment import collect_environment
from halfstep.recipe.changes import DATA, EXTEND, RECIPE, suggest_extension
from halfstep.train.checkpointing import PROBE
from halfstep.train.environment import (
    AutoChoices,
    collect_rng_states,
    list_environment_changes,
    seed_all,
)
from halfstep.train.guarding import read_guard_remedies
from halfstep.train.loop import Loop
from halfstep.train.outputs import LAST
from halfstep.train.setup import AnyRecipe
from halfstep.train.state import RunObjects, State, check_state_components, restore_state

T = TypeVar("T")
_REPLACED = re.compile(
    r"best\.safetensors|last\.safetensors|last-ema\.safetensors|recipe\.yaml|result\.json|task\.json"
    r"|metrics\.prom|remote\.json|status\.rank-[0-9]{5}\.json|curves\.(?:svg|png)|epoch-[0-9]{4,}\.png"
)
"""Files of a run that are written as a draft first: a run that is killed while it writes leaves the draft."""
_PROBE = re.compile(rf"\.{PROBE}\.[0-9a-f]{{16}}(\.[0-9]+)?")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to resume from, read and verified; nothing was changed yet."""

    generation: CheckpointDir
    manifest: Manifest
    rank: int
    """The rank whose own state this one takes: its own, or 0 where another number of ranks saved it."""
    plain: Mapping[str, Any]
    """The state without its tensors."""
    passed_over: list[str]
    """Newer checkpoints that are damaged, and why."""

    @functools.cached_property
    def state(self) -> State:
        """The state, with whole tensors on the host."""
        return self.state_like(lambda *_: None)

    def state_like(self, like: Like) -> State:
        """Return the state, where the tensors that `like` provides are filled and replace whole ones."""
        tensors = load_rank_tensors(self.generation, self.rank, like)
        return State.from_parts(self.plain, tensors, where=str(self.generation.path))

    def without_tensors(self, name: str) -> dict[str, Any]:
        """Return a component that has no tensors, such as the recipe."""
        found: dict[str, Any] = unpack_state(self.plain[name], {}, f"{self.generation.path}, {name}")
        return found

    @property
    def auto_choices(self) -> AutoChoices:
        """The automatic choices of when the run began."""
        return AutoChoices.from_dict(self.without_tensors("auto_choices"))

    @property
    def remedies(self) -> Remedies | None:
        """The remedies of the run's guard."""
        return read_guard_remedies(self.without_tensors("guards"))

    def auto_choices_for(self, recipe: AnyRecipe) -> AutoChoices | None:
        """Return the automatic choices, unless the requested precision has changed: then they are made again."""
        return self.auto_choices if self._has_precision_of(recipe) else None

    def order_for(self, recipe: AnyRecipe) -> SavedOrder | None:
        """Return the order of the samples, unless another window is requested: then it is chosen again."""
        is_same = self.without_tensors("recipe").get("data", {}).get("window") == recipe.data.window
        return self.auto_choices.order if is_same else None

    def remedies_for(self, recipe: AnyRecipe) -> Remedies | None:
        """Return the remedies of the run's guard; None for another precision, which they were not made for."""
        return self.remedies if self._has_precision_of(recipe) else None

    def _has_precision_of(self, recipe: AnyRecipe) -> bool:
        return bool(self.without_tensors("recipe").get("precision") == recipe.precision)


Extension = TypedDict(
    "Extension",
    {"from": int, "to": int, "epochs": int | None, "rewarm": bool, "lr": float, "peak_lr": float, "previous": object},
)
"""The steps that a launch adds to a finished run, its learning rate, and the earlier result."""


@dataclass(frozen=True)
class ResumeRecord:
    """How a run was resumed, for its journal."""

    attempt: int = 0
    epoch: int = 0
    checkpoint: str | None = None
    repeated_steps: int | None = None
    """Steps that are done again."""
    reasons: list[str] = field(default_factory=list)
    """Why the bits may differ from those without the interruption."""
    changed: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    """Which of `recipe` and `data` have changed."""
    rejected_checkpoints: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds that the run had taken at the checkpoint."""
    extended: Extension | None = None
    """Where this launch extends the run from and to, with its learning rate, and the earlier result."""

    @property
    def is_new_length_or_settings(self) -> bool:
        """Return whether the run continues with another length or other settings than the checkpoint has."""
        return bool(self.changed) or self.extended is not None

    def as_dict(self) -> dict[str, object]:
        """Return the fields for the journal, with whether the resume is exact."""
        return {**asdict(self), "exact": not self.reasons and not self.changed}


def find_checkpoint(folder: Path) -> FoundCheckpoint | None:
    """Return the newest whole checkpoint of a run; None if it was never saved. Every rank calls it.

    Raises NoCheckpoint where checkpoints existed and none is whole, and StateMismatch for other components of a run.
    """
    newest, rejected = distributed.run_on_rank_zero(lambda: _choose_checkpoint(folder))
    if newest is None:
        return None
    name, attempt, number = newest
    generation = CheckpointDir(folder / CHECKPOINTS / name, attempt, number)
    manifest = read_manifest(generation)
    # Each rank has separate files, with its own buffers and random state.
    rank = distributed.rank() if manifest.world_size == distributed.count_ranks() else 0
    plain = distributed.run_with_shared_errors(
        lambda: check_state_components(read_rank_json(generation, rank), str(generation.path))
    )
    return FoundCheckpoint(generation, manifest, rank, plain, rejected)


def _choose_checkpoint(folder: Path) -> tuple[tuple[str, int, int] | None, list[str]]:
    """Choose a checkpoint on rank 0, which holds the lock; clear temporary files and set damaged ones aside.

    Returns name, attempt and number of the newest whole one, and why newer ones are rejected.
    """
    check_journal_format(folder / JOURNAL)
    place, disk = folder / CHECKPOINTS, Disk()
    verdict, damaged = find_newest_intact(place)
    if verdict is None:
        _refuse_lost_checkpoints(folder)
    for one in damaged:
        # One that cannot be renamed stays where it is, and is skipped again the next time.
        with contextlib.suppress(OSError):
            disk.rename(one.generation.path, one.generation.path.with_name(one.generation.name + BAD))
    # Only now: where checkpoints existed and none is whole, the folder is left as it is.
    remove_unfinished_saves(place, disk)
    remove_old_set_aside(place, disk)
    _remove_drafts(folder, disk)
    found = verdict.generation if verdict else None
    newest = (found.name, found.attempt, found.number) if found else None
    return newest, [f"{one.generation.name}: {one.problem}" for one in damaged]


def _refuse_lost_checkpoints(folder: Path) -> None:
    """Raise NoCheckpoint if a run was saved and has no checkpoint: it must not start over silently."""
    if _was_saved(folder):
        raise build_none_intact_error(folder / CHECKPOINTS, ["there are none, although the journal records some"])
    # The journal would mention a checkpoint; weights alone may be older than the first one.
    if not read_journal_sizes(folder)[JOURNAL] and not (folder / JOURNAL).exists() and (folder / LAST).exists():
        raise build_none_intact_error(
            folder / CHECKPOINTS, [f"there are none, and no {JOURNAL}, although {LAST} exists"]
        )


def _remove_drafts(folder: Path, disk: Disk) -> None:
    for place in (folder, folder / "pictures"):
        drafts: list[Path] = []
        with contextlib.suppress(OSError):
            drafts += [
                path
                for path in place.iterdir()
                if _PROBE.fullmatch(path.name) or _REPLACED.fullmatch(find_draft_target(path.name) or "")
            ]
        for path in drafts:
            with contextlib.suppress(OSError):
                disk.remove(path)


def _was_saved(folder: Path) -> bool:
    return any(_mentions_checkpoint(event) for event in iterate_saved_events(folder / JOURNAL))


def _mentions_checkpoint(event: events.Event) -> bool:
    # A resume cuts its checkpoint's event out of the journal; the event of the resume stays.
    resumed = event.get("resumed")
    return event.get("kind") == "checkpoint" or (isinstance(resumed, dict) and bool(resumed.get("checkpoint")))


def resume_from(
    loop: Loop,
    found: FoundCheckpoint | None,
    folder: Path,
    accepted: Collection[str],
    before: Mapping[str, object] | None = None,
) -> ResumeRecord:
    """Restore the checkpoint into a loop built for it, and cut the journal back to it; or start from step 0.

    Everything is checked before the run or its folder changes: raises StateMismatch, BadData or WrongUse. `before` is
    the result of a finished run that is extended.
    """
    if found is None:
        _truncate_journal_files(folder, {})
        return ResumeRecord()
    state = distributed.run_with_shared_errors(lambda: _load_found_state(loop.live, found))
    restored = distributed.run_with_shared_errors(lambda: restore_state(loop.live, state, accepted))
    extended = _build_extension(loop, before) if EXTEND in accepted and restored.is_longer else None
    repeated, journal_sizes = 0, found.without_tensors("position")["journal_sizes"]
    if distributed.rank() == 0:
        # Read before the journal is cut, which drops these steps and refuses an invalid size.
        size = journal_sizes.get(JOURNAL)
        after = size if type(size) is int and size >= 0 else 0
        repeated = max(0, _read_last_attempt(folder, after) - found.generation.attempt)
    _truncate_journal_files(folder, journal_sizes)
    loop.checkpoints.resumed(found.generation)
    loop.guarding.taken_up(found.generation.attempt, found.generation.name)
    return ResumeRecord(
        attempt=found.generation.attempt,
        epoch=loop.progress.epoch,
        checkpoint=found.generation.name,
        repeated_steps=repeated,
        reasons=_list_inexact_reasons(loop, found),
        changed=[*restored.recipe, *restored.data],
        accepted=[*([RECIPE] if restored.recipe else ()), *([DATA] if restored.data else ())],
        rejected_checkpoints=found.passed_over,
        seconds=read_last_time(folder / JOURNAL),
        extended=extended,
    )


def _load_found_state(live: RunObjects, found: FoundCheckpoint) -> State:
    """Return the saved state, with shards where this run has shards."""
    if not found.manifest.chunks and not distributed.is_sharded(live.parts.model.parameters()):
        state = found.state
    else:
        state = found.state_like(build_tensor_factory(live, found.plain, found.manifest.chunks))
    return adapt_state_to_ranks(live, state, found.manifest)


def _list_inexact_reasons(loop: Loop, checkpoint: FoundCheckpoint) -> list[str]:
    """Return why the bits may differ from those without the interruption."""
    manifest = checkpoint.manifest
    found = list_environment_changes(dict(manifest.environment), collect_environment(loop.stepper.device))
    if manifest.world_size != distributed.count_ranks():
        found.append(f"it was saved by {manifest.world_size} ranks, and resumes with {distributed.count_ranks()}")
    else:
        saved, now = _count_saved_shards(manifest.chunks), _count_live_shards(loop.model)
        if saved != now:
            # Shards are summed in parts of other sizes: the last bits of a sum depend on its order, also of two terms
            # in a norm.
            found.append(f"it was saved by {_describe_shards(saved)}, and resumes with {_describe_shards(now)}")
        if manifest.world_size > 2 and min(saved, now) == 1:
            # DDP packs gradients anew after its first backward, and a ring adds each element in an order that depends
            # on its place. Two terms have one order; with four ranks the bits of a resumed run were seen to differ.
            found.append("DDP adds the gradients of more than two ranks in another order in its first step")
    size, before = loop.recipe.train.batch_size, checkpoint.without_tensors("recipe")["train"]["batch_size"]
    if size != before:
        found.append(f"a micro-batch had {before} samples, and has {size}")
    return found


def _count_saved_shards(chunks: Mapping[str, ChunkedTensor]) -> int:
    """Return how many ranks shared one copy of the weights when they were saved; 1 for ranks with all weights."""
    return max((len(chunked.ranks) for chunked in chunks.values()), default=1)


def _count_live_shards(model: nn.Module) -> int:
    return max((math.prod(distributed.list_shard_counts(parameter)) for parameter in model.parameters()), default=1)


def _describe_shards(size: int) -> str:
    return "ranks that hold all weights" if size == 1 else f"{size} ranks to a copy of the weights"


def _build_extension(loop: Loop, before: Mapping[str, object] | None) -> Extension:
    """Return what this launch adds to a run."""
    at, train = loop.progress.attempts, loop.recipe.train
    if at >= loop.planned:
        raise WrongUse(
            f"{format_option('extend')} to {loop.planned} steps in all, and the run has taken {at} already",
            allowed="the total length of the run, including the steps already trained",
            do=f"{suggest_extension((None, at), loop.train.steps_per_epoch)} adds one epoch",
        )
    if before is not None and loop.progress.step_in_epoch < loop.train.steps_per_epoch:
        # The best weights of an end in the middle of an epoch, which is not evaluated again.
        best = before.get("best")
        value, epoch = (best.get("value"), best.get("epoch")) if isinstance(best, dict) else (None, None)
        if isinstance(value, float) and isinstance(epoch, int):
            loop.progress.best, loop.progress.best_epoch = value, epoch
    latest = loop.recipe.schedule.extensions[-1:]
    return {
        "from": at,
        "to": loop.planned,
        "epochs": train.epochs,
        "rewarm": any(one.rewarm for one in latest),
        "lr": loop.parts.lr,
        "peak_lr": float(max(loop.parts.schedule.base_lrs)),
        "previous": before,
    }


def _truncate_journal_files(folder: Path, sizes: dict[str, int]) -> None:
    if distributed.rank() == 0:
        truncate_journal(folder, sizes)


def _read_last_attempt(folder: Path, after: int = 0) -> int:
    """Return the last attempt in the journal after its first `after` bytes."""
    written = iterate_saved_events(folder / JOURNAL, min(after, read_journal_sizes(folder)[JOURNAL]))
    steps = (event.get("attempt") for event in written if event["event"] == events.STEP)
    return max((attempt for attempt in steps if type(attempt) is int), default=0)


# Restore a state saved with another number of ranks, or sharded in another way.


_HOST = torch.empty(0).device


def build_tensor_factory(live: RunObjects, plain: Mapping[str, Any], chunks: Collection[str]) -> Like:
    """Return a function that gives a new tensor like its parameter for weights, averages and optimizer state.

    Where neither the parameter nor the saved tensor is in shards, it gives None.
    """
    parameters = dict(live.parts.model.named_parameters())

    def like(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        parameter = parameters.get(_find_parameter_name(name, plain))
        if (
            parameter is not None
            and name.endswith("/scale")
            and (distributed.is_dtensor_shard(parameter) or name in chunks)
        ):
            return _create_state_scale(parameter, tuple(shape), dtype)
        # Some optimizers keep one number, or one row, for a parameter; these are whole on every rank.
        if parameter is None or tuple(shape) != tuple(parameter.shape):
            return None
        if distributed.is_dtensor_shard(parameter):
            return torch.empty_like(parameter.detach(), dtype=dtype)
        # In the parameter's strides, which a fused optimizer expects of its state.
        return torch.empty_like(parameter.detach(), dtype=dtype, device=_HOST) if name in chunks else None

    return like


def _create_state_scale(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor for the scales of an optimizer's state in 8 bits, one for each block of the parameter."""
    from halfstep.step.storage.small_states import create_scale_tensor

    return (
        create_scale_tensor(parameter, shape, dtype)
        if distributed.is_dtensor_shard(parameter)
        else torch.empty(shape, dtype=dtype)
    )


def _find_parameter_name(name: str, plain: Mapping[str, Any]) -> str:
    """Return the parameter that a tensor of a checkpoint belongs to; empty if there is none."""
    match name.split("/"):
        case ["weights", "parameters", parameter] | ["ema", "averages", parameter]:
            return parameter
        case ["optimizers", optimizer, "state", number, _, *_] if number.isdigit():
            names = [one for group in plain["optimizers"][optimizer]["param_names"] for one in group]
            return names[int(number)] if int(number) < len(names) else ""
    return ""


def adapt_state_to_ranks(live: RunObjects, saved: State, manifest: Manifest) -> State:
    """Return the saved state for the current ranks and micro-batches; samples and their order stay.

    With another number of ranks, random generators are seeded again, since each rank had its own, and the training
    metrics of the epoch restart. Raises StateMismatch if these ranks would use different samples in a step.
    """
    train, ranks = live.recipe.train, distributed.count_ranks()
    before = saved.recipe["train"]["batch_size"] * saved.recipe["train"]["microbatches"] * manifest.world_size
    if train.batch_size * train.microbatches * ranks == before:
        divided = {name: getattr(train, name) for name in ("batch_size", "microbatches", "global_batch")}
        saved = replace(saved, recipe={**saved.recipe, "train": {**saved.recipe["train"], **divided}})
    elif manifest.world_size != ranks:
        raise _global_batch_error(live, before, manifest.world_size)
    if manifest.world_size == ranks:
        return saved
    seed_all(derive_seed(train.seed or 0, "ranks", ranks, manifest.attempt, distributed.rank()))
    rng = collect_rng_states(live.parts.stepper.device)
    return replace(saved, rng=rng, counts={**saved.counts, "epoch": State.of(live).counts["epoch"]})


def _global_batch_error(live: RunObjects, before: int, ranks_before: int) -> StateMismatch:
    train, ranks = live.recipe.train, distributed.count_ranks()
    each = train.batch_size * ranks
    keeps = f"train.batch_size={before // ranks} train.microbatches=1" if before % ranks == 0 else ""
    if before % each == 0:
        keeps = f"train.microbatches={before // each}"
    if train.global_batch is not None and before % ranks == 0:
        keeps = f"train.global_batch={before}"
    return StateMismatch(
        f"{ranks_before} ranks saved the run with {before} samples a step; {ranks} ranks would take "
        f"{each * train.microbatches}",
        allowed="the same number of samples a step, so that the order of the samples continues",
        do=f"add {keeps}"
        if keeps
        else f"use a number of ranks that divides {before}, or {advise_adding_option('new')}",
    )
