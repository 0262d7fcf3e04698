"""accelerate's configuration file, interpreted as accelerate does. Imports neither accelerate nor torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from halfstep.doctor.settings import FoundSetting, SettingsFile, SettingSource, format_found_value
from halfstep.doctor.sources.reading import read_document, read_training_settings
from halfstep.errors import BadRecipe
from halfstep.precision.names import PrecisionClaim, parse_precision_claims

WORDS = ("no", "fp16", "bf16", "fp8")
DISTRIBUTED = "distributed_type"
NOT_GIVEN = "(not given)"
POLICIES = ("fsdp_mixed_precision_policy", "mixed_precision_policy")


def from_accelerate(path: str, text: str | None = None) -> SettingSource:
    """Read the file as `accelerate launch --config_file PATH` would."""
    return read_accelerate_settings(read_document("accelerate", path, text))


def read_accelerate_settings(document: SettingsFile) -> SettingSource:
    """Return the settings of accelerate's file, with accelerate's own meaning."""
    content = document.content
    found = [setting for setting in (_read_mixed_precision(document),) if setting]
    simple = {
        "downcast_bf16": "TPU only",
        DISTRIBUTED: "how processes work together; sets no precision",
        "gpu_ids": "the GPUs that accelerate launch uses",
        "use_cpu": "accelerate runs on the CPU" if content.get("use_cpu") is True else "accelerate picks the device",
    }
    found += [document.setting(key, content[key], means) for key, means in simple.items() if key in content]
    clipping = _find_section(content, "deepspeed_config")
    return SettingSource(
        "accelerate",
        document.place,
        found + _read_nested(document),
        read_training_settings(document, "deepspeed_config.", clipping),
        text=document.text,
        names=[str(clipping["deepspeed_config_file"])] if _is_deepspeed_file(content) else [],
    )


def find_default_config(variables: Mapping[str, str]) -> Path:
    """Return the file `accelerate launch` reads without --config_file."""
    # The same lookup as in huggingface_hub and accelerate.
    cache = variables.get("XDG_CACHE_HOME") or "~/.cache"
    home = variables.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def has_unquoted_boolean(text: str) -> bool:
    """Return whether accelerate's YAML 1.1 parser reads a boolean where a word should be: `no` needs quotes."""
    import yaml

    try:
        # Safe: the strict reader has accepted the text, so it is short, shallow, and without aliases and tags.
        return isinstance(yaml.safe_load(text).get("mixed_precision"), bool)
    except (ValueError, yaml.YAMLError):
        return False


def _read_mixed_precision(document: SettingsFile) -> FoundSetting | None:
    content = document.content
    if content.get("mixed_precision") is not None:
        return _read_key(document, "mixed_precision", _read_accelerate_word(document, content["mixed_precision"]))
    # A key of old versions of accelerate, which the launcher still reads.
    if content.get("fp16") is True:
        return _read_key(document, "fp16", "fp16")
    if _is_deepspeed_file(content):
        return None
    claim = build_accelerate_claim("mixed_precision", NOT_GIVEN, "no")
    return document.setting("mixed_precision", NOT_GIVEN, "accelerate reads this as 'no': fp32", claim)


def _read_accelerate_word(document: SettingsFile, value: object) -> str:
    """Return accelerate's word as its launcher reads it; YAML 1.1 turns an unquoted `no` into false."""
    word = "no" if value is False else str(value).lower()
    if word not in WORDS:
        line = document.lines.get("mixed_precision")
        raise BadRecipe(
            f"{document.place}, line {line}: mixed_precision: {format_found_value(value)}",
            allowed=", ".join(WORDS),
            do="write mixed_precision: bf16, or mixed_precision: 'no' with its quotes",
            id="unknown-word",
            line=line,
        )
    return word


def _read_key(document: SettingsFile, key: str, word: str) -> FoundSetting:
    means = "accelerate opens no autocast: fp32" if word == "no" else f"accelerate runs prepared models in {word}"
    return document.setting(key, document.content[key], means, build_accelerate_claim(key, document.content[key], word))


def build_accelerate_claim(key: str, value: object, word: str) -> PrecisionClaim:
    """Return the claim that one of accelerate's words makes about precision."""
    return replace(parse_precision_claims({"mixed_precision": word})[0], key=key, value=value)


def _read_nested(document: SettingsFile) -> list[FoundSetting]:
    found = []
    fsdp = _find_section(document.content, "fsdp_config")
    for key in POLICIES:
        if key in fsdp:
            found.append(document.setting(f"fsdp_config.{key}", fsdp[key], "not read by accelerate launch"))
    deepspeed = _find_section(document.content, "deepspeed_config")
    if _is_deepspeed_file(document.content):
        means = "DeepSpeed's file decides the precision; give it with --deepspeed"
        key = "deepspeed_config_file"
        found.append(document.setting(f"deepspeed_config.{key}", deepspeed[key], means))
    elif "zero_stage" in deepspeed:
        means = "how much is sharded; sets no precision"
        found.append(document.setting("deepspeed_config.zero_stage", deepspeed["zero_stage"], means))
    return found


def _is_deepspeed_file(content: Mapping[str, object]) -> bool:
    return bool(_find_section(content, "deepspeed_config").get("deepspeed_config_file"))


def _find_section(content: Mapping[str, object], key: str) -> Mapping[str, object]:
    section = content.get(key)
    return section if isinstance(section, Mapping) else {}
