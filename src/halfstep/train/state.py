"""Define everything that the next step of a run depends on: the fields of `State` are the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.checkpoint.chunks import ChunkedTensor, chunked
from halfstep.checkpoint.commit import RankSnapshot
from halfstep.checkpoint.packing import pack, unpack
from halfstep.checkpoint.reading import Like
from halfstep.checkpoint.sealed import Manifest
from halfstep.data.dataset import BadSampleBudget, Samples, derive
from halfstep.errors import BadData, StateMismatch
from halfstep.precision.island import islands
from halfstep.train.environment import AutoChoices, read_generators, seed_all
from halfstep.train.epoch_metrics import EpochMetrics, Progress
from halfstep.train.guarding import stateful
from halfstep.train.setup import AnyRecipe, Parts
from halfstep.train.weights import non_persistent_buffers

OWN = ("weights/buffers/", "weights/extra_state/", "ema/buffers/", "rng/", "counts/epoch/metrics/")
"""Tensors that differ between ranks; rank 0 writes the others for all."""
FINITE, NOT_NAN = ("weights/parameters/", "ema/averages/"), ("weights/buffers/", "ema/buffers/")
"""Tensors that must be finite in a checkpoint, and those in which an infinity may be intended."""

_HOST = torch.empty(0).device
EXTRA = "_extra_state"
"""torch's key for the result of a module's `get_extra_state()`."""


@dataclass
class RunObjects:
    """The live objects that a `State` is read from and restored into."""

    recipe: AnyRecipe
    parts: Parts
    progress: Progress
    epoch_metrics: EpochMetrics
    budget: BadSampleBudget
    samples: Samples
    auto_choices: AutoChoices
    data_fingerprint: Mapping[str, Any]
    """The fingerprint of the data when the run began; see `data.fingerprint`."""
    last_evaluation: dict[str, float]
    """The metrics of the last evaluation."""
    journal_sizes: Callable[[], dict[str, int]]
    """Returns the sizes of the run's journal files."""


@dataclass(frozen=True)
class State:
    """A run between two steps, as plain data and tensors; the tensors are the run's own until they are copied."""

    weights: dict[str, Any]
    """Parameters and buffers, including non-persistent buffers."""
    optimizers: dict[str, Any]
    lr_schedulers: dict[str, Any]
    ema: dict[str, Any] | None
    loss_scales: dict[str, Any]
    """The loss scales, and N0, the divisor of summed losses."""
    counts: dict[str, Any]
    """Steps attempted, applied and skipped, and the sums of the epoch so far."""
    rng: dict[str, Any]
    position: dict[str, Any]
    """The position of the run in its data and its journal, and the bad samples found."""
    guards: dict[str, Any]
    recipe: dict[str, Any]
    precision: dict[str, Any]
    auto_choices: dict[str, Any]

    @classmethod
    def of(cls, live: RunObjects) -> State:
        """Read the state of the live objects."""
        stepper = live.parts.stepper.state_dict()
        optimizers, losses = stepper["optimizers"], stepper["losses"]
        return cls(
            weights=_weights(live),
            optimizers={name: {**_optimizer_facts(live, name), **own["optimizer"]} for name, own in optimizers.items()},
            lr_schedulers={name: own["schedule"] for name, own in optimizers.items()},
            ema=stepper["ema"],
            loss_scales={
                name: {"scale": loss["loss_scale"], "base_count": loss["base_count"]} for name, loss in losses.items()
            },
            counts={
                "steps": stepper["counts"],
                "epoch": live.epoch_metrics.state_dict(),
                "last_evaluation": dict(live.last_evaluation),
            },
            rng=read_generators(live.parts.stepper.device),
            position={
                "progress": vars(live.progress),
                "bad_samples": sorted(live.budget.bad),
                "data_fingerprint": dict(live.data_fingerprint),
                "journal_sizes": live.journal_sizes(),
            },
            guards={guard.name: guard.state_dict() for guard in stateful(live.parts.stepper)},
            recipe=live.recipe.model_dump(mode="json"),
            precision={"name": stepper["precision"], "islands": sorted(islands(live.parts.model))},
            auto_choices=live.auto_choices.as_dict(),
        )

    def snapshot(self, attempt: int, environment: Mapping[str, Any]) -> RankSnapshot:
        """Return what this rank has to write: its own tensors, its chunks of sharded ones, and on rank 0 the rest."""
        plain: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        chunks: dict[str, ChunkedTensor] = {}
        for name in COMPONENTS:
            plain[name], found = pack(getattr(self, name), name)
            chunks |= {key: chunked(key, tensor) for key, tensor in found.items() if distributed.is_shard(tensor)}
            tensors |= {key: tensor for key, tensor in found.items() if _writes(key, chunks.get(key))}
        tensors = {key: distributed.local(tensor) for key, tensor in tensors.items()}
        return RankSnapshot(
            attempt,
            plain,
            tensors,
            finite=[key for key in tensors if key.startswith(FINITE)],
            not_nan=[key for key in tensors if key.startswith(NOT_NAN)],
            environment=environment,
            chunks=chunks,
        )

    @classmethod
    def from_parts(cls, plain: Any, tensors: Mapping[str, Tensor], where: str) -> State:
        """Return the state that `snapshot` wrote; raise StateMismatch or BadData for missing or unknown components."""
        checked_components(plain, where)
        return cls(**{name: unpack(plain[name], tensors, f"{where}, {name}") for name in COMPONENTS})


COMPONENTS = tuple(field.name for field in dataclasses.fields(State))
NO_EMA = ("ema", None)
"""The one component that a run may do without."""


