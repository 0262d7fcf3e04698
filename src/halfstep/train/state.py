"""Define everything that the next step of a run depends on, and restore it: the fields of `State` are the checkpoint.

A saved state is compared with the run first, all of it; nothing changes where it differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from halfstep import distributed, numbers
from halfstep.checkpoint.chunks import ChunkedTensor, find_chunk_layout
from halfstep.checkpoint.commit import RankSnapshot
from halfstep.checkpoint.packing import pack_state, unpack_state
from halfstep.data.dataset import BadSampleBudget, Samples
from halfstep.data.fingerprint import Fingerprint, different
from halfstep.errors import (
    BadData,
    HalfstepError,
    StateMismatch,
    advise_adding_option,
    advise_new_run,
    check_same_keys,
    format_option,
)
from halfstep.precision.island import find_islands
from halfstep.recipe.changes import (
    DATA,
    EXTEND,
    LENGTH,
    PLACES,
    RECIPE,
    Change,
    build_recipe_changed_error,
    drop_keys,
    format_change_list,
    list_relevant_changes,
)
from halfstep.step.ema import EmaState
from halfstep.step.saved_tensors import (
    list_non_persistent_buffers,
    put_buffers,
    select_assignable_buffers,
    select_saved_parameters,
)
from halfstep.train.environment import (
    AutoChoices,
    GeneratorStates,
    check_rng_states,
    collect_rng_states,
    restore_rng_states,
)
from halfstep.train.epoch_metrics import EpochMetrics, EpochState, RunProgress
from halfstep.train.guarding import (
    check_guard_states,
    list_stateful_guards,
    load_guard_states,
    remove_saved_remedies,
    reset_skip_counts,
)
from halfstep.train.setup import AnyRecipe, TrainingParts
from halfstep.train.weights import (
    collect_extra_state,
    find_empty_buffers,
)

if TYPE_CHECKING:
    from typing import NotRequired

OWN = ("weights/buffers/", "weights/extra_state/", "ema/buffers/", "rng/", "counts/epoch/metrics/")
"""Tensors that differ between ranks; rank 0 writes the others for all."""
PARAMETERS = "weights/parameters/"
FINITE, NOT_NAN = (PARAMETERS, "ema/averages/"), ("weights/buffers/", "ema/buffers/")
"""Tensors that must be finite in a checkpoint, and those in which an infinity may be intended."""


@dataclass
class RunObjects:
    """The live objects that a `State` is read from and restored into."""

    recipe: AnyRecipe
    parts: TrainingParts
    progress: RunProgress
    epoch_metrics: EpochMetrics
    budget: BadSampleBudget
    samples: Samples
    auto_choices: AutoChoices
    data_fingerprint: Fingerprint
    """The fingerprint of the data when the run began."""
    last_evaluation: dict[str, float]
    """The metrics of the last evaluation."""
    journal_sizes: Callable[[], dict[str, int]]
    """Returns the sizes of the run's journal files."""


