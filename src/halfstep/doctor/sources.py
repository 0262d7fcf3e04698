"""Read settings from a recipe, accelerate's file, DeepSpeed's file and the environment.

Foreign files are read as data with the strict YAML reader, but not validated against halfstep's schema: unknown keys
are ignored. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfstep.doctor.settings import Document, FoundSetting, Kind, SettingSource, printable, shown
from halfstep.errors import BadRecipe, HalfstepError, MissingExtra, unknown_name
from halfstep.precision.names import FLAGS, PRECISION_KEYS, SWITCHES, Claim, read_claims

# -- accelerate file --------------------------------------------------------------------------------------------------
# accelerate's configuration file, interpreted as accelerate does. Imports neither accelerate nor torch.


WORDS = ("no", "fp16", "bf16", "fp8")
DISTRIBUTED = "distributed_type"
NOT_GIVEN = "(not given)"
POLICIES = ("fsdp_mixed_precision_policy", "mixed_precision_policy")


def from_accelerate(path: str) -> SettingSource:
    """Read the file as `accelerate launch --config_file PATH` would."""
    document = read_document("accelerate", path)
    content = document.content
    found = [setting for setting in (_mixed_precision(document),) if setting]
    simple = {
        "downcast_bf16": "TPU only",
        DISTRIBUTED: "how processes work together; no word on precision",
        "gpu_ids": "the GPUs that accelerate launch uses",
        "use_cpu": "accelerate runs on the CPU" if content.get("use_cpu") is True else "accelerate picks the device",
    }
    found += [document.setting(key, content[key], means) for key, means in simple.items() if key in content]
    clipping = _section(content, "deepspeed_config")
    return SettingSource(
        "accelerate",
        document.place,
        found + _nested(document),
        training_settings(document, "deepspeed_config.", clipping),
        text=document.text,
    )


def default_place(variables: Mapping[str, str]) -> Path:
    """Return the file `accelerate launch` reads without --config_file."""
    # The same lookup as in huggingface_hub and accelerate.
    cache = variables.get("XDG_CACHE_HOME") or "~/.cache"
    home = variables.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def reads_a_boolean(text: str) -> bool:
    """Return whether accelerate's YAML 1.1 parser reads a boolean where a word should be: `no` needs quotes."""
    import yaml

    try:
        # Safe: the strict reader has accepted the text, so it is short, shallow, and without aliases and tags.
        return isinstance(yaml.safe_load(text).get("mixed_precision"), bool)
    except (ValueError, yaml.YAMLError):
        return False


def _mixed_precision(document: Document) -> FoundSetting | None:
    content = document.content
    if content.get("mixed_precision") is not None:
        return _said(document, "mixed_precision", _word(document, content["mixed_precision"]))
    # A key of old versions of accelerate, which the launcher still reads.
    if content.get("fp16") is True:
        return _said(document, "fp16", "fp16")
    if _deepspeed_file(content):
        return None
    claim = claim_of("mixed_precision", NOT_GIVEN, "no")
    return document.setting("mixed_precision", NOT_GIVEN, "accelerate takes this for 'no': fp32", claim)


def _word(document: Document, value: object) -> str:
    """Return accelerate's word as its launcher reads it; YAML 1.1 turns an unquoted `no` into false."""
    word = "no" if value is False else str(value).lower()
    if word not in WORDS:
        line = document.lines.get("mixed_precision")
        raise BadRecipe(
            f"{document.place}, line {line}: mixed_precision: {shown(value)}",
            allowed=", ".join(WORDS),
            do="write mixed_precision: bf16, or mixed_precision: 'no' with its quotes",
        )
    return word


def _said(document: Document, key: str, word: str) -> FoundSetting:
    means = "accelerate opens no autocast: fp32" if word == "no" else f"accelerate runs prepared models in {word}"
    return document.setting(key, document.content[key], means, claim_of(key, document.content[key], word))


def claim_of(key: str, value: object, word: str) -> Claim:
    """Return the claim that one of accelerate's words makes about precision."""
    return replace(read_claims({"mixed_precision": word})[0], key=key, value=value)


