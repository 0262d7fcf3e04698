"""From what was written to one complete recipe: translated, overridden, checked, with every default filled in.

Imports no torch: the task's schema is given.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from pydantic import ValidationError

from halfstep.errors import Contradiction, Unsafe
from halfstep.train.recipe.complaints import Complaint, bad_recipe, complaints_from, shown
from halfstep.train.recipe.overrides import Override, apply, translations
from halfstep.train.recipe.words import PRECISION_WORDS, read_over, read_precision_words, same_precision, translate

LARGEST_SEED = 2**31


@dataclass(frozen=True)
class Resolved:
    """A recipe with nothing left open."""

    recipe: Any
    """A `Recipe[...]` of the task."""
    label: str
    notes: list[str] = field(default_factory=list)
    """What was translated, replaced or left aside, for the person to read."""
    drawn: frozenset[str] = frozenset()
    """Keys whose value nobody gave and chance decided."""


def resolve(
    raw: Mapping[str, Any], schema: Any, overrides: Iterable[tuple[str, Any]] = (), label: str = "run"
) -> Resolved:
    """Check a recipe against its task's schema and fill it in; every mistake is named at once."""
    line = [one if isinstance(one, Override) else Override(*one) for one in overrides]
    precision_line = _together([o for o in line if o.key in PRECISION_WORDS])
    ours = [o for o in line if o.key not in PRECISION_WORDS]
    translated = translate(raw, schema)
    moved = translations(ours, schema)
    notes = translated.notes + (["; ".join(moved)] if moved else [])
    content = apply(translated.raw, ours)
    _one_length(content, ours, notes)
    _no_interpolation({**content, **translated.precision, **precision_line}, label)
    _settle_precision(content, translated.precision, precision_line, notes)
    recipe = _checked(content, schema, label)
    return _complete(recipe, label, notes)


def _together(overrides: Iterable[Override]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in overrides:
        if not same_precision(key, found.setdefault(key, value), value):
            raise Contradiction(
                f"{key} is given as {found[key]!r} and as {value!r}",
                allowed="one precision",
                do="delete one of the two",
            )
    return found


def _one_length(content: dict[str, Any], overrides: Iterable[Override], notes: list[str]) -> None:
    """Epochs on the command line replace the recipe's steps, and the other way round."""
    keys, train = {o.key for o in overrides if o.value is not None}, content.get("train")
    for given, other in (("epochs", "steps"), ("steps", "epochs")):
        if f"train.{given}" in keys and f"train.{other}" not in keys and isinstance(train, dict):
            if train.get(other) is not None:
                notes.append(f"train.{given}={train[given]} replaces the recipe's train.{other}={train[other]}")
            train[other] = None


def _no_interpolation(content: Any, label: str, key: str = "") -> None:
    """A `${...}` would be kept as it is written, which nobody who writes one wants."""
    if isinstance(content, Mapping):
        for name, inner in content.items():
            _no_interpolation(inner, label, f"{key}.{name}".lstrip("."))
    elif isinstance(content, list):
        for inner in content:
            _no_interpolation(inner, label, key)
    elif isinstance(content, str) and "${" in content:
        raise bad_recipe(
            label, [Complaint(f"{key} is {shown(content)}", "the value itself; recipes have no ${...}", "write it out")]
        )


def _settle_precision(
    content: dict[str, Any], recipe: Mapping[str, Any], line: Mapping[str, Any], notes: list[str]
) -> None:
    named = read_over(line, recipe)
    if named is None:
        return
    content["precision"] = named.name
    if named.took:
        notes.append(named.took)
    written = read_precision_words(recipe) if line and recipe else None
    if written and written.name != named.name:
        notes.append(f"the command line's {named.name} replaces the recipe's {written.name}")


def _checked(content: Mapping[str, Any], schema: Any, label: str) -> Any:
    # A section whose fields all have defaults may be left out, or left empty.
    filled: dict[str, Any] = {key: {} for key in schema.model_fields if key in ("model", "data", "loss")}
    filled |= {key: value for key, value in content.items() if value is not None or key not in schema.model_fields}
    try:
        recipe = schema.model_validate(filled)
    except ValidationError as error:
        raise bad_recipe(label, complaints_from(error, schema)) from None
    wrong = [complaint for complaint in _impossible(recipe) if complaint]
    if wrong:
        raise bad_recipe(label, wrong)
    return recipe


def _impossible(recipe: Any) -> Iterable[Complaint | None]:
    """Values that are allowed each by itself, and not together."""
    train, schedule, scale = recipe.train, recipe.schedule, recipe.loss_scale
    if (train.epochs is None) == (train.steps is None):
        given = "neither train.epochs nor train.steps" if train.epochs is None else "both train.epochs and train.steps"
        yield Complaint(
            f"{given} is given", "one of the two", "add train.epochs" if train.epochs is None else "delete one"
        )
    if not scale.floor <= scale.init_scale <= scale.cap:
        given = f"loss_scale has floor {scale.floor:g}, init_scale {scale.init_scale:g}, cap {scale.cap:g}"
        yield Complaint(given, "floor <= init_scale <= cap", "")
    if schedule.name == "plateau" and train.epochs is not None and recipe.evaluate.every_epochs > train.epochs:
        given = f"schedule.name is plateau, and no evaluation falls into {train.epochs} epochs"
        yield Complaint(
            given, "a plateau is seen at evaluations", f"set evaluate.every_epochs to {train.epochs} or less"
        )
    if train.steps is not None and schedule.warmup_steps >= train.steps:
        given = f"schedule.warmup_steps is {schedule.warmup_steps}, and train.steps is {train.steps}"
        yield Complaint(given, "a warm-up that ends before the run does", "")


def _complete(recipe: Any, label: str, notes: list[str]) -> Resolved:
    drawn = frozenset({"train.seed"} if recipe.train.seed is None else ())
    seed = secrets.randbelow(LARGEST_SEED) if drawn else recipe.train.seed
    folder = _from_home(recipe.run.dir or str(PurePath("runs", label)))
    if ".." in PurePath(folder).parts or not folder.strip() or "\0" in folder:
        raise Unsafe(f"run.dir is {shown(folder)}", allowed="a path without `..`", do=f"write run.dir=runs/{label}")
    whole = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update={"seed": seed}),
            "run": recipe.run.model_copy(update={"dir": folder}),
        }
    )
    return Resolved(whole, label, notes, drawn)


def _from_home(folder: str) -> str:
    """`~/runs` as a shell would read it; nothing expands it inside a file, or after a `=`."""
    if not folder.startswith("~"):
        return folder
    try:
        return str(Path(folder).expanduser())
    except RuntimeError:
        raise Unsafe(
            f"run.dir is {shown(folder)}, and there is no such home", allowed="a path", do="write the path out"
        ) from None