class SavedWeights(TypedDict):
    """Parameters, buffers including non-persistent ones, and the extra state of modules."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    non_persistent_buffers: list[str]
    extra_state: Mapping[str, object]


class SavedLossScale(TypedDict):
    """A loss scale, and N0, the divisor of summed losses."""

    scale: Mapping[str, float]
    base_count: float | None


class SavedCounts(TypedDict):
    """Steps attempted, applied and skipped, the sums of the epoch so far, and the metrics of the last evaluation."""

    steps: Mapping[str, object]
    epoch: EpochState
    last_evaluation: dict[str, float]


class SavedPosition(TypedDict):
    """The position of the run in its data and its journal, and the bad samples found."""

    progress: dict[str, Any]
    """The fields of `RunProgress`."""
    bad_samples: list[str]
    data_fingerprint: object
    """JSON of `data.fingerprint.Fingerprint`."""
    journal_sizes: dict[str, int]


class SavedPrecision(TypedDict):
    """The precision, its islands in fp32, layers converted to fp8, and the format of trained weights if not fp32."""

    name: str
    islands: list[str]
    converted: NotRequired[dict[str, str]]
    weights: NotRequired[str]


@dataclass(frozen=True)
class State:
    """A run between two steps, as plain data and tensors; the tensors are the run's own until they are copied."""

    weights: SavedWeights
    optimizers: dict[str, dict[str, Any]]
    lr_schedulers: dict[str, dict[str, Any]]
    ema: EmaState | None
    loss_scales: dict[str, SavedLossScale]
    counts: SavedCounts
    rng: GeneratorStates
    position: SavedPosition
    guards: Mapping[str, Mapping[str, object]]
    recipe: dict[str, Any]
    precision: SavedPrecision
    auto_choices: Mapping[str, object]

    @classmethod
    def of(cls, live: RunObjects) -> State:
        """Read the state of the live objects."""
        stepper = live.parts.stepper.state_dict()
        optimizers, losses = stepper["optimizers"], stepper["losses"]
        return cls(
            weights=_collect_weights(live),
            optimizers={
                name: {**_collect_optimizer_facts(live, name), **own["optimizer"]} for name, own in optimizers.items()
            },
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
            rng=collect_rng_states(live.parts.stepper.device),
            position={
                "progress": vars(live.progress),
                "bad_samples": sorted(live.budget.bad),
                "data_fingerprint": live.data_fingerprint.as_dict(),
                "journal_sizes": live.journal_sizes(),
            },
            guards={guard.name: guard.state_dict() for guard in list_stateful_guards(live.parts.stepper)},
            recipe=live.recipe.model_dump(mode="json"),
            precision=_build_saved_precision(live, stepper),
            auto_choices=live.auto_choices.as_dict(),
        )

    def snapshot(self, attempt: int, environment: Mapping[str, object]) -> RankSnapshot:
        """Return what this rank has to write: its own tensors, its chunks of sharded ones, and on rank 0 the rest."""
        plain, rank = {}, distributed.rank()
        tensors: dict[str, Tensor] = {}
        chunks: dict[str, ChunkedTensor] = {}
        for name in COMPONENTS:
            plain[name], found = pack_state(getattr(self, name), name)
            if distributed.is_sharded(found.values()):
                chunks |= {
                    key: find_chunk_layout(key, tensor)
                    for key, tensor in found.items()
                    if distributed.is_dtensor_shard(tensor)
                }
            for key, tensor in found.items():
                if chunks[key].is_held_by(rank) if key in chunks else rank == 0 or key.startswith(OWN):
                    tensors[key] = distributed.unwrap_local_tensor(tensor) if key in chunks else tensor
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
        check_state_components(plain, where)
        return cls(**{name: unpack_state(plain[name], tensors, f"{where}, {name}") for name in COMPONENTS})


COMPONENTS = tuple(field.name for field in dataclasses.fields(State))
NO_EMA = ("ema", None)
"""The one component that a run may do without."""


def check_state_components(plain: Any, where: str) -> Mapping[str, Any]:
    """Return the JSON of a state; raise StateMismatch or BadData for missing, unknown or invalid components."""
    found = list(plain) if isinstance(plain, dict) else []
    lacks, more = [n for n in COMPONENTS if n not in found], [n for n in found if n not in COMPONENTS]
    if lacks or more:
        words = [f"lacks {', '.join(lacks)}"] if lacks else []
        words += [f"has {', '.join(map(str, more[:5]))}, which is not part of a run"] if more else []
        raise StateMismatch(
            f"{where} {' and '.join(words)}",
            allowed=", ".join(COMPONENTS),
            do=f"use another checkpoint, or {advise_new_run()}",
        )
    odd = [n for n in COMPONENTS if not isinstance(plain[n], dict) and (n, plain[n]) != NO_EMA]
    if odd:
        raise BadData(
            f"{where} is not the state of a run: {odd[0]} is a {type(plain[odd[0]]).__name__}",
            allowed="a checkpoint written by halfstep",
            do=f"use another checkpoint, or {advise_new_run()}",
        )
    checked: Mapping[str, Any] = plain
    if problem := _describe_recipe_problem(checked["recipe"]):
        raise BadData(
            f"{where} is not the state of a run: {problem}",
            allowed="a checkpoint written by halfstep",
            do=f"use another checkpoint, or {advise_new_run()}",
        )
    return checked


def _describe_recipe_problem(recipe: Mapping[str, object]) -> str:
    """Return what a saved recipe lacks of that which every resume reads; empty if it lacks nothing."""
    train = recipe.get("train")
    if not isinstance(train, dict):
        return "its recipe has no section train"
    wrong = [name for name in ("batch_size", "microbatches") if type(train.get(name)) is not int or train[name] < 1]
    return f"its recipe has no number train.{wrong[0]}" if wrong else ""


