"""A file of Hydra or OmegaConf, read as data: `${trainer.precision}` is shown and never evaluated. Imports neither."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from halfstep.doctor.settings import UNRESOLVED, FoundSetting, SettingsFile, SettingSource
from halfstep.doctor.sources.reading import (
    is_precision_word,
    read_lightning_word,
    read_own_word,
    read_training_settings,
)
from halfstep.doctor.sources.recipe import SPEAK_OF_TRAINING, iterate_sections
from halfstep.precision.names import PRECISION_KEYS


def read_hydra_settings(document: SettingsFile) -> SettingSource:
    """Return precision keys at the top and one level down, and the files that the `defaults` list selects."""
    found, training = [], []
    for prefix, section in iterate_sections(document.content):
        found += list(_iterate_hydra_settings(document, prefix, section))
        training += read_training_settings(document, prefix, section)
    targets = [str(section.get("_target_", "")) for _, section in iterate_sections(document.content)]
    tools = frozenset(
        {"lightning"} if any("lightning" in target and target.endswith("Trainer") for target in targets) else ()
    )
    names = list(_list_selected(document.content.get("defaults")))
    return SettingSource("hydra", document.place, found, training, names=names, tools=tools)


def _iterate_hydra_settings(
    document: SettingsFile, prefix: str, section: Mapping[str, object]
) -> Iterator[FoundSetting]:
    targets = "lightning" in str(section.get("_target_", "")).lower()
    for key, value in section.items():
        if (
            key not in PRECISION_KEYS
            or value is None
            or isinstance(value, Mapping)
            or not is_precision_word(key, value)
        ):
            continue
        if key == "precision" and prefix and prefix[:-1].lower() not in SPEAK_OF_TRAINING:
            continue
        if "${" in str(value):
            yield document.setting(prefix + key, value, UNRESOLVED)
            continue
        reading = (
            read_lightning_word(prefix + key, value) if targets and key == "precision" else read_own_word(key, value)
        )
        yield document.setting(prefix + key, value, reading.means).read_as(reading)


def _list_selected(defaults: object) -> Iterator[str]:
    """Yield `group/option` for each entry of a defaults list; what an interpolation selects is not known."""
    for entry in defaults if isinstance(defaults, list) else ():
        pairs = entry.items() if isinstance(entry, Mapping) else [("", entry)]
        for group, option in pairs:
            if isinstance(option, str) and option != "_self_" and "${" not in f"{group}{option}":
                place = str(group).removeprefix("override ").removeprefix("optional ").partition("@")[0]
                yield f"{place}/{option}".lstrip("/").removesuffix(".yaml") + ".yaml"
