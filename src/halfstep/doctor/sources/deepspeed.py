"""DeepSpeed's configuration file. Imports neither DeepSpeed nor torch."""

from __future__ import annotations

import json
from collections.abc import Mapping

from halfstep.doctor.settings import FoundSetting, SettingsFile, SettingSource
from halfstep.doctor.sources.reading import describe_claim, read_document, read_section_claims, read_training_settings
from halfstep.errors import BadRecipe

_OLD_BF16 = "bfloat16"
"""DeepSpeed's former spelling of bf16, which it still reads."""


def from_deepspeed(path: str, text: str | None = None) -> SettingSource:
    """Read `fp16.enabled` and `bf16.enabled` of a DeepSpeed JSON file; `auto` leaves them to the launcher.

    Raise `BadRecipe` if the file is not JSON.
    """
    return read_deepspeed_settings(read_document("deepspeed", path, text))


def read_deepspeed_settings(document: SettingsFile) -> SettingSource:
    """Return the switches of DeepSpeed's formats, its scaler words and clipping; raise `BadRecipe` if not JSON."""
    try:
        # The YAML reader accepts more than JSON, and DeepSpeed does not.
        json.loads(document.text)
    except ValueError as error:
        raise BadRecipe(
            f"{document.place} is not JSON: {error}"[:300],
            allowed="DeepSpeed's configuration, one JSON object",
            do="fix the line, and check it with python -m json.tool " + document.place,
        ) from None
    sections = {key: value for key, value in document.content.items() if isinstance(value, Mapping)}
    formats = {key: value for key, value in sections.items() if key in ("fp16", "bf16", _OLD_BF16)}
    found = [_build_switch_setting(document, key, value) for key, value in formats.items() if "enabled" in value]
    found += [
        document.setting(f"{key}.{word}", value[word], SCALER[word])
        for key, value in formats.items()
        for word in SCALER
        if word in value
    ]
    stage = sections.get("zero_optimization", {}).get("stage")
    if stage is not None:
        found.append(document.setting("zero_optimization.stage", stage, "how much is sharded; sets no precision"))
    return SettingSource("deepspeed", document.place, found, read_training_settings(document, "", document.content))


SCALER = {
    "loss_scale": "0 adapts the loss scale; another number fixes it",
    "initial_scale_power": "the first loss scale is 2 to this power",
    "loss_scale_window": "steps without overflow before the loss scale grows",
    "hysteresis": "overflows before the loss scale falls",
    "min_loss_scale": "the loss scale never falls below this",
}
"""DeepSpeed's words for the loss scale, and their meaning."""


def _build_switch_setting(document: SettingsFile, key: str, value: Mapping[str, object]) -> FoundSetting:
    claim = next(iter(read_section_claims(document, key + ".", {"bf16" if key == _OLD_BF16 else key: value})), None)
    means = describe_claim(claim) if claim else "left to the launcher"
    return document.setting(f"{key}.enabled", value["enabled"], means, claim)
