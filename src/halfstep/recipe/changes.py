"""Compare two recipes, and decide which settings may differ when a run is resumed or extended. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from halfstep.errors import (
    RUN_FINISHED,
    FolderTaken,
    HalfstepError,
    StateMismatch,
    advise_adding_option,
    advise_new_run,
    choose_caller_wording,
    format_option,
)
from halfstep.numbers import format_counted_noun
from halfstep.recipe.schema import Extension
from halfstep.recipe.sources import read_recipe_bytes
from halfstep.recipe.strict_yaml import iterate_dotted_keys, parse_yaml

SAFE = (
    *("about", "sizing", "run.", "checkpoint.", "guard.", "train.num_workers", "data.bad_samples", "data.timeout"),
    *("data.verify", "store.", "train.check", "world.mode", "world.shard_size", "world.timeout", "world.start_timeout"),
)
"""The settings that change no trained bit unless a step fails: keys, and sections with their dot."""
PLACES = ("data.path", "data.masks", "data.val")
"""The settings for the location of the data; a change is harmless if the files are the same."""
BATCH = ("train.batch_size", "train.microbatches", "train.global_batch")
"""The settings for the samples of a step; with another number of ranks, their product may stay the same."""
EXTENSIONS = "schedule.extensions"
LENGTH = ("train.epochs", "train.steps", EXTENSIONS, "evaluate.patience", "evaluate.min_delta")
"""The settings for the length of a run and for early stopping, which an extension changes."""
RECIPE, DATA = "recipe", "data"
"""The changes that a user can accept: `--accept-recipe-change`, `--accept-data-change`."""
EXTEND, REWARM = "extend", "rewarm"
"""The requests for an existing run: `--extend`, and with it `--rewarm`."""
MOST_LINES = 20
ABSENT = "(absent)"


def compute_recipe_digest(file: Path) -> str:
    """Return a SHA-256 of the settings of a recipe that affect the computation; empty if the file is no recipe."""
    try:
        settings = parse_yaml(read_recipe_bytes(file), file.name)
    except HalfstepError:
        return ""
    kept = {key: value for key, value in iterate_dotted_keys(settings) if not key.startswith(tuple(SAFE))}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class Change:
    """A setting with different values in two recipes; `ABSENT` stands for the value of a recipe without it."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key}: {_format_value(self.before)} -> {_format_value(self.after)}"


def list_relevant_changes(saved: Any, now: Any, ignore: Collection[str] = ()) -> list[Change]:
    """Return the settings in which two recipes differ, except settings that change nothing."""
    found = list_differences(_add_defaults(saved, now), now, ignore=ignore)
    sections = tuple(key for key in SAFE if key.endswith("."))
    return [one for one in found if one.key not in SAFE and not one.key.startswith(sections)]


def _add_defaults(saved: Any, now: Any) -> Any:
    """Return the saved recipe with the defaults of settings that are newer than it."""
    if not (isinstance(saved, Mapping) and isinstance(now, BaseModel)):
        return saved
    try:
        return type(now).model_validate(saved)
    except ValidationError:
        return saved


