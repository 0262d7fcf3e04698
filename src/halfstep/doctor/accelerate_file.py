"""accelerate's configuration file, with the meaning that accelerate itself gives it. Imports neither it nor torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from halfstep.doctor.settings import Document, Setting, Source, shown
from halfstep.doctor.sources import read_document, training_settings
from halfstep.errors import BadRecipe
from halfstep.precision.names import Claim, read_claims

WORDS = ("no", "fp16", "bf16", "fp8")
DISTRIBUTED = "distributed_type"
NOT_GIVEN = "(not given)"
POLICIES = ("fsdp_mixed_precision_policy", "mixed_precision_policy")


def from_accelerate(path: str) -> Source:
    """What `accelerate launch --config_file PATH` would make of the file."""
    document = read_document("accelerate", path)
    content = document.content
    found = [setting for setting in (_mixed_precision(document),) if setting]
    simple = {
        "downcast_bf16": "TPU only",
        DISTRIBUTED: "how processes work together; no word on precision",
        "use_cpu": "accelerate runs on the CPU" if content.get("use_cpu") is True else "accelerate picks the device",
    }
    found += [document.setting(key, content[key], means) for key, means in simple.items() if key in content]
    return Source("accelerate", document.place, found + _nested(document), _clipping(document), text=document.text)


def default_place(variables: Mapping[str, str]) -> Path:
    """The file that `accelerate launch` reads when it is told of no other."""
    cache = variables.get("XDG_CACHE_HOME") or "~/.cache"
    home = variables.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def reads_a_boolean(text: str) -> bool:
    """Whether accelerate, whose YAML is version 1.1, finds a truth value where a word should be: `no` needs quotes."""
    import yaml

    try:
        # Only texts that the strict reader has passed come here: short, shallow, without aliases and tags.
        return isinstance(yaml.safe_load(text).get("mixed_precision"), bool)
    except (ValueError, yaml.YAMLError):
        return False


def _mixed_precision(document: Document) -> Setting | None:
    content = document.content
    if content.get("mixed_precision") is not None:
        return _said(document, "mixed_precision", _word(document, content["mixed_precision"]))
    if content.get("fp16") is True:
        return _said(document, "fp16", "fp16")
    if _deepspeed_file(content):
        return None
    claim = claim_of("mixed_precision", NOT_GIVEN, "no")
    return document.setting("mixed_precision", NOT_GIVEN, "accelerate takes this for 'no': fp32", claim)


def _word(document: Document, value: object) -> str:
    """accelerate's word, as its launcher reads it; false is what YAML 1.1 makes of a `no` without quotes."""
    word = "no" if value is False else str(value).lower()
    if word not in WORDS:
        line = document.lines.get("mixed_precision")
        raise BadRecipe(
            f"{document.place}, line {line}: mixed_precision: {shown(value)}",
            allowed=", ".join(WORDS),
            do="write mixed_precision: bf16, or mixed_precision: 'no' with its quotes",
        )
    return word


def _said(document: Document, key: str, word: str) -> Setting:
    means = "accelerate opens no autocast: fp32" if word == "no" else f"accelerate runs prepared models in {word}"
    return document.setting(key, document.content[key], means, claim_of(key, document.content[key], word))


def claim_of(key: str, value: object, word: str) -> Claim:
    """What one of accelerate's words says about precision."""
    return replace(read_claims({"mixed_precision": word})[0], key=key, value=value)


def _nested(document: Document) -> list[Setting]:
    found = []
    fsdp = _section(document.content, "fsdp_config")
    for key in POLICIES:
        if key in fsdp:
            found.append(document.setting(f"fsdp_config.{key}", fsdp[key], "not read by accelerate launch"))
    deepspeed = _section(document.content, "deepspeed_config")
    if _deepspeed_file(document.content):
        means = "DeepSpeed's file decides the precision; give it with --deepspeed"
        key = "deepspeed_config_file"
        found.append(document.setting(f"deepspeed_config.{key}", deepspeed[key], means))
    elif "zero_stage" in deepspeed:
        means = "how much is sharded; no word on precision"
        found.append(document.setting("deepspeed_config.zero_stage", deepspeed["zero_stage"], means))
    return found


def _deepspeed_file(content: Mapping[str, object]) -> bool:
    return bool(_section(content, "deepspeed_config").get("deepspeed_config_file"))


def _section(content: Mapping[str, object], key: str) -> Mapping[str, object]:
    section = content.get(key)
    return section if isinstance(section, Mapping) else {}


def _clipping(document: Document) -> list[Setting]:
    return training_settings(document, "deepspeed_config.", _section(document.content, "deepspeed_config"))
