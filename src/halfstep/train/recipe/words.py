"""Other people's words in a recipe: taken out, put in their place, and reported. Imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from halfstep.errors import BadRecipe, Contradiction
from halfstep.precision.names import Named, read_settings
from halfstep.train.recipe.fields import places, sections_of, settings_of

PRECISION_SWITCHES = ("use_amp", "amp", "mixed_precision", "fp16", "bf16", "fp32")
PRECISION_WORDS = (*PRECISION_SWITCHES, "precision", "amp_dtype", "precision_type")
FOREIGN_SECTIONS = ("trainer", "training")
"""Where other projects keep what is at the top of a recipe, or in its sections."""
_ONLY_ON = ("use_amp", "amp", "mixed_precision")
_FORMATS = ("amp_dtype", "precision_type")


class Translated(NamedTuple):
    """A recipe in our words only, what it says about precision, and what was translated."""

    raw: dict[str, Any]
    precision: dict[str, Any]
    notes: list[str]


def translate(raw: Mapping[str, Any], schema: Any) -> Translated:
    """Put every word that we know in its place; words that nobody knows stay, for validation to name."""
    result = copy.deepcopy(dict(raw))
    precision = _take_precision(result)
    moved = [f"{word} is read as {key}" for word, key in _moves(result, schema)]
    for section in FOREIGN_SECTIONS:
        if result.get(section) in ({}, None):
            result.pop(section, None)
    return Translated(result, precision, ["; ".join(moved)] if moved else [])


def read_precision_words(words: Mapping[str, Any]) -> Named | None:
    """What the words for precision come to together, or a Contradiction."""
    settings = dict(words)
    if settings.pop("fp32", None) is True:
        _same("fp32", "fp32", "precision", settings.get("precision", "fp32"))
        settings["precision"] = "fp32"
    for key, value in settings.items():
        if isinstance(value, list) or (isinstance(value, dict) and "enabled" not in value):
            raise BadRecipe(f"{key} holds a {type(value).__name__}", allowed="a precision, or true", do=f"{key}: bf16")
    return read_settings(settings)


def read_over(line: Mapping[str, Any], recipe: Mapping[str, Any]) -> Named | None:
    """The command line's words over the recipe's. A switch that names no format takes the recipe's."""
    if line and all(key in _ONLY_ON and value is True for key, value in line.items()):
        written = read_precision_words(recipe)
        if written and written.name in ("bf16", "fp16"):
            return written
        line = {**line, **{key: recipe[key] for key in _FORMATS if key in recipe}}
    return read_precision_words(line or recipe)


def _take_precision(raw: dict[str, Any]) -> dict[str, Any]:
    found = {word: raw.pop(word) for word in PRECISION_WORDS if word in raw}
    for section in FOREIGN_SECTIONS:
        inner = raw.get(section)
        if not isinstance(inner, dict):
            continue
        for word in [word for word in PRECISION_WORDS if word in inner]:
            _same(f"{section}.{word}", inner[word], word, found.get(word, inner[word]))
            found[word] = inner.pop(word)
    return found


def _moves(raw: dict[str, Any], schema: Any) -> Iterator[tuple[str, str]]:
    """Move each word that has one meaning, and say which went where."""
    top, known, sections = set(schema.model_fields), places(schema), sections_of(schema)
    for section in sections:
        if isinstance(raw.get(section), str) and f"{section}.name" in settings_of(schema):
            raw[section] = {"name": raw[section]}
            yield section, f"{section}.name"
    for word in [word for word in raw if word not in top and word not in FOREIGN_SECTIONS]:
        if len(known.get(word, ())) == 1:
            yield from _move(raw, raw, word, word, known[word][0])
    for section in FOREIGN_SECTIONS:
        inner: Any = raw.get(section)
        for word in list(inner) if isinstance(inner, dict) else ():
            if len(known.get(word, ())) == 1:
                yield from _move(raw, inner, word, f"{section}.{word}", known[word][0])
    yield from _names_within_sections(raw, schema)


def _names_within_sections(raw: dict[str, Any], schema: Any) -> Iterator[tuple[str, str]]:
    for key, setting in settings_of(schema).items():
        section = key.rpartition(".")[0]
        inner: Any = raw.get(section)
        for word in setting.also if isinstance(inner, dict) else ():
            if word in inner:
                yield from _move(raw, inner, word, f"{section}.{word}", key)


def _move(raw: dict[str, Any], holder: dict[str, Any], word: str, written: str, key: str) -> Iterator[tuple[str, str]]:
    section, _, name = key.rpartition(".")
    place = raw.get(section) if section else raw
    if place is None:
        place = raw[section] = {}
    if not isinstance(place, dict):
        return
    value = holder[word]
    _same(written, value, key, place.get(name, value))
    place[name] = value
    if (holder is not place) or word != name:
        del holder[word]
    yield written, key


def _same(one: str, value: Any, other: str, against: Any) -> None:
    if value != against:
        raise Contradiction(
            f"{one} says {value!r}, but {other} says {against!r}",
            allowed="one value for one setting",
            do=f"delete {one} or {other}",
        )
