"""Resolve a recipe with the schema and the sizing rules of its task, and check it before torch is loaded.

A mistyped setting is thus reported at once. Only `sizing: auto` asks torch for the device, after all other checks.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfstep.data.layout import SEGMENTATION, check_store_data, find_layout, is_store_address, resolve_data_path
from halfstep.errors import (
    BadData,
    BadRecipe,
    Contradiction,
    HalfstepError,
    WrongUse,
    advise_adding_option,
    check_packages_installed,
    format_option,
)
from halfstep.launch_variables import read_launched_rank
from halfstep.recipe.changes import DATA, EXTEND, RECIPE, REWARM
from halfstep.recipe.fields import build_recipe_fields
from halfstep.recipe.names import (
    PRETRAINED,
    Override,
    TypedOverride,
    parse_typed_settings,
    replace_typed_settings,
    resolve_setting_key,
)
from halfstep.recipe.resolve import ChosenSetting, ResolvedRecipe, resolve_recipe
from halfstep.recipe.schema import NO_FILE, WEIGHTS
from halfstep.recipe.sources import RawRecipe, read_recipe
from halfstep.runs.registry import find_task_schema, import_task_options, list_task_names
from halfstep.tasks import sizing
from halfstep.terminal import display_progress
from halfstep.train.run_folder import NEW, check_run

METRICS_FILE = "run.prometheus"
CLASSIC, ENCODED = "unet", "smp-unet"
"""The classic U-Net, and the one of segmentation-models-pytorch, whose encoder has pretrained weights."""
Settings = Mapping[str, object] | Iterable[str]
"""`{"train.batch_size": 4}`, or as on the command line: `["train.batch_size=4", "--bf16"]`."""


def resolve_run_recipe(found: RawRecipe, settings: Settings = (), *, schema: Any = None) -> ResolvedRecipe:
    """Return the recipe with all settings applied; `schema` is that of a user's own task.

    Raise `BadRecipe`, `BadData` or `WrongUse` where it cannot be resolved.
    """
    schema = schema or find_task_schema(_read_task_name(found))
    if isinstance(settings, Mapping):
        fields = build_recipe_fields(schema)
        overrides = [Override(resolve_setting_key(key, fields), value) for key, value in settings.items()]
    else:
        overrides = parse_typed_settings(list(settings), schema)
    replaced = _choose_pretrained_model(found, overrides)
    # A folder the user typed must exist. A recipe's default need not: other commands only inspect the recipe.
    size = functools.partial(_choose_sizes, must_exist=any(one.key == "data.path" for one in overrides))
    resolved = resolve_recipe(found.raw, schema, [*overrides, *replaced], found.label, size)
    if not any(one.key == METRICS_FILE for one in overrides):
        _refuse_outside_metrics(resolved.recipe.run.prometheus)
    notes = [
        f"{PRETRAINED}: {one.key}={one.value}, since the classic U-Net has no pretrained weights" for one in replaced
    ]
    return replace(resolved, notes=[*resolved.notes, *notes])


def _refuse_outside_metrics(metrics: bool | str) -> None:
    """Raise BadRecipe if a recipe itself names a metrics file outside of the run's folder: it may be anyone's."""
    if isinstance(metrics, str) and (Path(metrics).is_absolute() or ".." in Path(metrics).parts):
        raise BadRecipe(
            f"the recipe writes {METRICS_FILE} to {metrics}, outside of the run's folder",
            allowed="true, or a path in the run's folder; any path from the command line",
            do=f"remove it from the recipe, and type {METRICS_FILE}={metrics} after it",
        )


def _choose_pretrained_model(found: RawRecipe, overrides: Sequence[Override]) -> list[Override]:
    """Return the model to take for `--pretrained` in a recipe of the classic U-Net, where none was typed."""
    typed = {one.key for one in overrides}
    asked = any(isinstance(one, TypedOverride) and one.word == PRETRAINED for one in overrides)
    if not asked or found.raw.get("task") != SEGMENTATION or "model.name" in typed:
        return []
    model = found.raw.get("model")
    name = model.get("name", CLASSIC) if isinstance(model, dict) else CLASSIC
    return [Override("model.name", ENCODED)] if name == CLASSIC else []


def summarize_choices(chosen: Sequence[ChosenSetting]) -> list[str]:
    """Return one line about the chosen settings, or none; the journal has the reasons."""
    if not chosen:
        return []
    values = ", ".join(f"{one.key.rpartition('.')[2]} {_shorten_value(one.value)}" for one in chosen)
    return [f"sized to the set and the machine: {values}"]


def _shorten_value(value: Any) -> str:
    return f"of {len(value)}" if isinstance(value, list) else f"{value}"


def _choose_sizes(recipe: Any, given: Mapping[str, object], *, must_exist: bool) -> Sequence[ChosenSetting]:
    """Choose the settings a recipe leaves open, for its data set and this machine."""
    rules = _import_sizing_rules(recipe.task)
    # With every setting given, neither the data nor the device is looked at.
    if given.keys() >= rules.KEYS:
        return ()
    facts = _read_sizing_facts(recipe, rules.DATA, must_exist)
    from halfstep.train.machine import detect_machine

    chosen: Sequence[ChosenSetting] = rules.sized(facts, detect_machine(recipe.train.device), given)
    return chosen


def _import_sizing_rules(task: str) -> Any:
    known = [module.name for module in pkgutil.iter_modules(sizing.__path__)]
    if task not in known:
        raise BadRecipe(
            f"sizing=auto with task={task}",
            allowed="sizing=auto for segmentation and classification",
            do="write sizing=none, and give train.epochs",
        )
    return importlib.import_module(f"{sizing.__name__}.{task}")


def _read_sizing_facts(recipe: Any, kinds: Sequence[str], must_exist: bool) -> Any:
    from halfstep.data.set_facts import collect_set_facts
    from halfstep.tasks.sizing.choices import UNKNOWN

    data = recipe.data
    if data.name not in kinds:
        return UNKNOWN
    try:
        masks = getattr(data, "masks", None)
        layout = find_layout(
            resolve_data_path(data.path), recipe.task, None if masks is None else resolve_data_path(masks)
        )
    except BadData:
        if must_exist:
            raise
        return UNKNOWN
    with display_progress("looking at the data", "masks") as on_progress:
        return collect_set_facts(layout, on_progress)


def _read_task_name(found: RawRecipe) -> str:
    named = found.raw.get("task")
    if not isinstance(named, str):
        raise WrongUse(
            f"{found.label} names no task",
            allowed=", ".join(list_task_names()),
            do="add a line such as `task: segmentation`; `halfstep recipes` lists complete recipes",
        )
    return named


EVERY_RUN = ("safetensors",)
DRAWN = ("shapes", "maps", "python")
"""Data that is generated, not read from disk."""


def list_accepted_changes(new: bool, data: bool, recipe: bool, extend: bool, rewarm: bool) -> list[str]:
    """Return which changes of an existing run were accepted or requested.

    Raise `Contradiction` for `--rewarm` without `--extend`, and for `--new` with `--extend`.
    """
    if rewarm and not extend:
        raise Contradiction(
            f"{format_option('rewarm')} without {format_option('extend')}",
            allowed="both",
            do=f"{advise_adding_option('extend')}, with a longer run",
        )
    if new and extend:
        raise Contradiction(
            f"{format_option('new')} together with {format_option('extend')}",
            allowed="one of them",
            do=f"leave {format_option('new')} out",
        )
    asked = {DATA: data, RECIPE: recipe, EXTEND: extend, REWARM: rewarm}
    return [name for name, given in asked.items() if given]


def refuse_early(resolved: ResolvedRecipe, *, new: bool, accepted: Collection[str]) -> None:
    """Raise the error a run would fail with before its first step, as far as it can be known; change nothing."""
    recipe = resolved.recipe
    if recipe.checkpoint.remote is not None:
        check_remote(recipe.checkpoint.remote)
    # A resumed run has its weights in the checkpoint and needs no file.
    begins = new or _check_early_state(resolved, accepted) == NEW
    options = import_task_options(recipe.task)
    if options is None:
        return
    check_packages_installed(*EVERY_RUN, *options.NEEDS)
    options.check(recipe)
    _check_data(recipe.data)
    if begins and recipe.checkpoint.remote is None and recipe.model.weights not in NO_FILE:
        path = recipe.model.weights
        if not os.path.isfile(os.path.expanduser(path)):
            raise BadData(f"no weights at {path}", allowed=WEIGHTS, do="check the path in model.weights")


def check_remote(address: str) -> None:
    """Raise WrongUse for an address that is none, and MissingExtra without the package for object stores."""
    from halfstep.store.address import check_obstore_installed, parse_address

    parse_address(address, "checkpoint.remote")
    check_obstore_installed()


def _check_early_state(resolved: ResolvedRecipe, accepted: Collection[str]) -> str:
    """Return whether the run is new, resumed or finished; NEW, without looking, on several ranks or with a store."""
    if read_launched_rank().world_size > 1 or resolved.recipe.checkpoint.remote is not None:
        # Another rank may have opened the folder already, or a store is asked first: rank 0 checks it later for all.
        return NEW
    return check_run(resolved.recipe, resolved.label, drawn=resolved.drawn, accepted=accepted)


def _check_data(data: Any) -> None:
    if data.name in DRAWN:
        return
    if is_store_address(data.path):
        check_store_data(data)
        return
    place = resolve_data_path(data.path)
    if data.name == "shards":
        from halfstep.data.shard_patterns import is_shard_pattern

        if is_shard_pattern(data.path):
            return  # the shards are looked for one by one
    if not place.exists():
        raise BadData(
            f"data.path is {data.path}, and there is nothing at {place.absolute()}",
            allowed="an existing folder",
            do="give the folder with your data: --data_dir FOLDER",
        )


def remove_precision(recipe: str, words: Sequence[str]) -> list[str]:
    """Return recipe and settings without the precision, for a command that sets it in its own way."""
    return apply_setting_changes(recipe, words, "precision=auto")[:-1]  # the new setting is the last word


def apply_setting_changes(recipe: str, words: Sequence[str], *changes: str) -> list[str]:
    """Return the recipe and its settings, each set once: `["unet", "--lr", "0.1", "precision=bf16"]`."""
    try:
        schema = find_task_schema(str(read_recipe(recipe).raw["task"]))
    except HalfstepError:  # the recipe file is gone: keep the words as typed
        return [recipe, *words, *changes]
    return [recipe, *replace_typed_settings(words, changes, schema)]
