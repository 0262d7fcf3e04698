"""Define everything that the next step of a run depends on, and restore it: the fields of `State` are the checkpoint.

A saved state is compared with the run first, all of it; nothing changes where it differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import distributed
from halfstep.checkpoint.commit import RankSnapshot
from halfstep.checkpoint.packing import pack, unpack
from halfstep.data.dataset import BadSampleBudget, Samples
from halfstep.data.fingerprint import Fingerprint, different
from halfstep.errors import BadData, HalfstepError, StateMismatch, same_keys
from halfstep.precision.island import islands
from halfstep.recipe.changes import (
    DATA,
    EXTEND,
    RECIPE,
    but_for_length,
    but_for_places,
    changes,
    listed,
    only_places,
    recipe_changed,
)
from halfstep.train.environment import AutoChoices, check_generators, read_generators, set_generators
from halfstep.train.epoch_metrics import EpochMetrics, Progress
from halfstep.train.guarding import check_guards, put_guards, stateful, with_counts_reset, without_remedies
from halfstep.train.setup import AnyRecipe, Parts
from halfstep.train.weights import assignable_buffers, non_persistent_buffers, put_buffers

OWN = ("weights/buffers/", "weights/more/", "average/buffers/", "random/", "counts/epoch/metrics/")
"""Tensors that differ between ranks; rank 0 writes the others for all."""
FINITE, NOT_NAN = ("weights/parameters/", "average/averages/"), ("weights/buffers/", "average/buffers/")
"""Tensors that must be finite in a checkpoint, and those in which an infinity may be intended."""

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
    measured: AutoChoices
    data: Mapping[str, Any]
    """The fingerprint of the data when the run began; see `data.fingerprint`."""
    latest: dict[str, float]
    """The metrics of the last evaluation."""
    journal: Callable[[], dict[str, int]]
    """Returns the sizes of the run's journal files."""


@dataclass(frozen=True)
class State:
    """A run between two steps, as plain data and tensors; the tensors are the run's own until they are copied."""

    weights: dict[str, Any]
    """Parameters and buffers, including non-persistent buffers."""
    optimizers: dict[str, Any]
    schedules: dict[str, Any]
    average: dict[str, Any] | None
    loss_scales: dict[str, Any]
    """The loss scales, and N0, the divisor of summed losses."""
    counts: dict[str, Any]
    """Steps attempted, applied and skipped, and the sums of the epoch so far."""
    random: dict[str, Any]
    cursor: dict[str, Any]
    """The position of the run in its data and its journal, and the bad samples found."""
    guards: dict[str, Any]
    recipe: dict[str, Any]
    precision: dict[str, Any]
    measured: dict[str, Any]

    @classmethod
    def of(cls, live: RunObjects) -> State:
        """Read the state of the live objects."""
        stepper = live.parts.stepper.state_dict()
        optimizers, losses = stepper["optimizers"], stepper["losses"]
        return cls(
            weights=_weights(live),
            optimizers={name: {**_optimizer_facts(live, name), **own["optimizer"]} for name, own in optimizers.items()},
            schedules={name: own["schedule"] for name, own in optimizers.items()},
            average=stepper["ema"],
            loss_scales={
                name: {"scale": loss["loss_scale"], "base_count": loss["base_count"]} for name, loss in losses.items()
            },
            counts={"steps": stepper["counts"], "epoch": live.epoch_metrics.state_dict(), "latest": dict(live.latest)},
            random=read_generators(live.parts.stepper.device),
            cursor={
                "progress": vars(live.progress),
                "bad": sorted(live.budget.bad),
                "data": dict(live.data),
                "journal": live.journal(),
            },
            guards={guard.name: guard.state_dict() for guard in stateful(live.parts.stepper)},
            recipe=live.recipe.model_dump(mode="json"),
            precision={"name": stepper["precision"], "islands": sorted(islands(live.parts.model))},
            measured=live.measured.as_dict(),
        )

    def snapshot(self, attempt: int, environment: Mapping[str, Any]) -> RankSnapshot:
        """Return what this rank has to write."""
        plain, tensors = {}, {}
        for name in COMPONENTS:
            plain[name], found = pack(getattr(self, name), name)
            tensors.update(
                {key: tensor for key, tensor in found.items() if distributed.rank() == 0 or key.startswith(OWN)}
            )
        return RankSnapshot(
            attempt,
            plain,
            tensors,
            finite=[key for key in tensors if key.startswith(FINITE)],
            not_nan=[key for key in tensors if key.startswith(NOT_NAN)],
            environment=environment,
        )

    @classmethod
    def from_parts(cls, plain: Any, tensors: Mapping[str, Tensor], where: str) -> State:
        """Return the state that `snapshot` wrote; raise StateMismatch or BadData for missing or unknown components."""
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
        odd = [n for n in COMPONENTS if not isinstance(plain[n], dict) and (n, plain[n]) != NO_AVERAGE]
        if odd:
            raise BadData(
                f"{where} is not the state of a run: {odd[0]} is a {type(plain[odd[0]]).__name__}",
                allowed="what halfstep wrote",
                do="use another checkpoint, or add --new to begin again in a folder of its own",
            )
        return cls(**{name: unpack(plain[name], tensors, f"{where}, {name}") for name in COMPONENTS})


