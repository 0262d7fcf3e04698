"""Resolve a recipe in one pass: read it, translate foreign names, override, validate, and fill in defaults.

`sources.read_recipe` and `names.parse_typed_settings` read the file and the command line; `resolve_recipe` does the
rest in this order.
Imports no torch: the caller passes the task's schema.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from pydantic import ValidationError

from halfstep.errors import BadRecipe, Contradiction, Unsafe
from halfstep.precision.names import (
    FLAGS,
    FORMATS,
    SWITCHES,
    NamedPrecision,
    format_policy_name,
    is_off,
    is_on,
    is_policy,
    parse_policy_name,
    parse_precision,
    parse_precision_settings,
)
from halfstep.recipe import schema
from halfstep.recipe.fields import RecipeFields, build_recipe_fields
from halfstep.recipe.names import (
    ELSEWHERE,
    FOREIGN_SECTIONS,
    PRECISION_WORDS,
    Override,
    TranslatedRecipe,
    describe_translations,
    is_same_precision,
    suggest_setting,
    translate_recipe,
)
from halfstep.recipe.schema import AUTO, EXACT
from halfstep.recipe.sources import list_recipe_names
from halfstep.recipe.strict_yaml import iterate_dotted_keys

LARGEST_SEED = 2**31
MOST = 10
"""The maximum number of mistakes in an error; further ones are only counted."""
_UNKNOWN = "extra_forbidden"
"""pydantic's type of the error for an unknown key."""


class ChosenSetting(NamedTuple):
    """A setting that was not given, and was chosen for the data set and the machine."""

    key: str
    value: Any
    reason: str


Size = Callable[[Any, Mapping[str, object]], Sequence[ChosenSetting]]
"""A function that chooses omitted settings, given the recipe with its defaults and the given settings by dotted key."""


@dataclass(frozen=True)
class ResolvedRecipe:
    """A complete recipe."""

    recipe: Any
    """An instance of the task's `Recipe[...]`."""
    label: str
    notes: list[str] = field(default_factory=list)
    """Notes for the user: translated, replaced and ignored settings."""
    drawn: frozenset[str] = frozenset()
    """The keys whose value was not given, but drawn at random or chosen by the rules of `sizing`."""
    sizing: Sequence[ChosenSetting] = ()
    """The settings that were chosen for the data set and the machine."""


def resolve_recipe(
    raw: Mapping[str, object],
    schema: Any,
    overrides: Iterable[tuple[str, Any]] = (),
    label: str = "run",
    size: Size | None = None,
) -> ResolvedRecipe:
    """Return the complete recipe, from what `read_recipe` and `parse_typed_settings` have read.

    `size` chooses what a recipe with `sizing: auto` omits. Raises BadRecipe with every mistake at once, Contradiction
    for settings that exclude each other, and Unsafe for a `run.dir` that contains `..`.
    """
    fields = build_recipe_fields(schema)
    line = _split_overrides(overrides)
    translated = translate_recipe(raw, fields)
    content, notes = _merge_command_line(translated, line, fields, label)
    recipe = _validate_recipe(content, schema, label)
    # Only after validation, so that a mistake is reported before the data set is measured.
    chosen = size(recipe, dict(iterate_dotted_keys(content))) if size and recipe.sizing == AUTO else ()
    if chosen:
        # Validated again: the choice may exclude something that was given.
        recipe = _validate_recipe(apply_overrides(content, [(one.key, one.value) for one in chosen]), schema, label)
    return _complete_recipe(recipe, label, notes, chosen)


class CommandLineOverrides(NamedTuple):
    """The overrides: the words for precision, which are read together, and all others."""

    precision: dict[str, object]
    others: list[Override]


def _split_overrides(overrides: Iterable[tuple[str, Any]]) -> CommandLineOverrides:
    line = CommandLineOverrides({}, [])
    for one in overrides:
        key, value = one
        if key not in PRECISION_WORDS:
            line.others.append(one if isinstance(one, Override) else Override(key, value))
        elif not is_same_precision(key, line.precision.setdefault(key, value), value):
            raise Contradiction(
                f"{key} is given as {line.precision[key]!r} and as {value!r}",
                allowed="one precision",
                do="delete one of the two",
            )
    return line