def list_differences(one: Any, other: Any, ignore: Collection[str] = ()) -> list[Change]:
    """Return the settings in which two recipes, or the contents of their files, differ."""
    before, after = dict(iterate_dotted_keys(_to_plain(one))), dict(iterate_dotted_keys(_to_plain(other)))
    keys = [key for key in dict.fromkeys([*before, *after]) if key not in ignore]
    found = [Change(key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys]
    # True == 1 and 1 == 1.0 in Python; in a recipe they are different values.
    return [one for one in found if type(one.before) is not type(one.after) or one.before != one.after]


def _to_plain(recipe: Any) -> Mapping[str, Any]:
    content: Mapping[str, Any] = recipe if isinstance(recipe, Mapping) else recipe.model_dump(mode="json")
    return content


def _format_value(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)[:120]


def drop_keys(found: Iterable[Change], keys: Collection[str]) -> list[Change]:
    """Return the changes of all other settings."""
    return [one for one in found if one.key not in keys]


def build_recipe_changed_error(what: str, found: Sequence[Change]) -> StateMismatch:
    """Return the error for a run that was started with another recipe, or data folder; `what` names the run."""
    if not drop_keys(found, PLACES):
        return StateMismatch(
            format_change_list(f"{what} was started with a different data folder:", found),
            allowed="the run's original data folder",
            do=f"give the original folder, or {advise_adding_option('new')} to train on this one",
            id="data-folder-changed",
        )
    return StateMismatch(
        format_change_list(f"{what} was started with a different recipe:", found),
        allowed="the run's original recipe",
        do=(
            f"{advise_adding_option('accept_recipe_change')} to continue with the new one, or {format_option('new')} "
            "for a new folder"
        ),
        id="recipe-changed",
    )


def format_change_list(title: str, found: Sequence[Change | str]) -> str:
    """Return a title and a line for each difference as one text; only the first if there are many."""
    lines = [str(one) for one in found]
    more = [f"... and {len(lines) - MOST_LINES + 1} more"] if len(lines) > MOST_LINES else []
    return "\n    ".join([title, *(lines[: MOST_LINES - 1] if more else lines), *more])


EARLY = "early_stopping"
"""The reason for the end of a run in its result, if it ran out of patience."""


@dataclass(frozen=True)
class SavedRun:
    """The run as it is found in its folder."""

    recipe: Mapping[str, Any]
    """The recipe read from the folder."""
    result: dict[str, Any] | None
    """The result of a run that has ended, or None."""
    attempts: int
    """The number of attempted updates, as far as it is known."""

    @property
    def length(self) -> tuple[int | None, int | None]:
        """Return the epochs and steps; one of them is None."""
        train = self._section("train")
        return train.get("epochs"), train.get("steps")

    @property
    def patience(self) -> int | None:
        patience: int | None = self._section("evaluate").get("patience")
        return patience

    @property
    def ended_early(self) -> bool:
        return (self.result or {}).get("reason") == EARLY

    @property
    def extensions(self) -> list[Extension]:
        """Return the earlier extensions of the run; raise StateMismatch if recipe.yaml has invalid ones."""
        try:
            return [Extension.model_validate(one) for one in self._section("schedule").get("extensions") or ()]
        except (ValidationError, TypeError):
            raise StateMismatch(
                "the run's recipe.yaml has invalid schedule.extensions",
                allowed="what halfstep wrote",
                do=advise_new_run(),
            ) from None

    def _section(self, name: str) -> Mapping[str, Any]:
        section = self.recipe.get(name)
        return section if isinstance(section, Mapping) else {}


def extend_recipe(recipe: Any, before: SavedRun, rewarm: bool) -> Any:
    """Return the recipe of the longer run, with the run's previous end added to `schedule.extensions`.

    Raises FolderTaken if nothing is added, if the run would become shorter, or if it would stop early again.
    """
    earlier, asked = before.extensions, (recipe.train.epochs, recipe.train.steps)
    patience, least = recipe.evaluate.patience, before.patience
    patient = before.ended_early and (patience is None or (least is not None and patience > least))
    if before.ended_early and not patient:
        raise _build_impatient_error(before)
    if asked != before.length:
        _refuse_shorter(asked, before)
        epochs, steps = before.length
        # A run that stopped early never reached the length in its recipe: a new warm-up starts where it really ended.
        early = before.ended_early and rewarm
        end = Extension(steps=before.attempts) if early else Extension(epochs=epochs, steps=steps)
        return replace_extensions(recipe, [*earlier, end.model_copy(update={"rewarm": rewarm})])
    if before.result is not None and not patient:
        raise _build_nothing_added_error(before)
    # The command may be a repetition after an interruption: an extension that is recorded already is not added again.
    if rewarm and before.attempts and not (earlier and earlier[-1].rewarm):
        return replace_extensions(recipe, [*earlier, Extension(steps=before.attempts, rewarm=True)])
    # The extension is recorded already, and is resumed.
    return replace_extensions(recipe, earlier)


def replace_extensions(recipe: Any, extensions: list[Extension]) -> Any:
    """Return a copy of the recipe with these extensions."""
    schedule = recipe.schedule.model_copy(update={"extensions": extensions})
    return recipe.model_copy(update={"schedule": schedule})


def suggest_extension(length: tuple[int | None, int | None], more: int) -> str:
    """Return the options that make a run longer by `more` epochs or steps."""
    unit, number = ("steps", length[1] or 0) if length[0] is None else ("epochs", length[0])
    python = f'fit(..., extend=True, settings={{"train.{unit}": {number + more}}})'
    return choose_caller_wording(f"--extend --{unit} {number + more}", python)


def suggest_longer_run(before: SavedRun) -> str:
    """Return the options that make a run longer by half."""
    return suggest_extension(before.length, max(1, (before.length[0] or before.length[1] or 2) // 2))


def format_length(length: tuple[int | None, int | None]) -> str:
    """Return a length as text, such as `20 epochs`."""
    epochs, steps = length
    number, unit = (epochs, "epoch") if epochs is not None else (steps or 0, "step")
    return format_counted_noun(number, unit)


def is_longer(asked: tuple[int | None, int | None], than: tuple[int | None, int | None]) -> bool | None:
    """Return whether a length is longer.

    None if one is in epochs and the other in steps, since that depends on the data.
    """
    pairs = [(now, then) for now, then in zip(asked, than, strict=True) if now is not None and then is not None]
    return pairs[0][0] > pairs[0][1] if pairs else None


def _refuse_shorter(asked: tuple[int | None, int | None], before: SavedRun) -> None:
    if is_longer(asked, before.length) is False:
        more = asked[0] or asked[1] or 1
        raise FolderTaken(
            f"{format_option('extend')} to {format_length(asked)}, but the run already has "
            f"{format_length(before.length)}",
            allowed="the total length of the run, including the steps already trained",
            do=f"{suggest_extension(before.length, more)} adds {format_length(asked)}",
        )


def _build_nothing_added_error(before: SavedRun) -> FolderTaken:
    return FolderTaken(
        f"{format_option('extend')}, but the run is finished after {format_length(before.length)}: nothing to add",
        allowed="a total length longer than before",
        do=f"{suggest_longer_run(before)}, for example",
        id=RUN_FINISHED if before.extensions else "",  # the extension that is requested again
    )


def _build_impatient_error(before: SavedRun) -> FolderTaken:
    patience = before.patience or 1
    return FolderTaken(
        f"the run stopped early, after {patience} evaluations without a better metric, and would again",
        allowed="more patience than it had, or none at all",
        do=f"add evaluate.patience={2 * patience}, or evaluate.patience=null",
    )
