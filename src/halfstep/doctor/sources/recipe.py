"""A recipe of halfstep, or the YAML of any project: precision keys, learning rate and clipping. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from halfstep.doctor.settings import PROJECT, FoundSetting, SettingsFile, SettingSource, WordReading
from halfstep.doctor.sources.reading import (
    convert_to_halfstep_claim,
    describe_claim,
    is_precision_word,
    read_document,
    read_own_word,
    read_section_claims,
    read_training_settings,
)
from halfstep.precision.names import FLAGS, FORMATS, PRECISION_KEYS, SWITCHES, is_off

SPEAK_OF_TRAINING = frozenset(
    {"trainer", "train", "training", "train_args", "training_args", "trainer_args", "train_config", "fit", "run", "amp"}
)
"""Sections in which `precision` is a number format; elsewhere, such as in `metrics`, it may be anything."""


def from_recipe(name_or_path: str, text: str | None = None) -> SettingSource:
    """Read precision keys, learning rate and clipping at the top level and one level down."""
    return read_recipe_settings(read_document("recipe", name_or_path, text))


def read_recipe_settings(document: SettingsFile) -> SettingSource:
    """Return precision keys, learning rate and clipping of a recipe, or of a YAML file of any project."""
    found, training = [], []
    for prefix, section in iterate_sections(document.content):
        found += _read_precision_settings(document, prefix, section)
        training += read_training_settings(document, prefix, section)
    content = document.content
    return SettingSource(
        "recipe", document.place, found, training, halfstep="task" in content, guard=content.get("guard")
    )  # fmt: skip


def read_project_settings(document: SettingsFile) -> SettingSource:
    """Return the same of a file that the project's own code reads: a word that is not known claims nothing."""
    found, training = [], []
    for prefix, section in iterate_sections(document.content):
        keys = [key for key in _list_precision_keys(prefix, section) if is_precision_word(key, section[key])]
        idle = FORMATS if any(is_off(section.get(switch)) for switch in SWITCHES) else ()
        for key in keys:
            reading = read_own_word(key, section[key]) if key not in idle else WordReading(None, describe_claim(None))
            setting = document.setting(prefix + key, section[key], reading.means).read_as(reading)
            found.append(replace(setting, tool=PROJECT))
        training += read_training_settings(document, prefix, section)
    return SettingSource("recipe", document.place, found, training)


def iterate_sections(content: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the keys at the top, and those of each section with its prefix."""
    flat = {key: value for key, value in content.items() if not _is_section(key, value)}
    yield "", flat
    for name, value in content.items():
        if name not in flat and isinstance(value, Mapping):
            yield f"{name}.", dict(value)


def _is_section(key: str, value: object) -> bool:
    """Return whether a mapping is a section of settings; `amp: {enabled: false}` is a switch instead."""
    return isinstance(value, Mapping) and not (key in (*SWITCHES, *FLAGS) and "enabled" in value)


def _list_precision_keys(prefix: str, section: Mapping[str, object]) -> list[str]:
    spoken = [key for key, value in section.items() if value is not None and not _is_section(key, value)]
    keys = [key for key in spoken if key in PRECISION_KEYS]
    # `metrics: {precision: 4}` is not a number format.
    if prefix and prefix[:-1].lower() not in SPEAK_OF_TRAINING:
        keys = [key for key in keys if key != "precision"]
    return keys


def _read_precision_settings(document: SettingsFile, prefix: str, section: Mapping[str, object]) -> list[FoundSetting]:
    keys = _list_precision_keys(prefix, section)
    chosen = {key: section[key] for key in keys}
    claims = {claim.key: claim for claim in read_section_claims(document, prefix, chosen)}
    if "task" in document.content:  # a recipe of halfstep
        claims = {key: own for key, claim in claims.items() if (own := convert_to_halfstep_claim(claim))}
    return [
        document.setting(prefix + key, chosen[key], describe_claim(claims.get(key)), claims.get(key)) for key in keys
    ]