def _collect_optimizer_facts(live: RunObjects, name: str) -> dict[str, object]:
    """Return what an optimizer's state lacks: its kind, and the names of the parameters that it refers to by number."""
    optimizer = live.parts.stepper.optimizers[name]
    names = {id(parameter): name for name, parameter in live.parts.model.named_parameters()}
    groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    return {"kind": type(optimizer).__name__, "param_names": groups}


def _collect_weights(live: RunObjects) -> SavedWeights:
    model, narrow = live.parts.model, live.parts.stepper.weights
    kept = select_saved_parameters(model)
    return {
        # In fp32 in every format: `bf16-split` has the bits of fp32 weights, so a checkpoint of it fits any format.
        "parameters": kept if narrow is None else {n: p for n, p in narrow.wide_parameters().items() if n in kept},
        "buffers": dict(model.named_buffers()),
        "non_persistent_buffers": list_non_persistent_buffers(model),
        "extra_state": collect_extra_state(model),
    }


FORM = dict.fromkeys(COMPONENTS, 1) | {"optimizers": 2, "lr_schedulers": 2, "loss_scales": 2}
FORM |= {"recipe": 0, "guards": 0}
"""How many levels of each component have the same keys in every checkpoint of a run."""


@dataclass(frozen=True)
class AcceptedChanges:
    """How a run differs from the checkpoint that was restored into it, where that was accepted."""

    recipe: list[str]
    data: list[str]
    is_longer: bool
    """Whether the run is longer than when it was saved, ends later, or is warmed up again."""