def checked_components(plain: Any, where: str) -> Mapping[str, Any]:
    """Return the JSON of a state; raise StateMismatch or BadData for missing, unknown or invalid components."""
    found = list(plain) if isinstance(plain, dict) else []
    lacks, more = [n for n in COMPONENTS if n not in found], [n for n in found if n not in COMPONENTS]
    if lacks or more:
        words = [f"lacks {', '.join(lacks)}"] if lacks else []
        words += [f"has {', '.join(map(str, more[:5]))}, which is no part of a run"] if more else []
        raise StateMismatch(
            f"{where} {' and '.join(words)}",
            allowed=", ".join(COMPONENTS),
            do="use another checkpoint, or add --new to begin again in a folder of its own",
        )
    odd = [n for n in COMPONENTS if not isinstance(plain[n], dict) and (n, plain[n]) != NO_EMA]
    if odd:
        raise BadData(
            f"{where} is not the state of a run: {odd[0]} is a {type(plain[odd[0]]).__name__}",
            allowed="what halfstep wrote",
            do="use another checkpoint, or add --new to begin again in a folder of its own",
        )
    checked: Mapping[str, Any] = plain
    return checked


def _writes(name: str, cut: ChunkedTensor | None) -> bool:
    """Return whether this rank writes a tensor, or a chunk of it."""
    rank = distributed.rank()
    if cut is not None:
        return any(chunk.rank == rank for chunk in cut.chunks())
    return rank == 0 or name.startswith(OWN)


def _optimizer_facts(live: RunObjects, name: str) -> dict[str, Any]:
    """Return what an optimizer's state lacks: its kind, and the names of the parameters that it refers to by number."""
    optimizer = live.parts.stepper.optimizers[name]
    names = {id(parameter): name for name, parameter in live.parts.model.named_parameters()}
    groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    return {"kind": type(optimizer).__name__, "param_names": groups}


def _extra_state(model: nn.Module) -> dict[str, Any]:
    """Return what a model saves besides parameters and buffers."""
    saved = model.state_dict()
    own = {name for name in saved if name.rpartition(".")[2] == EXTRA}
    return {name: value for name, value in saved.items() if name in own or not isinstance(value, Tensor)}


def _weights(live: RunObjects) -> dict[str, Any]:
    model = live.parts.model
    return {
        "parameters": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "non_persistent_buffers": non_persistent_buffers(model),
        "extra_state": _extra_state(model),
    }


# -- other ranks ------------------------------------------------------------------------------------------------------
# Restore what another number of ranks saved, or what was sharded in another way.


def like_parameters(live: RunObjects, plain: Mapping[str, Any], chunks: Collection[str]) -> Like:
    """Return a function that gives a new tensor like its parameter for weights, averages and optimizer state.

    Where neither the parameter nor the saved tensor is in shards, it gives None.
    """
    parameters = dict(live.parts.model.named_parameters())

    def like(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        parameter = parameters.get(_parameter_of(name, plain))
        # Some optimizers keep one number, or one row, for a parameter; these are whole on every rank.
        if parameter is None or tuple(shape) != tuple(parameter.shape):
            return None
        if distributed.is_shard(parameter):
            return torch.empty_like(parameter.detach(), dtype=dtype)
        # In the parameter's strides, which a fused optimizer expects of its state.
        return torch.empty_like(parameter.detach(), dtype=dtype, device=_HOST) if name in chunks else None

    return like


def _parameter_of(name: str, plain: Mapping[str, Any]) -> str:
    """Return the parameter that a tensor of a checkpoint belongs to; empty where there is none."""
    match name.split("/"):
        case ["weights", "parameters", parameter] | ["ema", "averages", parameter]:
            return parameter
        case ["optimizers", optimizer, "state", number, _] if number.isdigit():
            names = [one for group in plain["optimizers"][optimizer]["param_names"] for one in group]
            return names[int(number)] if int(number) < len(names) else ""
    return ""


def for_these_ranks(live: RunObjects, saved: State, manifest: Manifest) -> State:
    """Return the saved state for the ranks and micro-batches that there are now; samples and their order stay.

    With another number of ranks, random generators are seeded anew, since each rank had its own, and the training
    metrics of the epoch begin anew. Raises StateMismatch where these ranks would take other samples in a step.
    """
    train, ranks = live.recipe.train, distributed.size()
    before = saved.recipe["train"]["batch_size"] * saved.recipe["train"]["microbatches"] * manifest.world_size
    if train.batch_size * train.microbatches * ranks == before:
        divided = {"batch_size": train.batch_size, "microbatches": train.microbatches}
        saved = replace(saved, recipe={**saved.recipe, "train": {**saved.recipe["train"], **divided}})
    elif manifest.world_size != ranks:
        raise _other_global_batch(live, before, manifest.world_size)
    if manifest.world_size == ranks:
        return saved
    seed_all(derive(train.seed or 0, "ranks", ranks, manifest.attempt, distributed.rank()))
    rng = read_generators(live.parts.stepper.device)
    return replace(saved, rng=rng, counts={**saved.counts, "epoch": State.of(live).counts["epoch"]})


def _other_global_batch(live: RunObjects, before: int, ranks_before: int) -> StateMismatch:
    train, ranks = live.recipe.train, distributed.size()
    each = train.batch_size * ranks
    keeps = f"train.batch_size={before // ranks} train.microbatches=1" if before % ranks == 0 else ""
    if before % each == 0:
        keeps = f"train.microbatches={before // each}"
    return StateMismatch(
        f"{ranks_before} ranks saved the run with {before} samples a step; {ranks} ranks would take "
        f"{each * train.microbatches}",
        allowed="the same number of samples a step, so that the order of the samples goes on",
        do=f"add {keeps}" if keeps else f"use a number of ranks that divides {before}, or add --new",
    )
