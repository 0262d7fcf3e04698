"""A saved state put back into a run: all of it is compared first, and nothing is changed where it differs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import BadData, HalfstepError, StateMismatch, same_keys
from halfstep.train.data.changes import different
from halfstep.train.data.fingerprint import Fingerprint
from halfstep.train.fleeting import put_buffers, with_a_place
from halfstep.train.guards_state import check_guards, forgiven, put_guards, without_cures
from halfstep.train.randomness import check_generators, set_generators
from halfstep.train.recipe.changes import DATA, RECIPE, but_for_places, changes, listed, recipe_changed
from halfstep.train.state import COMPONENTS, Live, State

FORM = dict.fromkeys(COMPONENTS, 1) | {"optimizers": 2, "schedules": 2, "loss_scales": 2}
FORM |= {"recipe": 0, "guards": 0}
"""How many levels of each component have the same keys in every checkpoint of a run."""


@contextmanager
def _of_a_run() -> Iterator[None]:
    """A state that was made up ends in whatever stumbles over it, which is then told as what it is."""
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


@_of_a_run()
def restore(live: Live, saved: State, accepted: Collection[str] = ()) -> list[str]:
    """Go on from `saved`; lines for what is different and was accepted."""
    now = State.of(live)
    data = _data_changes(live, saved, accepted)
    recipe = _recipe_changes(live, saved, accepted)
    if RECIPE in accepted and saved.precision != now.precision:
        recipe.append(f"trained in {_in_words(saved.precision)} -> {_in_words(now.precision)}")
    if recipe:
        saved = _adapted(now, saved)
    if data:
        saved = _with_other_data(saved)
    _check_precision(now, saved)
    _check_weights(live, now, saved)
    _check_form(now, saved)
    _check_rest(live, saved)
    live.parts.stepper.load_state_dict(_of_stepper(saved))  # refuses before it changes anything
    _put(live, saved)
    if recipe:
        _set_rates(live)
    return [*recipe, *data]


# -- what may be accepted ---------------------------------------------------------------------------------------------


def _recipe_changes(live: Live, saved: State, accepted: Collection[str]) -> list[str]:
    lines = changes(saved.recipe, live.recipe)
    if _are_files(saved.cursor["data"]) and _are_files(live.data):
        lines = but_for_places(lines)
    if lines and RECIPE not in accepted:
        raise recipe_changed("the checkpoint", lines)
    return lines


def _are_files(data: Mapping[str, Any]) -> bool:
    """Whether the contents of the data were compared; of a source that names no files, only the names were."""
    return all(part.of == "file" for part in Fingerprint.from_dict(data).parts)


def _data_changes(live: Live, saved: State, accepted: Collection[str]) -> list[str]:
    same_keys("the place in the data", ["progress", "bad", "data", "journal"], saved.cursor)
    lines = different(Fingerprint.from_dict(saved.cursor["data"]), Fingerprint.from_dict(live.data))
    if lines and DATA not in accepted:
        raise StateMismatch(
            listed("the data is not what it was when the run began:", lines),
            allowed="the same samples: position and order in them are part of the run",
            do="bring the data back, add --accept-data-change to go on with it as it is, or --new to begin again",
        )
    return lines


def _with_other_data(saved: State) -> State:
    """Samples were set aside by their numbers, and these are other samples' now."""
    progress = {**saved.cursor["progress"], "quarantined": [], "suspected": []}
    return replace(saved, cursor={**saved.cursor, "progress": progress})


def _adapted(now: State, saved: State) -> State:
    """The saved state under new settings: what was learnt stays, what was set is set anew."""
    same = saved.precision == now.precision
    return replace(
        saved,
        optimizers={
            name: {**state, "param_groups": now.optimizers.get(name, state)["param_groups"]}
            for name, state in saved.optimizers.items()
        },
        schedules={name: _moved_on(own, saved.schedules.get(name)) for name, own in now.schedules.items()},
        average=saved.average and {**saved.average, "decay": (now.average or saved.average)["decay"]},
        loss_scales={name: _scaled_on(own, saved.loss_scales.get(name)) for name, own in now.loss_scales.items()}
        if same
        else now.loss_scales,
        guards=forgiven(now.guards, saved.guards if same else without_cures(saved.guards)),
        precision=now.precision,
    )


def _scaled_on(own: dict[str, Any], saved: dict[str, Any] | None) -> dict[str, Any]:
    """A loss scale with its new settings, where the old one had got to."""
    if saved is None or own["scale"].keys() != saved["scale"].keys():
        return own
    kept = {key: saved["scale"][key] for key in ("scale", "_growth_tracker") if key in own["scale"]}
    return {"scale": {**own["scale"], **kept}, "base_count": saved["base_count"]}