COMPONENTS = tuple(field.name for field in dataclasses.fields(State))
NO_AVERAGE = ("average", None)
"""The one component that a run may do without."""


def _optimizer_facts(live: RunObjects, name: str) -> dict[str, Any]:
    """Return what an optimizer's state lacks: its kind, and the names of the parameters that it refers to by number."""
    optimizer = live.parts.stepper.optimizers[name]
    names = {id(parameter): name for name, parameter in live.parts.model.named_parameters()}
    groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    return {"kind": type(optimizer).__name__, "names": groups}


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
        "fleeting": non_persistent_buffers(model),
        "more": _extra_state(model),
    }


# -- restore ----------------------------------------------------------------------------------------------------------


FORM = dict.fromkeys(COMPONENTS, 1) | {"optimizers": 2, "schedules": 2, "loss_scales": 2}
FORM |= {"recipe": 0, "guards": 0}
"""How many levels of each component have the same keys in every checkpoint of a run."""


@contextmanager
def _refusing_invalid() -> Iterator[None]:
    """Raise BadData for any error that an invalid state causes."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, HalfstepError):
            raise
        raise BadData(
            f"the checkpoint holds what is no state of this run: {type(error).__name__} {str(error)[:200]}",
            allowed="what halfstep wrote",
            do="use another checkpoint, or add --new to begin again in a folder of its own",
        ) from error


@_refusing_invalid()
def restore(live: RunObjects, saved: State, accepted: Collection[str] = ()) -> list[str]:
    """Restore `saved` into the run; return a line for each accepted difference. An extension alone is none.

    Raises StateMismatch where something differs that was not accepted, and BadData for an invalid state.
    """
    now = State.of(live)
    data = _data_changes(live, saved, accepted)
    recipe = _recipe_changes(live, saved, accepted)
    longer = EXTEND in accepted and lengthened(live, saved)
    # `auto` may resolve to another precision on another device, with the same recipe.
    if RECIPE in accepted and saved.precision != now.precision:
        recipe.append(f"trained in {_in_words(saved.precision)} -> {_in_words(now.precision)}")
    if recipe:
        saved = _adapted(live, now, saved)
    elif longer:
        saved = replace(saved, schedules=_moved_schedules(live, now, saved))
    if data:
        saved = _with_other_data(saved)
    _check_precision(now, saved)
    _check_weights(live, now, saved)
    _check_form(now, saved)
    _check_rest(live, now, saved)
    live.parts.stepper.load_state_dict(_of_stepper(live, saved))  # raises before it changes anything
    _put(live, saved)
    if recipe or longer:
        # The optimizers' saved groups hold the lr of the old schedule.
        _set_lr(live)
    return [*recipe, *data]


def lengthened(live: RunObjects, saved: State) -> bool:
    """Return whether the run is longer than when it was saved, ends later, or is warmed up again."""
    lines = changes(saved.recipe, live.recipe)
    return len(but_for_length(lines)) < len(lines)


# -- what may be accepted ---------------------------------------------------------------------------------------------


def _recipe_changes(live: RunObjects, saved: State, accepted: Collection[str]) -> list[str]:
    lines = changes(saved.recipe, live.recipe)
    # Contents were compared, so another path to the same files is no difference.
    if _are_files(saved.cursor["data"]) and _are_files(live.data):
        lines = but_for_places(lines)
    if EXTEND in accepted:
        lines = but_for_length(lines)
    if lines and RECIPE not in accepted:
        raise recipe_changed("the checkpoint", lines)
    return lines


def _are_files(data: Mapping[str, Any]) -> bool:
    """Return whether file contents were compared; sources without files are compared by sample names only."""
    return all(part.of == "file" for part in Fingerprint.from_dict(data).parts)


def _data_changes(live: RunObjects, saved: State, accepted: Collection[str]) -> list[str]:
    same_keys("the place in the data", ["progress", "bad", "data", "journal"], saved.cursor)
    lines = different(Fingerprint.from_dict(saved.cursor["data"]), Fingerprint.from_dict(live.data))
    if lines and DATA not in accepted:
        raise _other_data(lines, only_places(changes(saved.recipe, live.recipe)))
    return lines


def _other_data(lines: list[str], moved: list[str]) -> StateMismatch:
    """Return the error for changed data. A mistyped folder is more likely than changed files."""
    title, back = "the data is not what it was when the run began:", "bring the data back"
    if moved:
        title = "\n    ".join(["the run was begun on another data folder:", *moved, "and what is there differs:"])
        back = "give the folder that the run was begun with"
    return StateMismatch(
        listed(title, lines),
        allowed="the same samples: position and order in them are part of the run",
        do=f"{back}, add --accept-data-change to go on with this data, or --new to begin again",
    )


def _with_other_data(saved: State) -> State:
    """Return the state without quarantined samples: their numbers belong to other samples now."""
    progress = {**saved.cursor["progress"], "quarantined": [], "suspected": []}
    return replace(saved, cursor={**saved.cursor, "progress": progress})


def _adapted(live: RunObjects, now: State, saved: State) -> State:
    """Return the saved state under new settings: learned values stay, settings are the new ones."""
    same = saved.precision == now.precision
    return replace(
        saved,
        optimizers={
            name: {**state, "param_groups": now.optimizers.get(name, state)["param_groups"]}
            for name, state in saved.optimizers.items()
        },
        schedules=_moved_schedules(live, now, saved),
        average=saved.average and {**saved.average, "decay": (now.average or saved.average)["decay"]},
        loss_scales={name: _scaled_on(own, saved.loss_scales.get(name)) for name, own in now.loss_scales.items()}
        if same
        else now.loss_scales,
        guards=with_counts_reset(now.guards, saved.guards if same else without_remedies(saved.guards)),
        precision=now.precision,
    )


def _scaled_on(own: dict[str, Any], saved: dict[str, Any] | None) -> dict[str, Any]:
    """Return a loss scale with its new settings at the old one's value."""
    if saved is None or own["scale"].keys() != saved["scale"].keys():
        return own
    learned = {key: saved["scale"][key] for key in ("scale", "_growth_tracker") if key in own["scale"]}
    return {"scale": {**own["scale"], **learned}, "base_count": saved["base_count"]}