@contextmanager
def _refuse_invalid_state() -> Iterator[None]:
    """Raise BadData for any error that an invalid state causes."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, HalfstepError):
            raise
        raise BadData(
            f"the checkpoint does not match this run: {type(error).__name__} {str(error)[:200]}",
            allowed="a checkpoint written by halfstep",
            do=f"use another checkpoint, or {advise_new_run()}",
        ) from error


@_refuse_invalid_state()
def restore_state(live: RunObjects, saved: State, accepted: Collection[str] = ()) -> AcceptedChanges:
    """Restore `saved` into the run; return the accepted differences. An extension alone is none.

    Raises StateMismatch where something differs that was not accepted, and BadData for an invalid state.
    """
    now = State.of(live)
    # Those of earlier versions lack the order of the samples and the guard's alarm.
    saved = replace(saved, auto_choices=AutoChoices.from_dict(saved.auto_choices).as_dict())
    changed = list_relevant_changes(saved.recipe, live.recipe)
    check_same_keys("the position", ["progress", "bad_samples", "data_fingerprint", "journal_sizes"], saved.position)
    progress = {"overflows": 0, "unproved": 0, **saved.position["progress"]}
    saved = replace(saved, position={**saved.position, "progress": progress})
    data = different(Fingerprint.from_dict(saved.position["data_fingerprint"]), live.data_fingerprint)
    if data and DATA not in accepted:
        raise _changed_data_error(data, [str(one) for one in changed if one.key in PLACES])
    recipe = [str(one) for one in _check_recipe_changes(live, saved, changed, accepted)]
    is_longer = any(one.key in LENGTH for one in changed)
    # `auto` may resolve to another precision on another device, with the same recipe.
    if RECIPE in accepted and saved.precision != now.precision:
        recipe.append(f"trained in {_describe_precision(saved.precision)} -> {_describe_precision(now.precision)}")
    if recipe:
        saved = _adapt_state(live, now, saved)
    elif EXTEND in accepted and is_longer:
        saved = replace(saved, lr_schedulers=_adapt_schedules(live, now, saved))
    if data:
        # The state without quarantined samples: their numbers belong to other samples now.
        progress = {**progress, "quarantined": [], "suspected": []}
        saved = replace(saved, position={**saved.position, "progress": progress})
    _check_precision(now, saved)
    _check_weights(live, now, saved)
    for name, levels in FORM.items():
        _require_same_form(f"{name} of the run", getattr(now, name), getattr(saved, name), levels)
    live.epoch_metrics.check_state(saved.counts["epoch"])
    check_rng_states(saved.rng, live.parts.stepper.device)
    check_same_keys("the progress", vars(live.progress), saved.position["progress"])
    _check_lr_schedulers(now, saved)
    check_guard_states(live.parts.stepper, saved.guards)
    live.parts.stepper.load_state_dict(_build_stepper_state(live, saved))  # raises before it changes anything
    _load_run_state(live, saved)
    if recipe or (EXTEND in accepted and is_longer):
        # The optimizers' saved groups hold the lr of the old schedule.
        _set_lr(live)
    return AcceptedChanges(recipe, data, is_longer)


def _check_recipe_changes(
    live: RunObjects, saved: State, changed: list[Change], accepted: Collection[str]
) -> list[Change]:
    # Contents were compared, so another path to the same files is no difference.
    if Fingerprint.from_dict(saved.position["data_fingerprint"]).of_files and live.data_fingerprint.of_files:
        changed = drop_keys(changed, PLACES)
    if EXTEND in accepted:
        changed = drop_keys(changed, LENGTH)
    if changed and RECIPE not in accepted:
        raise build_recipe_changed_error("the checkpoint", changed)
    return changed


def _changed_data_error(lines: list[str], moved: list[str]) -> StateMismatch:
    """Return the error for changed data. A mistyped folder is more likely than changed files."""
    title, back = "the data has changed since the start of the run:", "restore the data"
    if moved:
        title = "\n    ".join(["the run was started with a different data folder:", *moved, "and its contents differ:"])
        back = "give the original folder"
    return StateMismatch(
        format_change_list(title, lines),
        allowed="the same samples: position and order in them are part of the run",
        do=(
            f"{back}, {advise_adding_option('accept_data_change')} to continue with this data, or "
            f"{format_option('new')} to start again"
        ),
        id="data-changed",
    )


def _adapt_state(live: RunObjects, now: State, saved: State) -> State:
    """Return the saved state under new settings: learned values stay, settings are the new ones."""
    same = saved.precision == now.precision
    return replace(
        saved,
        optimizers={
            name: {**state, "param_groups": now.optimizers.get(name, state)["param_groups"]}
            for name, state in saved.optimizers.items()
        },
        lr_schedulers=_adapt_schedules(live, now, saved),
        ema=saved.ema and {**saved.ema, "decay": (now.ema or saved.ema)["decay"]},
        loss_scales={name: _adapt_loss_scale(own, saved.loss_scales.get(name)) for name, own in now.loss_scales.items()}
        if same
        else now.loss_scales,
        guards=reset_skip_counts(now.guards, saved.guards if same else remove_saved_remedies(saved.guards)),
        precision=now.precision,
    )


def _adapt_loss_scale(own: SavedLossScale, saved: SavedLossScale | None) -> SavedLossScale:
    """Return a loss scale with its new settings at the old one's value."""
    if saved is None or own["scale"].keys() != saved["scale"].keys():
        return own
    learned = {key: saved["scale"][key] for key in ("scale", "_growth_tracker") if key in own["scale"]}
    return {"scale": {**own["scale"], **learned}, "base_count": saved["base_count"]}


def _adapt_schedules(live: RunObjects, now: State, saved: State) -> dict[str, dict[str, Any]]:
    """Return new schedules at the old positions, with the reductions that a plateau has made since its last warm-up."""
    extensions, before = live.recipe.schedule.extensions, saved.recipe["schedule"].get("extensions") or ()
    rewarmed = any(one.rewarm for one in extensions[len(before) :])
    return {
        name: _adapt_schedule(own, saved.lr_schedulers.get(name), rewarmed) for name, own in now.lr_schedulers.items()
    }


def _adapt_schedule(own: dict[str, Any], saved: dict[str, Any] | None, rewarmed: bool) -> dict[str, Any]:
    if saved is None:
        return own
    # The evaluation at the old end is repeated, and must not cause a reduction after a new warm-up: hence -1.
    fresh = {"num_reductions": 0, "num_bad_evaluations": -1}
    shapes = [
        {**mine, **{key: fresh[key] if rewarmed else theirs[key] for key in fresh if key in mine and key in theirs}}
        for mine, theirs in zip(own["lr_lambdas"], saved["lr_lambdas"], strict=False)
    ]
    return {**own, "lr_lambdas": shapes, "last_epoch": saved["last_epoch"], "_step_count": saved["_step_count"]}