def _moved_on(own: dict[str, Any], saved: dict[str, Any] | None) -> dict[str, Any]:
    """A new schedule at the place of the old one, with the cuts that a plateau has made."""
    if saved is None:
        return own
    kept = ("cuts", "waited")
    shapes = [
        {**mine, **{key: theirs[key] for key in kept if key in mine and key in theirs}}
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
    kept = ", ".join(precision.get("islands", ()))
    return f"{precision.get('name')}{f' with {kept} in fp32' if kept else ''}"


def _check_weights(live: Live, now: State, saved: State) -> None:
    same_keys("the model", now.weights, saved.weights)
    lines = list(_unfitting(now.weights["parameters"], saved.weights["parameters"], set()))
    free = with_a_place(live.parts.model, saved.weights["fleeting"])
    kept = {name: buffer for name, buffer in saved.weights["buffers"].items() if name not in free}
    own = {name: buffer for name, buffer in now.weights["buffers"].items() if name not in free}
    lines += _unfitting(own, kept, _empty_buffers(live.parts.model))
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
    """Lines for what is in one only, or is another there; names in `free` have a place, and nothing in it yet."""
    yield from (f"not in the checkpoint: {name}" for name in own if name not in saved)
    yield from (f"not in the model: {name}" for name in saved if name not in own and name not in free)
    for name, tensor in own.items():
        if name in saved and (saved[name].shape, saved[name].dtype) != (tensor.shape, tensor.dtype):
            yield f"{name} was {_facts(saved[name])}, and is {_facts(tensor)}"


def _empty_buffers(model: nn.Module) -> set[str]:
    """Buffers that get their tensors with the first batch."""
    slots = ((f"{path}." if path else "", module._buffers) for path, module in model.named_modules())
    return {path + name for path, buffers in slots for name, buffer in buffers.items() if buffer is None}


def _facts(tensor: Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape)) or 'one number'} in {str(tensor.dtype).removeprefix('torch.')}"


def _other_optimizer(now: State, saved: State, lane: str) -> Iterator[str]:
    own, then = now.optimizers[lane], saved.optimizers.get(lane, {})
    if own["kind"] != then.get("kind"):
        yield f"was {then.get('kind')}, and is {own['kind']}"
    before, after = ([name for group in one.get("names", []) for name in group] for one in (then, own))
    yield from (f"trained {name}, and does not" for name in before if name not in after)
    yield from (f"did not train {name}, and does" for name in after if name not in before)
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


def _check_rest(live: Live, saved: State) -> None:
    live.tally.check_state(saved.counts["epoch"])
    check_generators(saved.random, live.parts.stepper.device)
    same_keys("the progress", vars(live.progress), saved.cursor["progress"])
    _check_shapes_of_schedules(live, saved)
    check_guards(live.parts.stepper, saved.guards)


def _check_shapes_of_schedules(live: Live, saved: State) -> None:
    """A schedule of another kind would take what it is given, and go its own way."""
    for name, own in State.of(live).schedules.items():
        for mine, theirs in zip((own or {}).get("lr_lambdas", ()), saved.schedules[name]["lr_lambdas"], strict=False):
            _same_form(f"the schedule of {name}", mine, theirs, 1)


# -- putting it back --------------------------------------------------------------------------------------------------


def _of_stepper(saved: State) -> dict[str, Any]:
    lanes = {
        name: {
            "optimizer": {key: value for key, value in optimizer.items() if key != "kind"},
            "schedule": saved.schedules.get(name),
            "loss_scale": saved.loss_scales[name]["scale"],
            "base_count": saved.loss_scales[name]["base_count"],
        }
        for name, optimizer in saved.optimizers.items()
    }
    name = saved.precision["name"]
    return {"precision": name, "counts": saved.counts["steps"], "ema": saved.average, "lanes": lanes}


def _put(live: Live, saved: State) -> None:
    _put_weights(live, saved)
    live.tally.load_state_dict(saved.counts["epoch"])
    live.latest.update(saved.counts["latest"])
    vars(live.progress).update(saved.cursor["progress"])
    live.samples.quarantined = set(live.progress.quarantined)
    live.budget.bad = set(saved.cursor["bad"])
    put_guards(live.parts.stepper, saved.guards)
    set_generators(saved.random, live.parts.stepper.device)


@torch.no_grad()
def _put_weights(live: Live, saved: State) -> None:
    model = live.parts.model
    for name, parameter in model.named_parameters():
        parameter.copy_(saved.weights["parameters"][name])
    buffers = {name: value.to(live.parts.stepper.device) for name, value in saved.weights["buffers"].items()}
    put_buffers(model, buffers, saved.weights["fleeting"])
    if saved.weights["more"]:
        model.load_state_dict(saved.weights["more"], strict=False)


def _set_rates(live: Live) -> None:
    """The learning rate where the schedule is now; a schedule that was changed on the way says another one."""
    schedule: Any = live.parts.schedule
    for group, shape, base in zip(
        live.parts.optimizer.param_groups, schedule.lr_lambdas, schedule.base_lrs, strict=True
    ):
        group["lr"] = base * shape(schedule.last_epoch)