def _moved_schedules(live: RunObjects, now: State, saved: State) -> dict[str, Any]:
    """Return new schedules at the old positions, with the cuts that a plateau has made since its last warm-up."""
    extensions, before = live.recipe.schedule.extensions, saved.recipe["schedule"].get("extensions") or ()
    warmed_again = any(one.rewarm for one in extensions[len(before) :])
    return {name: _moved_on(own, saved.schedules.get(name), warmed_again) for name, own in now.schedules.items()}


def _moved_on(own: dict[str, Any], saved: dict[str, Any] | None, warmed_again: bool) -> dict[str, Any]:
    if saved is None:
        return own
    # The evaluation at the old end is repeated, and must not cause a cut after a new warm-up: hence -1.
    fresh = {"cuts": 0, "waited": -1}
    shapes = [
        {**mine, **{key: fresh[key] if warmed_again else theirs[key] for key in fresh if key in mine and key in theirs}}
        for mine, theirs in zip(own["lr_lambdas"], saved["lr_lambdas"], strict=False)
    ]
    return {**own, "lr_lambdas": shapes, "last_epoch": saved["last_epoch"], "_step_count": saved["_step_count"]}


# -- what must fit ----------------------------------------------------------------------------------------------------


def _check_precision(now: State, saved: State) -> None:
    if saved.precision != now.precision:
        raise StateMismatch(
            f"the run was trained in {_in_words(saved.precision)}",
            allowed=f"{_in_words(now.precision)}, as it would be now",
            do="run it on the device it was begun on, add --accept-recipe-change, or --new for a folder of its own",
        )