def _merge_command_line(
    translated: TranslatedRecipe, line: CommandLineOverrides, fields: RecipeFields, label: str
) -> tuple[dict[str, object], list[str]]:
    """Return the recipe with the command line over it and one precision, and the notes for the user."""
    moved = describe_translations(line.others, fields)
    content = apply_overrides(translated.raw, line.others)
    notes = [*translated.notes, *(["; ".join(moved)] if moved else []), *_resolve_length(content, line.others)]
    _refuse_interpolation({**content, **translated.precision, **line.precision}, label)
    named = _merge_precision_words(line.precision, translated.precision)
    if named is None:
        return content, notes
    policy = translated.precision.get("precision")
    if line.precision and is_policy(policy) and not is_policy(named.name):
        _, rules = parse_policy_name(parse_precision(policy).name)
        named = NamedPrecision(format_policy_name(named.name, rules), named.took)
    content["precision"] = named.name
    if named.took:
        notes.append(named.took)
    written = _resolve_precision_words(translated.precision) if line.precision and translated.precision else None
    if written and written.name != named.name:
        notes.append(f"precision {named.name} from the command line overrides {written.name} from the recipe")
    return content, notes


def apply_overrides(raw: Mapping[str, object], overrides: Iterable[tuple[str, Any]]) -> dict[str, object]:
    """Return a copy of the recipe with the overrides applied."""
    result = copy.deepcopy(dict(raw))
    for key, value in overrides:
        *sections, name = key.split(".")
        place = _create_section(result, sections)
        if place is not None:
            place[name] = value
    return result


