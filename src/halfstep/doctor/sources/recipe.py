"""A recipe of halfstep, or the YAML of any project: precision keys, learning rate and clipping. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from halfstep.doctor.settings import Document, FoundSetting, SettingSource
from halfstep.doctor.sources.reading import claims_in, meaning, read_document, training_settings
from halfstep.precision.names import FLAGS, PRECISION_KEYS, SWITCHES

SPEAK_OF_TRAINING = frozenset(
    {"trainer", "train", "training", "train_args", "training_args", "trainer_args", "train_config", "fit", "run", "amp"}
)
"""Sections in which `precision` is a number format; elsewhere, such as in `metrics`, it may be anything."""


def from_recipe(name_or_path: str) -> SettingSource:
    """Read precision keys, learning rate and clipping at the top level and one level down."""
    return recipe_settings(read_document("recipe", name_or_path))


def recipe_settings(document: Document) -> SettingSource:
    """Return precision keys, learning rate and clipping of a recipe, or of a YAML file of any project."""
    found, training = [], []
    for prefix, section in sections(document.content):
        found += _precision_settings(document, prefix, section)
        training += training_settings(document, prefix, section)
    content = document.content
    return SettingSource(
        "recipe", document.place, found, training, halfstep="task" in content, guard=content.get("guard")
    )  # fmt: skip


def sections(content: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the keys at the top, and those of each section with its prefix."""
    flat = {key: value for key, value in content.items() if not _is_section(key, value)}
    yield "", flat
    for name, value in content.items():
        if name not in flat:
            yield f"{name}.", dict(value)


def _is_section(key: str, value: object) -> bool:
    """Return whether a mapping is a section of settings; `amp: {enabled: false}` is a switch instead."""
    return isinstance(value, Mapping) and not (key in (*SWITCHES, *FLAGS) and "enabled" in value)


def _precision_settings(document: Document, prefix: str, section: Mapping[str, Any]) -> list[FoundSetting]:
    spoken = [key for key, value in section.items() if value is not None and not _is_section(key, value)]
    keys = [key for key in spoken if key in PRECISION_KEYS]
    # `metrics: {precision: 4}` is not a number format.
    if prefix and prefix[:-1].lower() not in SPEAK_OF_TRAINING:
        keys = [key for key in keys if key != "precision"]
    chosen = {key: section[key] for key in keys}
    claims = {claim.key: claim for claim in claims_in(document, prefix, chosen)}
    return [document.setting(prefix + key, chosen[key], meaning(claims.get(key)), claims.get(key)) for key in keys]
