"""Read the names of settings, also those of other projects, in a recipe and on a command line. Imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from halfstep.errors import BadRecipe, Contradiction
from halfstep.precision.names import FLAGS, FORMATS, FP8_KINDS, SWITCHES, TF32, is_off, is_on, parse_precision_claims
from halfstep.recipe.fields import (
    RecipeFields,
    build_recipe_fields,
)
from halfstep.recipe.strict_yaml import NULL, parse_yaml_value

PRECISION_SWITCHES = (*SWITCHES, *FLAGS, TF32)
PRECISION_WORDS = (*PRECISION_SWITCHES, "precision", *FORMATS)
FOREIGN_SECTIONS = ("trainer", "training", "globals")
"""The sections in which other projects keep settings that a recipe has at the top level or in its own sections."""
_ON_OFF = ("true", "false")
PRETRAINED = "--pretrained"
"""The flag that stands for `model.weights=pretrained`."""


_INSTEAD = {
    "type the same command again: an unfinished run resumes by itself; initial weights: model.weights=FILE": (
        "resume resume_from resume_from_checkpoint auto_resume ckpt_path load_from"
    ),
    "torchrun --nproc_per_node 2 -m halfstep train RECIPE, with the number of GPUs; one GPU alone: --device": (
        "gpus devices num_gpus num_devices n_gpu nproc_per_node num_processes local_rank num_nodes nnodes world_size "
        "distributed dist_url"
    ),
    "--world fsdp or --world ddp, under torchrun": "fsdp ddp deepspeed",
    "--device, with a device as torch names it": "accelerator no_cuda use_cpu cpu cuda",
    "write the recipe first: halfstep train FILE": "config config_file cfg config_path",
    "--new, which trains in another folder": "overwrite overwrite_output_dir exist_ok",
    "checkpoint.every_steps=N for saves, evaluate.every_epochs=N for evaluations": (
        "save_strategy eval_strategy evaluation_strategy eval_steps"
    ),
    "leave it out: evaluation has the batch and the precision of training": (
        "per_device_eval_batch_size eval_batch_size val_batch_size bf16_full_eval fp16_full_eval"
    ),
    "leave it out: `halfstep train` trains and evaluates; `halfstep evaluate RUN` evaluates alone": (
        "do_train do_eval do_predict"
    ),
    "leave it out: torch's own default is used": "adam_beta2 adam_epsilon betas eps nesterov optim_args",
    "optimizer.momentum=0.9, the first beta": "adam_beta1",
    "schedule.warmup_steps=N, in updates": "warmup_ratio warmup_epochs",
    "train.clip_norm=1.0 or train.clip_value=0.5": "gradient_clip_algorithm clip_mode",
    "--fp16: autocast with a loss scale": "fp16_opt_level amp_level amp_backend fp16_backend",
    "--tracker wandb": "wandb use_wandb log_wandb wandb_project",
    "--tracker tensorboard": "tensorboard use_tensorboard logging_dir",
    "--steps 2; or --show, which prints the recipe and trains nothing": "fast_dev_run dry_run",
    "halfstep profile RECIPE": "profiler",
}
"""What to type instead of words of other projects that are no setting of a recipe."""
ELSEWHERE = {word: do for do, words in _INSTEAD.items() for word in words.split()}
ELSEWHERE |= {kind: f"--precision {kind}" for kind in FP8_KINDS}


_LIST_SETTINGS = "halfstep recipes explain RECIPE"


def resolve_setting_key(word: str, fields: RecipeFields, flag: str = "") -> str:
    """Return the dotted key that a word means; a word for precision stands for itself.

    Raises BadRecipe for an unknown word, with the nearest key, and for one that several settings share; `flag` is the
    word as it was typed on the command line.
    """
    section, _, inner = word.partition(".")
    if section in FOREIGN_SECTIONS and inner:
        # `trainer.gradient_clip_val`, as other projects write it.
        return resolve_setting_key(inner, fields, flag)
    if word in fields.by_key or word in PRECISION_WORDS:
        return word
    meant = fields.keys_of.get(word, [])
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise BadRecipe(f"{word} can mean several settings", allowed=", ".join(meant), do=f"write {meant[0]}=...")
    settings = f"the {len(fields.by_key)} settings listed by `halfstep recipes explain RECIPE`"
    raise BadRecipe(
        f"there is no option or setting {flag[:80]}" if flag else f"there is no setting {word[:80]!r}",
        allowed=f"the options listed by --help, and {settings}" if flag else settings,
        do=suggest_setting(word, fields) or f"{'the same command with --help; or ' if flag else ''}{_LIST_SETTINGS}",
    )


def suggest_setting(word: str, fields: RecipeFields) -> str | None:
    """Return what to type instead of an unknown word: known from another project, or the nearest key."""
    elsewhere = ELSEWHERE.get(word.rpartition(".")[2].lower())
    if elsewhere is not None:
        return elsewhere
    near = find_nearest_key(word, fields)
    return f"did you mean {near}?" if near else None


def find_nearest_key(word: str, fields: RecipeFields) -> str | None:
    """Return the key that was probably meant: first from the same section, then by its last name anywhere."""
    from halfstep.nearest_word import count_allowed_edits, count_edits, find_nearest_word

    section, _, name = word.rpartition(".")
    same = [key for key in fields.by_key if section and key.rpartition(".")[0] == section]
    near = find_nearest_word(word, same) if same else None
    if near and count_edits(name, near.rpartition(".")[2]) <= count_allowed_edits(name):
        return near
    by_word = {word: word for word in PRECISION_WORDS} | {word: meant[0] for word, meant in fields.keys_of.items()}
    short = find_nearest_word(name, by_word)
    return by_word[short] if short else find_nearest_word(word, fields.by_key)


class TranslatedRecipe(NamedTuple):
    """A recipe with known names only, its precision settings, and notes on translated names."""

    raw: dict[str, object]
    precision: dict[str, object]
    notes: list[str]


def translate_recipe(raw: Mapping[str, object], fields: RecipeFields) -> TranslatedRecipe:
    """Move every known foreign name to its setting; leave unknown names for validation to report.

    Raises Contradiction if two names of one setting have different values.
    """
    # Names are moved within nested mappings, which belong to the caller.
    result = copy.deepcopy(dict(raw))
    precision = _take_precision(result)
    moved = [f"{word} is read as {key}" for word, key in _move_names(result, fields)]
    for section in FOREIGN_SECTIONS:
        if result.get(section) in ({}, None):
            result.pop(section, None)
    return TranslatedRecipe(result, precision, ["; ".join(moved)] if moved else [])


def is_same_precision(key: str, one: Any, other: Any) -> bool:
    """Return whether two values of one key mean the same, as `bf16` and `bf16-mixed` do."""
    if one == other:
        return True
    meanings = [
        [(claim.meaning, claim.denies) for claim in parse_precision_claims({key: value})] for value in (one, other)
    ]
    return meanings[0] == meanings[1]


def _take_precision(raw: dict[str, object]) -> dict[str, object]:
    found = {word: raw.pop(word) for word in PRECISION_WORDS if word in raw}
    for section in FOREIGN_SECTIONS:
        inner = raw.get(section)
        if not isinstance(inner, dict):
            continue
        for word in [word for word in PRECISION_WORDS if word in inner]:
            value = inner.pop(word)
            if not is_same_precision(word, value, found.setdefault(word, value)):
                _require_same(f"{section}.{word}", value, word, found[word])
    return found


def _move_names(raw: dict[str, object], fields: RecipeFields) -> Iterator[tuple[str, str]]:
    """Move each name that has exactly one meaning, and yield where it was and its key."""
    for section in fields.sections:
        key = fields.short_for(section) if isinstance(raw.get(section), str) else None
        if key is not None:
            raw[section] = {key.rpartition(".")[2]: raw[section]}
            yield section, key
    # A name that several settings share stays where it is: validation reports it and lists the candidates.
    one_meaning = {word: keys[0] for word, keys in fields.keys_of.items() if len(keys) == 1}
    for section in ("", *FOREIGN_SECTIONS):
        holder: Any = raw.get(section) if section else raw
        ours = () if section else (*fields.top, *FOREIGN_SECTIONS)
        for word in list(holder) if isinstance(holder, dict) else ():
            if word in one_meaning and word not in ours:
                yield from _move_name(raw, holder, word, f"{section}.{word}".lstrip("."), one_meaning[word])
    for key, setting in fields.by_key.items():
        section = key.rpartition(".")[0]
        holder = raw.get(section)
        for word in setting.also if isinstance(holder, dict) else ():
            if word in holder:
                yield from _move_name(raw, holder, word, f"{section}.{word}", key)


def _move_name(
    raw: dict[str, object], holder: dict[str, object], word: str, written: str, key: str
) -> Iterator[tuple[str, str]]:
    section, _, name = key.rpartition(".")
    place = raw.get(section) if section else raw
    if place is None:
        place = raw[section] = {}
    if not isinstance(place, dict):
        return
    value = holder[word]
    _require_same(written, value, key, place.get(name, value))
    place[name] = value
    if (holder is not place) or word != name:
        del holder[word]
    yield written, key


def _require_same(one: str, value: Any, other: str, against: Any) -> None:
    if value != against:
        raise Contradiction(
            f"{one} says {value!r}, but {other} says {against!r}",
            allowed="one value for one setting",
            do=f"delete {one} or {other}",
        )


class Override(NamedTuple):
    """A key and its value; the key is dotted, or one of the words for precision."""

    key: str
    value: Any


class TypedOverride(Override):
    """An override that remembers the word it was typed as."""

    # A subclass of a NamedTuple cannot add a field, but it has attributes.
    word: str


def parse_typed_settings(words: Sequence[str], schema: Any) -> list[Override]:
    """Return the settings that follow RECIPE, assignments and flags mixed, in their order.

    Raises BadRecipe for a word that is no setting, for an unknown key, and for a flag without its value.
    """
    return [one for one, _ in _iterate_settings(words, build_recipe_fields(schema))]


def replace_typed_settings(words: Sequence[str], changes: Sequence[str], schema: Any) -> list[str]:
    """Return the words as typed, without those that `changes` replaces, followed by `changes`."""
    changed = {_unify_precision_key(one.key) for one in parse_typed_settings(changes, schema)}
    unchanged = [
        typed
        for one, typed in _iterate_settings(words, build_recipe_fields(schema))
        if _unify_precision_key(one.key) not in changed
    ]
    return [word for typed in unchanged for word in typed] + list(changes)


def describe_translations(overrides: Iterable[Override], fields: RecipeFields) -> list[str]:
    """Return a note such as `--use-optimizations is read as train.compile` for each foreign name that was typed."""
    typed = [one for one in overrides if isinstance(one, TypedOverride) and _is_foreign(one, fields)]
    return list(dict.fromkeys(f"{one.word} is read as {one.key}" for one in typed))


def _unify_precision_key(key: str) -> str:
    return "precision" if key in PRECISION_WORDS else key


def _is_foreign(one: TypedOverride, fields: RecipeFields) -> bool:
    """Return whether a typed name belongs to another project; our own short names, such as `--lr`, need no note."""
    section, _, name = one.word.lstrip("-").replace("-", "_").rpartition(".")
    setting = fields.by_key.get(one.key)
    return setting is not None and (section in FOREIGN_SECTIONS or name in setting.also)


def _iterate_settings(words: Sequence[str], fields: RecipeFields) -> Iterator[tuple[Override, list[str]]]:
    """Yield each setting, with the one or two words that it was typed as."""
    left = list(words)
    while left:
        before = list(left)
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            key, read = _parse_dashed_flag(word, left, fields)
        elif equals:
            key = resolve_setting_key(name.strip(), fields)
            read = _parse_setting_value(key, value, fields)
        else:
            raise BadRecipe(
                f"{word[:80]!r} is no setting",
                allowed="KEY=VALUE, such as train.batch_size=4, or a flag, such as --batch_size 4",
                do="name the setting that the value is for",
            )
        typed = TypedOverride(key, read)
        typed.word = name.strip()
        yield typed, before[: len(before) - len(left)]


def _parse_dashed_flag(word: str, left: list[str], fields: RecipeFields) -> tuple[str, Any]:
    name, equals, value = word.lstrip("-").partition("=")
    if not word.startswith("--") or not name:
        raise BadRecipe(f"{word[:80]!r} is no flag", allowed="flags such as --batch_size 4", do="write two dashes")
    if word == PRETRAINED:
        return "model.weights", "pretrained"
    key = resolve_setting_key(name if "." in name else name.replace("-", "_"), fields, flag=f"--{name}")
    if equals:
        return key, _parse_setting_value(key, value, fields)
    if key in PRECISION_SWITCHES or (key in fields.by_key and fields.by_key[key].is_switch):
        return key, _parse_switch_value(key, left)
    if not left:
        allowed = fields.allowed(key, "a precision, such as bf16")
        raise BadRecipe(f"{word} has no value", allowed=allowed, do=f"write {word} VALUE")
    return key, _parse_setting_value(key, left.pop(0), fields)


def _parse_switch_value(key: str, left: list[str]) -> Any:
    """Return True unless the next word is a value; `--mixed_precision bf16` also names the format."""
    if not left:
        return True
    if left[0].lower() in _ON_OFF or (key in PRECISION_SWITCHES and (is_on(left[0]) or is_off(left[0]))):
        return is_on(left.pop(0))
    if key in SWITCHES and not left[0].startswith("-") and "=" not in left[0]:
        return left.pop(0)
    return True


def _parse_setting_value(key: str, text: str, fields: RecipeFields) -> Any:
    setting = fields.by_key.get(key)
    # Quotes are an explicit request for YAML's rules, and words for precision have no setting with a type.
    if setting is None or text[:1] in ("'", '"'):
        return parse_yaml_value(text, key)
    # A text setting takes the word as it is: YAML would read `16` as a number, which the strict schema then refuses.
    if setting.is_text and not (setting.may_be_null and text in NULL):
        return text
    value = parse_yaml_value(text, key)
    return [text] if setting.is_list_of_text and value is not None and not isinstance(value, list) else value