def _create_section(recipe: dict[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    """Return the inner mapping, creating it if needed.

    Returns None if another value is there, which validation then reports.
    """
    place = recipe
    for name in names:
        if place.get(name) is None:
            place[name] = {}
        if not isinstance(place[name], dict):
            return None
        place = place[name]
    return place


def _resolve_length(content: dict[str, object], overrides: Iterable[Override]) -> Iterator[str]:
    """Let epochs on the command line replace the recipe's steps, and vice versa; yield a note about it."""
    keys, train = {o.key: o.value for o in overrides if o.value is not None}, content.get("train")
    if "train.epochs" in keys and "train.steps" in keys:
        raise Contradiction(
            f"train.epochs={keys['train.epochs']} and train.steps={keys['train.steps']} are both given",
            allowed="one length of the run; it replaces the recipe's",
            do=f"leave out --epochs {keys['train.epochs']}, or --steps {keys['train.steps']}",
        )
    for given, other in (("epochs", "steps"), ("steps", "epochs")):
        if f"train.{given}" in keys and f"train.{other}" not in keys and isinstance(train, dict):
            if train.get(other) is not None:
                yield f"train.{given}={train[given]} replaces the recipe's train.{other}={train[other]}"
            train[other] = None


def _refuse_interpolation(content: Any, label: str, key: str = "") -> None:
    """Raise BadRecipe for `${...}`: it would be taken literally, which its author does not want."""
    if isinstance(content, Mapping):
        for name, inner in content.items():
            _refuse_interpolation(inner, label, f"{key}.{name}".lstrip("."))
    elif isinstance(content, list):
        for inner in content:
            _refuse_interpolation(inner, label, key)
    elif isinstance(content, str) and "${" in content:
        raise _build_recipe_error(
            label,
            [
                Complaint(
                    f"{key} is {_shorten_repr(content)}", "the value itself; recipes have no ${...}", "write it out"
                )
            ],
        )


def _resolve_precision_words(words: Mapping[str, object]) -> NamedPrecision | None:
    """Return the precision that the words for precision mean together, or None without any.

    Raises Contradiction if they disagree, and BadRecipe for a value that is no precision.
    """
    for key, value in words.items():
        if isinstance(value, list) or (isinstance(value, dict) and "enabled" not in value and not is_policy(value)):
            raise BadRecipe(f"{key} has a {type(value).__name__}", allowed="a precision or true", do=f"{key}: bf16")
    return parse_precision_settings(words)


def _merge_precision_words(line: Mapping[str, object], recipe: Mapping[str, object]) -> NamedPrecision | None:
    """Return the precision of the command line over the recipe's.

    A switch without a format uses a format from the recipe.
    """
    # `--amp` over `amp_dtype: float16` means fp16: the line only switches on what the recipe describes.
    if line and all(key in SWITCHES and is_on(value) for key, value in line.items()):
        written = _resolve_precision_words(recipe)
        if written and written.name in ("bf16", "fp16"):
            return written
        # A flag that the recipe denies (`bf16: false`) still excludes its format.
        denied = [key for key in FLAGS if is_off(recipe.get(key))]
        line = {**line, **{key: recipe[key] for key in (*FORMATS, *denied) if key in recipe}}
    return _resolve_precision_words(line or recipe)


def _validate_recipe(content: Mapping[str, object], schema: Any, label: str) -> Any:
    """Return the recipe with its defaults; raise BadRecipe for values that are invalid, alone or together."""
    # A section whose fields all have defaults may be omitted or left empty.
    filled: dict[str, object] = {key: {} for key in schema.model_fields if key in ("model", "data", "loss")}
    filled |= {key: value for key, value in content.items() if value is not None or key not in schema.model_fields}
    recipe = validate_against_schema(filled, schema, label)
    wrong = list(_find_conflicts(recipe))
    if wrong:
        raise _build_recipe_error(label, wrong)
    return recipe


def _find_conflicts(recipe: Any) -> Iterator[Complaint]:
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


class Complaint(NamedTuple):
    """One mistake in a recipe: the given value, the allowed values, and the fix."""

    given: str
    allowed: str
    do: str

    def __str__(self) -> str:
        return f"{self.given}; {self.do}" if self.do else f"{self.given}; allowed: {self.allowed}"


def _build_recipe_error(label: str, complaints: Sequence[Complaint]) -> BadRecipe:
    """Return one error for all mistakes of a recipe."""
    explain = f"halfstep recipes explain {label}" if label in list_recipe_names() else "halfstep recipes schema"
    if len(complaints) == 1:
        one = complaints[0]
        return BadRecipe(f"recipe {label}: {one.given}", allowed=one.allowed, do=one.do or explain)
    lines = [f"  - {complaint}" for complaint in complaints[:MOST]]
    if len(complaints) > MOST:
        lines.append(f"  - and {len(complaints) - MOST} more")
    return BadRecipe(f"recipe {label} has {len(complaints)} mistakes:\n" + "\n".join(lines), do=explain)


def validate_against_schema(content: Any, schema: Any, label: str) -> Any:
    """Return the content as an instance of the schema's model; `label` names the recipe in errors.

    Raises BadRecipe with every mistake.
    """
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise _build_recipe_error(label, _list_complaints(error, build_recipe_fields(schema))) from None


def _list_complaints(error: ValidationError, fields: RecipeFields) -> list[Complaint]:
    """Return one complaint for each key."""
    # pydantic reports one error for each branch of a union; for the user that is one mistake.
    found: dict[str, Complaint] = {}
    for detail in error.errors(include_url=False, include_context=False):
        kind, value = detail["type"], detail["input"]
        key = _format_key(detail["loc"], kind, fields)
        if key in FOREIGN_SECTIONS and isinstance(value, dict):
            found |= {(inner := f"{key}.{name}"): _build_unknown_complaint(inner, fields) for name in value}
        else:
            found.setdefault(
                key,
                _build_unknown_complaint(key, fields)
                if kind == _UNKNOWN
                else _build_complaint(key, kind, value, fields),
            )
    return list(found.values())


def _format_key(location: tuple[str | int, ...], kind: str, fields: RecipeFields) -> str:
    """Return the dotted key, without the names that pydantic adds for the branches of a union."""
    parts = [str(part) for part in location]
    # The longest known prefix: what follows it are the branches of a union or the indices of a list.
    known = () if kind == _UNKNOWN else {*fields.by_key, *fields.sections}
    ends = (end for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in known)
    return ".".join(parts[: next(ends, len(parts))])


def _build_complaint(key: str, kind: str, value: Any, fields: RecipeFields) -> Complaint:
    from halfstep.nearest_word import find_nearest_word

    allowed = fields.allowed(key, "keys with values")
    if kind == "missing":
        return Complaint(f"{key} is missing", allowed, f"add {key}")
    if (reason := fields.reason_against(key, value)) is not None:
        return Complaint(f"{key} is {_shorten_repr(value)}: {reason}", allowed, f"{key}={fields.by_key[key].default}")
    choices = [word for word in allowed.replace(" or ", ", ").split(", ") if " " not in word]
    word = find_nearest_word(value, choices) if isinstance(value, str) else None
    do = f"did you mean {word}?" if word else ""
    if key == "data.name" and isinstance(value, str) and not word and len(PurePath(value).parts) > 1:
        do = f"the path of a set is data.path={value}; data.name is its kind"
    return Complaint(f"{key} is {_shorten_repr(value)}", allowed, do)


def _build_unknown_complaint(key: str, fields: RecipeFields) -> Complaint:
    from halfstep.nearest_word import find_nearest_word

    # Shortened, and without characters that could control a terminal.
    given = f"{key[:80] if key[:80].isprintable() else repr(key[:80])[1:-1]} is not known"
    section, _, name = key[:200].rpartition(".")
    meant = fields.keys_of.get(name, [])
    if meant:
        return Complaint(given, "", f"did you mean {' or '.join(meant)}?")
    beside = find_nearest_word(name, [*fields.top, *PRECISION_WORDS]) if not section and name not in ELSEWHERE else None
    do = f"did you mean {beside}?" if beside else suggest_setting(key, fields)
    names = [other.rpartition(".")[2] for other in fields.by_key if other.rpartition(".")[0] == section]
    return Complaint(given, ", ".join(names if section else fields.top), do or "delete it")


def _shorten_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _complete_recipe(recipe: Any, label: str, notes: list[str], chosen: Sequence[ChosenSetting]) -> ResolvedRecipe:
    # A drawn seed is written to recipe.yaml, so that the run can be repeated.
    drawn = frozenset({"train.seed"} if recipe.train.seed is None else ())
    # A recipe without it is that of an earlier run, which keeps its first split.
    drawn |= {"data.split"} if recipe.data.split is None else set()
    # Not from `random`: if the caller has seeded it, every run would draw the same seed.
    seed = secrets.randbelow(LARGEST_SEED) if recipe.train.seed is None else recipe.train.seed
    folder = _expand_home(recipe.run.dir or str(PurePath("runs", label)))
    if ".." in PurePath(folder).parts or not folder.strip() or "\0" in folder:
        raise Unsafe(
            f"run.dir is {_shorten_repr(folder)}", allowed="a path without `..`", do=f"write run.dir=runs/{label}"
        )
    whole = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update={"seed": seed}),
            "run": recipe.run.model_copy(update={"dir": folder}),
            "data": recipe.data.model_copy(update={"split": recipe.data.split or EXACT}),
        }
    )
    return ResolvedRecipe(whole, label, notes, drawn | {one.key for one in chosen}, chosen)


def _expand_home(folder: str) -> str:
    """Return the path with `~` expanded; a shell expands it neither inside a file nor after a `=`."""
    if not folder.startswith("~"):
        return folder
    try:
        return str(Path(folder).expanduser())
    except RuntimeError:
        raise Unsafe(
            f"run.dir is {_shorten_repr(folder)}, and there is no such home directory",
            allowed="a path",
            do="write the path out",
        ) from None


_SECTIONS: dict[str, type[schema.Section]] = {
    "optimizer": schema.OptimizerOptions,
    "schedule": schema.ScheduleOptions,
    "loss_scale": schema.LossScaleOptions,
    "train": schema.TrainOptions,
}


def explain_value_refusal(key: str, value: object) -> str | None:
    """Return why a setting that all tasks share refuses a value; None if it accepts it."""
    section, _, name = key.partition(".")
    try:
        _SECTIONS[section].model_validate({name: value})
    except ValidationError as error:
        return error.errors()[0]["msg"][:80].lower()
    return None