def _check_precision(now: State, saved: State) -> None:
    if saved.precision != now.precision:
        raise StateMismatch(
            f"the run was trained in {_describe_precision(saved.precision)}",
            allowed=f"{_describe_precision(now.precision)}, as it would be now",
            do=(
                f"run it on the original device, {advise_adding_option('accept_recipe_change')}, or "
                f"{format_option('new')}"
            ),
        )


def _build_saved_precision(live: RunObjects, stepper: Mapping[str, Any]) -> SavedPrecision:
    found: SavedPrecision = {"name": stepper["precision"], "islands": sorted(find_islands(live.parts.model))}
    if "converted" in stepper:
        found["converted"] = stepper["converted"]
    if (weights := live.parts.stepper.weights) is not None:
        found["weights"] = weights.format
    return found


def _describe_precision(precision: SavedPrecision) -> str:
    in_fp32 = ", ".join(precision.get("islands", ()))
    in_fp8, weights = precision.get("converted", {}), precision.get("weights")
    named = f"{precision.get('name')}{f' with weights as {weights}' if weights else ''}"
    converted = f", {len(in_fp8)} layers in {', '.join(sorted(set(in_fp8.values())))}" if in_fp8 else ""
    return f"{named}{f' with {in_fp32} in fp32' if in_fp32 else ''}{converted}"


def _check_weights(live: RunObjects, now: State, saved: State) -> None:
    check_same_keys("the model", now.weights, saved.weights)
    lines = list(_describe_unfitting_tensors(now.weights["parameters"], saved.weights["parameters"], set()))
    # Non-persistent buffers may grow with the longest batch: their shapes are not compared.
    free = select_assignable_buffers(live.parts.model, saved.weights["non_persistent_buffers"])
    then = {name: buffer for name, buffer in saved.weights["buffers"].items() if name not in free}
    own = {name: buffer for name, buffer in now.weights["buffers"].items() if name not in free}
    lines += _describe_unfitting_tensors(own, then, find_empty_buffers(live.parts.model))
    extra, then_extra = now.weights["extra_state"], saved.weights["extra_state"]
    lines += [f"not in the model: {name}" for name in then_extra if name not in extra]
    lines += [f"not in the checkpoint: {name}" for name in extra if name not in then_extra]
    if (now.ema is None) != (saved.ema is None):
        lines.append(
            "the run kept an average of the weights, and does not now" if saved.ema else "the run kept no average"
        )
    moved = [f"optimizer {line}" for name in now.optimizers for line in _compare_optimizers(now, saved, name)]
    if lines or moved:
        restored = "the model" if lines else "the optimizer, or the version of halfstep that saved the run"
        raise StateMismatch(
            format_change_list(
                f"the checkpoint does not fit the {'model' if lines else 'optimizer'}:", [*lines, *moved]
            ),
            allowed=f"the original model; this one has {len(now.weights['parameters'])} parameters"
            if lines
            else "the same parameters in the same groups: each group has its own moments",
            do=f"restore {restored}, or {advise_adding_option('new')}; model.weights=FILE loads the weights that fit",
        )