def _nested(document: Document) -> list[FoundSetting]:
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


# -- environment ------------------------------------------------------------------------------------------------------
# Environment variables that decide a precision; no other variable is read. Imports no torch.


MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
USE_CPU = "ACCELERATE_USE_CPU"
TORCH_TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
NVIDIA_TF32 = "NVIDIA_TF32_OVERRIDE"

ON = frozenset({"1", "true", "yes", "on", "y", "t"})


def from_environment(variables: Mapping[str, str]) -> SettingSource:
    """Read the variables of accelerate, torch, NVIDIA's libraries and XLA."""
    found = [read(name, variables[name]) for name, read in _READERS.items() if variables.get(name)]
    return SettingSource("environment", "the environment", found)


def _accelerate_variable(name: str, value: str) -> FoundSetting:
    if value.lower() not in WORDS:
        raise unknown_name(name, printable(value), WORDS)
    claim = claim_of(name, value, value.lower())
    return _setting(name, value, f"accelerate: {meaning(claim)}", claim)


def _nvidia_tf32(name: str, value: str) -> FoundSetting:
    if value != "0":
        return _setting(name, value, "the libraries' own choice")
    claim = Claim(name, value, denies=frozenset({"tf32"}), otherwise="fp32")
    return _setting(name, value, "no tf32 in any NVIDIA library", claim)


def _torch_tf32(name: str, value: str) -> FoundSetting:
    return _setting(name, value, "fp32 products run as tf32" if value == "1" else "no effect: only 1 switches")


def _use_cpu(name: str, value: str) -> FoundSetting:
    return _setting(name, value, "accelerate runs on the CPU" if value.lower() in ON else "accelerate picks the device")


def _bf16_on_tpu(name: str, value: str) -> FoundSetting:
    return _setting(name, value, "TPU only: fp32 numbers are held as bf16" if value != "0" else "off")


_READERS: dict[str, Callable[[str, str], FoundSetting]] = {
    MIXED_PRECISION: _accelerate_variable,
    USE_CPU: _use_cpu,
    TORCH_TF32: _torch_tf32,
    NVIDIA_TF32: _nvidia_tf32,
    "XLA_USE_BF16": _bf16_on_tpu,
    "XLA_DOWNCAST_BF16": _bf16_on_tpu,
}


def _setting(name: str, value: str, means: str, claim: Claim | None = None) -> FoundSetting:
    return FoundSetting("environment", "the environment", name, value, means, claim=claim)


# -- sources ----------------------------------------------------------------------------------------------------------


LEARNING_RATE = frozenset({"lr", "learning_rate", "base_lr", "max_lr"})
CLIPPING = frozenset(
    {
        "clip_norm",
        "clip_value",
        "clip_grad",
        "clip_grad_norm",
        "grad_clip",
        "grad_clip_norm",
        "grad_norm_clip",
        "gradient_clip",
        "gradient_clip_val",
        "gradient_clipping",
        "max_grad_norm",
        "max_norm",
    }
)
_SPEAK_OF_TRAINING = frozenset(
    {"trainer", "train", "training", "train_args", "training_args", "trainer_args", "train_config", "fit", "run", "amp"}
)
"""Sections in which `precision` is a number format; elsewhere, such as in `metrics`, it may be anything."""


_OLD_BF16 = "bfloat16"
"""DeepSpeed's former spelling of bf16, which it still reads."""


def read_document(kind: Kind, path: str) -> Document:
    """Read a file as plain data; recipes may be given by name.

    Raise `MissingExtra` without a YAML reader, and the reader's errors for an invalid file.
    """
    try:
        from halfstep.recipe.sources import is_path, recipe_text
        from halfstep.recipe.strict_yaml import read_with_lines
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            f"{missing.name} is not installed, and YAML cannot be read without it",
            allowed="an installation with the extra [train]",
            do="pip install halfstep[train]",
        ) from None

    # A bare name is a shipped recipe to `recipe_text`; with ./ it is a file.
    place = path if kind == "recipe" or is_path(path) else f"./{path}"
    text = recipe_text(place)[1]
    # JSON is valid YAML except for tabs between tokens; tabs inside strings are invalid JSON anyway.
    read = read_with_lines(text.replace("\t", " ") if path.endswith(".json") else text, place)
    return Document(kind, place, read.content, read.lines, text)