def _in_words(precision: Mapping[str, Any]) -> str:
    in_fp32 = ", ".join(precision.get("islands", ()))
    return f"{precision.get('name')}{f' with {in_fp32} in fp32' if in_fp32 else ''}"


def _check_weights(live: RunObjects, now: State, saved: State) -> None:
    same_keys("the model", now.weights, saved.weights)
    lines = list(_unfitting(now.weights["parameters"], saved.weights["parameters"], set()))
    # Non-persistent buffers may grow with the longest batch: their shapes are not compared.
    free = assignable_buffers(live.parts.model, saved.weights["fleeting"])
    then = {name: buffer for name, buffer in saved.weights["buffers"].items() if name not in free}
    own = {name: buffer for name, buffer in now.weights["buffers"].items() if name not in free}
    lines += _unfitting(own, then, _empty_buffers(live.parts.model))
    lines += [f"not in the model: {name}" for name in saved.weights["more"] if name not in now.weights["more"]]
    lines += [f"not in the checkpoint: {name}" for name in now.weights["more"] if name not in saved.weights["more"]]
    if (now.average is None) != (saved.average is None):
        lines.append("an average of the weights was kept, and is not" if saved.average else "no average was kept")
    lines += [f"optimizer {line}" for name in now.optimizers for line in _other_optimizer(now, saved, name)]
    if lines:
        raise StateMismatch(
            listed("the checkpoint does not fit the model:", lines),
            allowed=f"the model as it was; this one has {len(now.weights['parameters'])} parameters",
            do="bring the model back, or add --new for a run of its own (model.weights=FILE takes weights that fit)",
        )


def _unfitting(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], free: Collection[str]) -> Iterator[str]:
    """Yield a line for each difference; names in `free` are buffers that exist but hold no tensor yet."""
    yield from (f"not in the checkpoint: {name}" for name in own if name not in saved)
    yield from (f"not in the model: {name}" for name in saved if name not in own and name not in free)
    for name, tensor in own.items():
        if name in saved and (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            yield f"{name} was {_facts(saved[name])}, and is {_facts(tensor)}"


def _empty_buffers(model: nn.Module) -> set[str]:
    """Return the buffers that get their tensors with the first batch."""
    slots = ((f"{path}." if path else "", module._buffers) for path, module in model.named_modules())
    return {path + name for path, buffers in slots for name, buffer in buffers.items() if buffer is None}


def _facts(tensor: Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape)) or 'one number'} in {str(tensor.dtype).removeprefix('torch.')}"


def _other_optimizer(now: State, saved: State, optimizer: str) -> Iterator[str]:
    own, then = now.optimizers[optimizer], saved.optimizers.get(optimizer, {})
    if own["kind"] != then.get("kind"):
        yield f"was {then.get('kind')}, and is {own['kind']}"
    before, after = ([name for group in one.get("names", []) for name in group] for one in (then, own))
    yield from (f"trained {name}, and does not" for name in before if name not in after)
    yield from (f"did not train {name}, and does" for name in after if name not in before)
    # torch matches optimizer state by position: another order would mix up the moments silently.
    if sorted(before) == sorted(after) and own["names"] != then.get("names"):
        yield "has its parameters in other groups, or in another order"


