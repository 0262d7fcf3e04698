"""Resolve a recipe: translate, override and validate it, and fill in every default.

Imports no torch: the caller passes the task's schema.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from halfstep.errors import Contradiction, Unsafe
from halfstep.recipe.aliases import PRECISION_WORDS, read_over, read_precision_words, same_precision, translate
from halfstep.recipe.complaints import Complaint, bad_recipe, shown, validated
from halfstep.recipe.overrides import Override, apply, translations
from halfstep.recipe.schema import AUTO
from halfstep.recipe.strict_yaml import flat

LARGEST_SEED = 2**31


class ChosenSetting(NamedTuple):
    """A setting that was not given, and was chosen for the data set and the machine."""

    key: str
    value: Any
    reason: str


Size = Callable[[Any, Mapping[str, Any]], Sequence[ChosenSetting]]
"""A function that chooses omitted settings, given the recipe with its defaults and the given settings by dotted key."""


@dataclass(frozen=True)
class Resolved:
    """A complete recipe."""

    recipe: Any
    """An instance of the task's `Recipe[...]`."""
    label: str
    notes: list[str] = field(default_factory=list)
    """Notes for the user: what was translated, replaced or ignored."""
    drawn: frozenset[str] = frozenset()
    """The keys whose value was not given, but drawn at random or chosen by the rules of `sizing`."""
    sizing: Sequence[ChosenSetting] = ()
    """The settings that were chosen for the data set and the machine."""


def resolve(
    raw: Mapping[str, Any],
    schema: Any,
    overrides: Iterable[tuple[str, Any]] = (),
    label: str = "run",
    size: Size | None = None,
) -> Resolved:
    """Validate a recipe against its task's schema and fill in its defaults.

    `size` chooses what a recipe with `sizing: auto` omits. Raises BadRecipe with every mistake at once, Contradiction
    for settings that exclude each other, and Unsafe for a `run.dir` that contains `..`.
    """
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
    # Only after validation, so that a mistake is reported before the data set is measured.
    chosen = size(recipe, dict(flat(content))) if size and recipe.sizing == AUTO else ()
    if chosen:
        # Validated again: the choice may exclude something that was given.
        recipe = _checked(apply(content, [Override(one.key, one.value) for one in chosen]), schema, label)
    return _complete(recipe, label, notes, chosen)


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
    """Let epochs on the command line replace the recipe's steps, and vice versa."""
    keys, train = {o.key: o.value for o in overrides if o.value is not None}, content.get("train")
    if "train.epochs" in keys and "train.steps" in keys:
        raise Contradiction(
            f"train.epochs={keys['train.epochs']} and train.steps={keys['train.steps']} are both typed",
            allowed="one length of the run; it replaces the recipe's",
            do=f"leave out --epochs {keys['train.epochs']}, or --steps {keys['train.steps']}",
        )
    for given, other in (("epochs", "steps"), ("steps", "epochs")):
        if f"train.{given}" in keys and f"train.{other}" not in keys and isinstance(train, dict):
            if train.get(other) is not None:
                notes.append(f"train.{given}={train[given]} replaces the recipe's train.{other}={train[other]}")
            train[other] = None


def _no_interpolation(content: Any, label: str, key: str = "") -> None:
    """Raise BadRecipe for `${...}`: it would be taken literally, which its author does not want."""
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
    # A section whose fields all have defaults may be omitted or left empty.
    filled: dict[str, Any] = {key: {} for key in schema.model_fields if key in ("model", "data", "loss")}
    filled |= {key: value for key, value in content.items() if value is not None or key not in schema.model_fields}
    recipe = validated(filled, schema, label)
    wrong = [complaint for complaint in _impossible(recipe) if complaint]
    if wrong:
        raise bad_recipe(label, wrong)
    return recipe


def _impossible(recipe: Any) -> Iterable[Complaint | None]:
    """Yield complaints about values that are valid alone, but not together."""
    train, schedule, scale = recipe.train, recipe.schedule, recipe.loss_scale
    open_length = train.epochs is train.steps is None and recipe.sizing == AUTO
    if (train.epochs is None) == (train.steps is None) and not open_length:
        neither = train.epochs is None
        given = "neither train.epochs nor train.steps is" if neither else "both train.epochs and train.steps are"
        yield Complaint(f"{given} given", "one of the two", "add train.epochs" if neither else "delete one")
    for number, end in enumerate(schedule.extensions):
        if (end.epochs is None) == (end.steps is None):
            given = f"schedule.extensions has neither or both of epochs and steps in entry {number + 1}"
            yield Complaint(given, "one of the two", "write {epochs: 20}, or {steps: 2000}")
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


def _complete(recipe: Any, label: str, notes: list[str], chosen: Sequence[ChosenSetting]) -> Resolved:
    # A drawn seed is written to recipe.yaml, so that the run can be repeated.
    drawn = frozenset({"train.seed"} if recipe.train.seed is None else ())
    # Not from `random`: if the caller has seeded it, every run would draw the same seed.
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
    return Resolved(whole, label, notes, drawn | {one.key for one in chosen}, chosen)


def _from_home(folder: str) -> str:
    """Return the path with `~` expanded; a shell expands it neither inside a file nor after a `=`."""
    if not folder.startswith("~"):
        return folder
    try:
        return str(Path(folder).expanduser())
    except RuntimeError:
        raise Unsafe(
            f"run.dir is {shown(folder)}, and there is no such home", allowed="a path", do="write the path out"
        ) from None
