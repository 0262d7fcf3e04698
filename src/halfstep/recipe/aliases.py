"""Translate the setting names of other projects in a recipe, and report each translation. Imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from halfstep.errors import BadRecipe, Contradiction
from halfstep.precision.names import FLAGS, FORMATS, SWITCHES, Named, is_off, is_on, read_claims, read_settings
from halfstep.recipe.fields import places, sections_of, settings_of, short_for

PRECISION_SWITCHES = (*SWITCHES, *FLAGS)
PRECISION_WORDS = (*PRECISION_SWITCHES, "precision", *FORMATS)
FOREIGN_SECTIONS = ("trainer", "training", "globals")
"""The sections in which other projects keep settings that a recipe has at the top level or in its own sections."""


class Translated(NamedTuple):
    """A recipe with known names only, its words for precision, and notes on what was translated."""

    raw: dict[str, Any]
    precision: dict[str, Any]
    notes: list[str]


def translate(raw: Mapping[str, Any], schema: Any) -> Translated:
    """Move every known foreign name to its setting; leave unknown names for validation to report.

    Raises Contradiction if two names of one setting have different values.
    """
    # Names are moved within nested mappings, which belong to the caller.
    result = copy.deepcopy(dict(raw))
    precision = _take_precision(result)
    moved = [f"{word} is read as {key}" for word, key in _moves(result, schema)]
    for section in FOREIGN_SECTIONS:
        if result.get(section) in ({}, None):
            result.pop(section, None)
    return Translated(result, precision, ["; ".join(moved)] if moved else [])


def read_precision_words(words: Mapping[str, Any]) -> Named | None:
    """Return the precision that the words for precision mean together, or None without any.

    Raises Contradiction if they disagree, and BadRecipe for a value that is no precision.
    """
    for key, value in words.items():
        if isinstance(value, list) or (isinstance(value, dict) and "enabled" not in value):
            raise BadRecipe(f"{key} holds a {type(value).__name__}", allowed="a precision, or true", do=f"{key}: bf16")
    return read_settings(words)


def same_precision(key: str, one: Any, other: Any) -> bool:
    """Return whether two values of one key mean the same, as `bf16` and `bf16-mixed` do."""
    if one == other:
        return True
    meanings = [[(claim.meaning, claim.denies) for claim in read_claims({key: value})] for value in (one, other)]
    return meanings[0] == meanings[1]


def read_over(line: Mapping[str, Any], recipe: Mapping[str, Any]) -> Named | None:
    """Return the precision of the command line over the recipe's.

    A switch without a format uses a format from the recipe.
    """
    # `--amp` over `amp_dtype: float16` means fp16: the line only switches on what the recipe describes.
    if line and all(key in SWITCHES and is_on(value) for key, value in line.items()):
        written = read_precision_words(recipe)
        if written and written.name in ("bf16", "fp16"):
            return written
        # A flag that the recipe denies (`bf16: false`) still excludes its format.
        denied = [key for key in FLAGS if is_off(recipe.get(key))]
        line = {**line, **{key: recipe[key] for key in (*FORMATS, *denied) if key in recipe}}
    return read_precision_words(line or recipe)


def _take_precision(raw: dict[str, Any]) -> dict[str, Any]:
    found = {word: raw.pop(word) for word in PRECISION_WORDS if word in raw}
    for section in FOREIGN_SECTIONS:
        inner = raw.get(section)
        if not isinstance(inner, dict):
            continue
        for word in [word for word in PRECISION_WORDS if word in inner]:
            value = inner.pop(word)
            if not same_precision(word, value, found.setdefault(word, value)):
                _same(f"{section}.{word}", value, word, found[word])
    return found


def _moves(raw: dict[str, Any], schema: Any) -> Iterator[tuple[str, str]]:
    """Move each name that has exactly one meaning, and yield where it was and its key."""
    top, known, sections = set(schema.model_fields), places(schema), sections_of(schema)
    for section in sections:
        key = short_for(section, settings_of(schema)) if isinstance(raw.get(section), str) else None
        if key is not None:
            raw[section] = {key.rpartition(".")[2]: raw[section]}
            yield section, key
    # A name that several settings share stays where it is: validation reports it and lists the candidates.
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