def _describe_unfitting_tensors(
    own: Mapping[str, Tensor], saved: Mapping[str, Tensor], free: Collection[str]
) -> Iterator[str]:
    """Yield a line for each difference; names in `free` are buffers that exist but hold no tensor yet."""
    yield from (f"not in the checkpoint: {name}" for name in own if name not in saved)
    yield from (f"not in the model: {name}" for name in saved if name not in own and name not in free)
    for name, tensor in own.items():
        if name in saved and (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            yield f"{name} was {_format_shape_and_dtype(saved[name])}, and is {_format_shape_and_dtype(tensor)}"


def _format_shape_and_dtype(tensor: Tensor) -> str:
    return f"{numbers.format_shape(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"


def _compare_optimizers(now: State, saved: State, optimizer: str) -> Iterator[str]:
    own, then = now.optimizers[optimizer], saved.optimizers.get(optimizer, {})
    if own["kind"] != then.get("kind"):
        yield f"was {then.get('kind')}, and is {own['kind']}"
    before, after = ([name for group in one.get("param_names", []) for name in group] for one in (then, own))
    yield from (f"trained {name}, and does not" for name in before if name not in after)
    yield from (f"did not train {name}, and does" for name in after if name not in before)
    if sorted(before) == sorted(after) and own["param_names"] != then.get("param_names"):
        # torch matches optimizer state by position: another order would mix up the moments silently.
        here, there = (_find_group_numbers(one["param_names"]) for one in (own, then))
        moved = [name for name in after if here[name] != there[name]]
        yield from (f"had {name} in group {there[name]}, and has it in {here[name]}" for name in moved)
        if not moved:
            yield "has its parameters in another order"


def _find_group_numbers(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the number of each parameter's group."""
    return {name: number for number, group in enumerate(groups) for name in group}


def _require_same_form(what: str, own: Any, saved: Any, levels: int) -> None:
    if not isinstance(own, Mapping) or not isinstance(saved, Mapping):
        check_same_keys(what, [type(own).__name__], [type(saved).__name__])
    elif levels > 0:
        check_same_keys(what, own, saved)
        for key in own:
            if levels > 1:
                _require_same_form(f"{what}, {key}", own[key], saved[key], levels - 1)


def _check_lr_schedulers(now: State, saved: State) -> None:
    """Raise StateMismatch for a schedule of another kind: it would accept the state and follow its own curve."""
    for name, own in now.lr_schedulers.items():
        shapes, then = (own or {}).get("lr_lambdas", ()), saved.lr_schedulers[name]["lr_lambdas"]
        for mine, theirs in zip(shapes, then, strict=False):
            _require_same_form(f"the schedule of {name}", mine, theirs, 1)


def _build_stepper_state(live: RunObjects, saved: State) -> dict[str, Any]:
    stepper = live.parts.stepper.state_dict()
    now = stepper["optimizers"]
    optimizers = {
        name: {
            "kind": optimizer["kind"],
            "optimizer": {key: value for key, value in optimizer.items() if key != "kind"},
            # The trainer always uses the same kind of schedule; its shape was compared above.
            "schedule_kind": now[name]["schedule_kind"],
            "schedule": saved.lr_schedulers.get(name),
        }
        for name, optimizer in saved.optimizers.items()
    }
    losses = {
        name: {"loss_scale": loss["scale"], "base_count": loss["base_count"]}
        for name, loss in saved.loss_scales.items()
    }
    rest = {"precision": saved.precision["name"], "counts": saved.counts["steps"], "ema": saved.ema}
    rest |= {"converted": saved.precision["converted"]} if "converted" in saved.precision else {}
    # The low bits are set together with the weights.
    narrow = {"weights": stepper["weights"]} if "weights" in stepper else {}
    return {**rest, **narrow, "optimizers": optimizers, "losses": losses}


def _load_run_state(live: RunObjects, saved: State) -> None:
    _load_weights(live, saved)
    live.epoch_metrics.load_state_dict(saved.counts["epoch"])
    live.last_evaluation.update(saved.counts["last_evaluation"])
    vars(live.progress).update(saved.position["progress"])
    live.samples.quarantined = set(live.progress.quarantined)
    live.budget.bad = set(saved.position["bad_samples"])
    load_guard_states(live.parts.stepper, saved.guards)
    # Last: nothing after this may draw random numbers.
    restore_rng_states(saved.rng, live.parts.stepper.device)


@torch.no_grad()
def _load_weights(live: RunObjects, saved: State) -> None:
    model, narrow = live.parts.model, live.parts.stepper.weights
    for name, parameter in select_saved_parameters(model).items():
        # In place: the optimizer holds references to these parameters.
        if narrow is None:
            parameter.copy_(saved.weights["parameters"][name])
        else:
            narrow.put(parameter, saved.weights["parameters"][name])
    buffers = {name: value.to(live.parts.stepper.device) for name, value in saved.weights["buffers"].items()}
    put_buffers(model, buffers, saved.weights["non_persistent_buffers"])
    if saved.weights["extra_state"]:
        # Parameters and buffers are missing from it on purpose.
        model.load_state_dict(saved.weights["extra_state"], strict=False)


def _set_lr(live: RunObjects) -> None:
    """Set the learning rate to the schedule's present value; it differs where the schedule was changed."""
    schedule: Any = live.parts.schedule
    for group, shape, base in zip(
        live.parts.optimizer.param_groups, schedule.lr_lambdas, schedule.base_lrs, strict=True
    ):
        group["lr"] = base * shape(schedule.last_epoch)