def from_recipe(name_or_path: str) -> SettingSource:
    """Read precision keys, learning rate and clipping at the top level and one level down."""
    document = read_document("recipe", name_or_path)
    found, training = [], []
    for prefix, section in _sections(document.content):
        found += _precision_settings(document, prefix, section)
        training += training_settings(document, prefix, section)
    content = document.content
    return SettingSource(
        "recipe", document.place, found, training, halfstep="task" in content, guard=content.get("guard")
    )  # fmt: skip


def _sections(content: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
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
    if prefix and prefix[:-1].lower() not in _SPEAK_OF_TRAINING:
        keys = [key for key in keys if key != "precision"]
    chosen = {key: section[key] for key in keys}
    claims = {claim.key: claim for claim in _claims(document, prefix, chosen)}
    return [document.setting(prefix + key, chosen[key], meaning(claims.get(key)), claims.get(key)) for key in keys]


def _claims(document: Document, prefix: str, settings: Mapping[str, Any]) -> list[Claim]:
    try:
        return read_claims(settings)
    except HalfstepError as error:
        section = f" ({printable(prefix[:-1])})" if prefix else ""
        raise type(error)(f"{document.place}{section}: {error.given}", allowed=error.allowed, do=error.do) from None


def training_settings(document: Document, prefix: str, section: Mapping[str, Any]) -> list[FoundSetting]:
    """Return the learning rate and clipping where they are numbers."""
    found = []
    for key, value in section.items():
        # bool is a subclass of int.
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and key in LEARNING_RATE | CLIPPING:
            what = "learning rate" if key in LEARNING_RATE else "gradient clipping"
            found.append(document.setting(prefix + key, value, what))
    return found


def from_deepspeed(path: str) -> SettingSource:
    """Read `fp16.enabled` and `bf16.enabled` of a DeepSpeed JSON file; `auto` leaves them to the launcher.

    Raise `BadRecipe` where the file is not JSON.
    """
    document = read_document("deepspeed", path)
    try:
        # The YAML reader accepts more than JSON, and DeepSpeed does not.
        json.loads(document.text)
    except ValueError as error:
        raise BadRecipe(
            f"{document.place} is not JSON: {error}"[:300],
            allowed="DeepSpeed's configuration, one JSON object",
            do="mend the line, and try it with python -m json.tool " + document.place,
        ) from None
    sections = {key: value for key, value in document.content.items() if isinstance(value, Mapping)}
    formats = {key: value for key, value in sections.items() if key in ("fp16", "bf16", _OLD_BF16)}
    found = [_switch_of(document, key, value) for key, value in formats.items() if "enabled" in value]
    stage = sections.get("zero_optimization", {}).get("stage")
    if stage is not None:
        found.append(document.setting("zero_optimization.stage", stage, "how much is sharded; no word on precision"))
    return SettingSource("deepspeed", document.place, found, training_settings(document, "", document.content))


def _switch_of(document: Document, key: str, value: Mapping[str, Any]) -> FoundSetting:
    claim = next(iter(_claims(document, key + ".", {"bf16" if key == _OLD_BF16 else key: value})), None)
    means = meaning(claim) if claim else "left to the launcher"
    return document.setting(f"{key}.enabled", value["enabled"], means, claim)


def meaning(claim: Claim | None) -> str:
    """Return a claim in words."""
    if claim is None:
        return "no effect: its switch is off, or the launcher decides"
    if claim.says:
        return "the device decides" if claim.meaning == "auto" else f"compute in {claim.meaning}"
    if len(claim.denies) == 1:
        return f"not in {next(iter(claim.denies))}"
    return "mixed precision off: fp32" if claim.otherwise == "fp32" else "mixed precision on, no format named"
