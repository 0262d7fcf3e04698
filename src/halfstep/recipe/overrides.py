"""Read the settings on a command line: `train.batch_size=4`, `--batch-size 4`, `--compile`. Imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from halfstep.errors import BadRecipe
from halfstep.precision.names import SWITCHES, is_off, is_on
from halfstep.recipe.aliases import FOREIGN_SECTIONS, PRECISION_SWITCHES, PRECISION_WORDS
from halfstep.recipe.fields import allowed_edits, edits, nearest, places, settings_of
from halfstep.recipe.strict_yaml import NULL, read_value

_ON_OFF = ("true", "false")


class Override(NamedTuple):
    """A key and its value; the key is dotted, or one of the words for precision."""

    key: str
    value: Any


class Typed(Override):
    """An override that remembers the word it was typed as."""

    word: str


def read_flags(words: Sequence[str], schema: Any) -> list[Override]:
    """Return the settings that follow RECIPE, assignments and flags mixed, in their order.

    Raises BadRecipe for a word that is no setting, for an unknown key, and for a flag without its value.
    """
    return [one for one, _ in _each(words, schema)]


def typed_again(words: Sequence[str], changes: Sequence[str], schema: Any) -> list[str]:
    """Return the words as typed, without those that `changes` replaces, followed by `changes`."""
    changed = {_one_for_precision(one.key) for one in read_flags(changes, schema)}
    kept = [typed for one, typed in _each(words, schema) if _one_for_precision(one.key) not in changed]
    return [word for typed in kept for word in typed] + list(changes)


def _one_for_precision(key: str) -> str:
    return "precision" if key in PRECISION_WORDS else key


def _each(words: Sequence[str], schema: Any) -> Iterator[tuple[Override, list[str]]]:
    """Yield each setting, with the one or two words that it was typed as."""
    left = list(words)
    while left:
        before = list(left)
        word = left.pop(0)
        if word.startswith("-"):
            one = _flag(word, left, schema)
        elif "=" in word:
            one = read_assignment(word, schema)
        else:
            raise BadRecipe(
                f"{word[:80]!r} is no setting",
                allowed="KEY=VALUE, such as train.batch_size=4, or a flag, such as --batch_size 4",
                do="name the setting that the value is for",
            )
        yield _typed(one, word.partition("=")[0].strip()), before[: len(before) - len(left)]


def read_assignment(text: str, schema: Any) -> Override:
    """Return the setting of an assignment: `train.batch_size=4`, or the short `batch_size=4`."""
    word, _, value = text.partition("=")
    key = key_for(word.strip(), schema)
    return Override(key, _value(key, value, schema))


def translations(overrides: Iterable[Override], schema: Any) -> list[str]:
    """Return a note such as `--use-optimizations is read as train.compile` for each foreign name that was typed."""
    typed = [one for one in overrides if isinstance(one, Typed) and _is_foreign(one, schema)]
    return list(dict.fromkeys(f"{one.word} is read as {one.key}" for one in typed))


def key_for(word: str, schema: Any) -> str:
    """Return the dotted key that a word means; a word for precision stands for itself.

    Raises BadRecipe for an unknown word, with the nearest key, and for one that several settings share.
    """
    section, _, inner = word.partition(".")
    if section in FOREIGN_SECTIONS and inner:
        # `trainer.gradient_clip_val`, as other projects write it.
        return key_for(inner, schema)
    if word in settings_of(schema) or word in PRECISION_WORDS:
        return word
    meant = places(schema).get(word, [])
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise BadRecipe(f"{word} can mean several settings", allowed=", ".join(meant), do=f"write {meant[0]}=...")
    near = nearest_key(word, schema)
    raise BadRecipe(
        f"there is no setting {word[:80]!r}",
        allowed=f"the {len(settings_of(schema))} settings that `halfstep recipes explain` lists",
        do=f"did you mean {near}?" if near else "look for it with halfstep recipes explain NAME",
    )


def nearest_key(word: str, schema: Any) -> str | None:
    """Return the key that was probably meant: first from the same section, then by its last name anywhere."""
    keys = list(settings_of(schema))
    section, _, name = word.rpartition(".")
    same = [key for key in keys if section and key.rpartition(".")[0] == section]
    near = nearest(word, same) if same else None
    if near and edits(name, near.rpartition(".")[2]) <= allowed_edits(name):
        return near
    by_word = {word: word for word in PRECISION_WORDS} | {word: meant[0] for word, meant in places(schema).items()}
    short = nearest(name, by_word)
    return by_word[short] if short else nearest(word, keys)


def apply(raw: Mapping[str, Any], overrides: Iterable[Override]) -> dict[str, Any]:
    """Return a copy of the recipe with the overrides applied."""
    result = copy.deepcopy(dict(raw))
    for key, value in overrides:
        *sections, name = key.split(".")
        place = _section(result, sections)
        if place is not None:
            place[name] = value
    return result


def _section(recipe: dict[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
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


def _typed(one: Override, word: str) -> Typed:
    # A subclass of a NamedTuple cannot add a field, but it has attributes.
    typed = Typed(*one)
    typed.word = word
    return typed


def _is_foreign(one: Typed, schema: Any) -> bool:
    """Return whether a typed name belongs to another project; our own short names, such as `--lr`, need no note."""
    section, _, name = one.word.lstrip("-").replace("-", "_").rpartition(".")
    setting = settings_of(schema).get(one.key)
    return setting is not None and (section in FOREIGN_SECTIONS or name in setting.also)


def _flag(word: str, left: list[str], schema: Any) -> Override:
    name, equals, value = word.lstrip("-").partition("=")
    if not word.startswith("--") or not name:
        raise BadRecipe(f"{word[:80]!r} is no flag", allowed="flags such as --batch_size 4", do="write two dashes")
    key = key_for(name if "." in name else name.replace("-", "_"), schema)
    if equals:
        return Override(key, _value(key, value, schema))
    if key in PRECISION_SWITCHES or (key in settings_of(schema) and settings_of(schema)[key].is_switch):
        return Override(key, _switch(key, left))
    if not left:
        raise BadRecipe(f"{word} has no value", allowed=_allowed(key, schema), do=f"write {word} VALUE")
    return Override(key, _value(key, left.pop(0), schema))


def _switch(key: str, left: list[str]) -> Any:
    """Return True unless the next word is a value; `--mixed_precision bf16` also names the format."""
    if not left:
        return True
    if left[0].lower() in _ON_OFF or (key in PRECISION_SWITCHES and (is_on(left[0]) or is_off(left[0]))):
        return is_on(left.pop(0))
    if key in SWITCHES and not left[0].startswith("-") and "=" not in left[0]:
        return left.pop(0)
    return True


def _value(key: str, text: str, schema: Any) -> Any:
    setting = settings_of(schema).get(key)
    # Quotes are an explicit request for YAML's rules, and words for precision have no setting with a type.
    if setting is None or text[:1] in ("'", '"'):
        return read_value(text, key)
    # A text setting takes the word as it is: YAML would read `16` as a number, which the strict schema then refuses.
    if setting.is_text and not (setting.may_be_null and text in NULL):
        return text
    value = read_value(text, key)
    return [text] if setting.is_list_of_text and value is not None and not isinstance(value, list) else value


def _allowed(key: str, schema: Any) -> str:
    setting = settings_of(schema).get(key)
    return setting.allowed if setting else "a precision, such as bf16"
