"""A file of Lightning's command line, read as data. Imports no Lightning."""

from __future__ import annotations

from collections.abc import Mapping

from halfstep.doctor.settings import FoundSetting, SettingsFile, SettingSource
from halfstep.doctor.sources.reading import read_lightning_word, read_training_settings

_ON_CPU = ("cpu",)
SUBCOMMANDS = ("fit", "validate", "test", "predict")


def read_lightning_settings(document: SettingsFile) -> SettingSource:
    """Return what a file of LightningCLI says under `trainer`, also below a subcommand such as `fit`."""
    found, training = [], []
    for outer in ("", *SUBCOMMANDS):
        holder = document.content.get(outer, {}) if outer else document.content
        trainer = holder.get("trainer") if isinstance(holder, Mapping) else None
        if isinstance(trainer, Mapping):
            prefix = f"{outer}.trainer.".lstrip(".")
            found += _read_trainer_settings(document, prefix, trainer)
            training += read_training_settings(document, prefix, trainer)
    return SettingSource("lightning", document.place, found, training, tools=frozenset({"lightning cli"}))


def _read_trainer_settings(document: SettingsFile, prefix: str, trainer: Mapping[str, object]) -> list[FoundSetting]:
    found = []
    if trainer.get("precision") is not None:
        key = f"{prefix}precision"
        reading = read_lightning_word(key, trainer["precision"])
        found.append(document.setting(key, trainer["precision"], reading.means).read_as(reading))
    if trainer.get("accelerator") is not None:
        means = "Lightning runs on the CPU" if trainer["accelerator"] in _ON_CPU else "Lightning's choice of device"
        found.append(document.setting(f"{prefix}accelerator", trainer["accelerator"], means))
    return found