def _check_form(now: State, saved: State) -> None:
    for name, levels in FORM.items():
        _same_form(f"{name} of the run", getattr(now, name), getattr(saved, name), levels)


def _same_form(what: str, own: Any, saved: Any, levels: int) -> None:
    if not isinstance(own, Mapping) or not isinstance(saved, Mapping):
        same_keys(what, [type(own).__name__], [type(saved).__name__])
    elif levels > 0:
        same_keys(what, own, saved)
        for key in own:
            if levels > 1:
                _same_form(f"{what}, {key}", own[key], saved[key], levels - 1)


def _check_rest(live: RunObjects, now: State, saved: State) -> None:
    live.epoch_metrics.check_state(saved.counts["epoch"])
    check_generators(saved.random, live.parts.stepper.device)
    same_keys("the progress", vars(live.progress), saved.cursor["progress"])
    _check_schedules(now, saved)
    check_guards(live.parts.stepper, saved.guards)


def _check_schedules(now: State, saved: State) -> None:
    """Raise StateMismatch for a schedule of another kind: it would accept the state and follow its own curve."""
    for name, own in now.schedules.items():
        for mine, theirs in zip((own or {}).get("lr_lambdas", ()), saved.schedules[name]["lr_lambdas"], strict=False):
            _same_form(f"the schedule of {name}", mine, theirs, 1)


# -- putting it back --------------------------------------------------------------------------------------------------


def _of_stepper(live: RunObjects, saved: State) -> dict[str, Any]:
    now = live.parts.stepper.state_dict()["optimizers"]
    optimizers = {
        name: {
            "kind": optimizer["kind"],
            "optimizer": {key: value for key, value in optimizer.items() if key != "kind"},
            # The trainer always uses the same kind of schedule; its shape was compared above.
            "schedule_kind": now[name]["schedule_kind"],
            "schedule": saved.schedules.get(name),
        }
        for name, optimizer in saved.optimizers.items()
    }
    losses = {
        name: {"loss_scale": loss["scale"], "base_count": loss["base_count"]}
        for name, loss in saved.loss_scales.items()
    }
    rest = {"precision": saved.precision["name"], "counts": saved.counts["steps"], "ema": saved.average}
    return {**rest, "optimizers": optimizers, "losses": losses}


def _put(live: RunObjects, saved: State) -> None:
    _put_weights(live, saved)
    live.epoch_metrics.load_state_dict(saved.counts["epoch"])
    live.latest.update(saved.counts["latest"])
    vars(live.progress).update(saved.cursor["progress"])
    live.samples.quarantined = set(live.progress.quarantined)
    live.budget.bad = set(saved.cursor["bad"])
    put_guards(live.parts.stepper, saved.guards)
    # Last: nothing after this may draw random numbers.
    set_generators(saved.random, live.parts.stepper.device)


@torch.no_grad()
def _put_weights(live: RunObjects, saved: State) -> None:
    model = live.parts.model
    for name, parameter in model.named_parameters():
        # In place: the optimizer holds references to these parameters.
        parameter.copy_(saved.weights["parameters"][name])
    buffers = {name: value.to(live.parts.stepper.device) for name, value in saved.weights["buffers"].items()}
    put_buffers(model, buffers, saved.weights["fleeting"])
    if saved.weights["more"]:
        # "more" holds extra state only, so parameters are missing from it on purpose.
        model.load_state_dict(saved.weights["more"], strict=False)


def _set_lr(live: RunObjects) -> None:
    """Set the learning rate to the schedule's present value; it differs where the schedule was changed."""
    schedule: Any = live.parts.schedule
    for group, shape, base in zip(
        live.parts.optimizer.param_groups, schedule.lr_lambdas, schedule.base_lrs, strict=True
    ):
        group["lr"] = base * shape(schedule.last_epoch)
