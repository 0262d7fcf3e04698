"""Where settings come from: the recipe, DeepSpeed's file and the environment; accelerate's file has its own module.

Foreign files are read with the strict reader, as data, but not held against our schema: keys that we do not know are
none of our business. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from halfstep.doctor.settings import Document, Kind, Setting, Source, printable
from halfstep.errors import BadRecipe, HalfstepError, MissingExtra
from halfstep.precision.names import FLAGS, PRECISION_KEYS, SWITCHES, Claim, read_claims

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
"""Sections in which `precision` is a number format; in others, such as `metrics`, it may be anything."""


_OLD_BF16 = "bfloat16"
"""DeepSpeed's spelling before it was bf16, still read by it."""


def read_document(kind: Kind, path: str) -> Document:
    """A file as plain data; a recipe may be named as well."""
    try:
        from halfstep.train.recipe.sources import is_path, recipe_text
        from halfstep.train.recipe.strict_yaml import read_with_lines
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            f"{missing.name} is not installed, and YAML cannot be read without it",
            allowed="an installation with the extra [train]",
            do="pip install halfstep[train]",
        ) from None

    place = path if kind == "recipe" or is_path(path) else f"./{path}"
    text = recipe_text(place)[1]
    # JSON is YAML, but for tabs between its tokens; a tab inside a string is an error in JSON anyway.
    read = read_with_lines(text.replace("\t", " ") if path.endswith(".json") else text, place)
    return Document(kind, place, read.content, read.lines, text)


def from_recipe(name_or_path: str) -> Source:
    """Precision keys, learning rate and clipping at the top of the file and one level down."""
    document = read_document("recipe", name_or_path)
    found, training = [], []
    for prefix, section in _sections(document.content):
        found += _precision_settings(document, prefix, section)
        training += training_settings(document, prefix, section)
    return Source("recipe", document.place, found, training, halfstep="task" in document.content)


def _sections(content: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    flat = {key: value for key, value in content.items() if not _is_section(key, value)}
    yield "", flat
    for name, value in content.items():
        if name not in flat:
            yield f"{name}.", dict(value)


def _is_section(key: str, value: object) -> bool:
    """`amp: {enabled: false}` is a switch; other mappings hold settings of their own."""
    return isinstance(value, Mapping) and not (key in (*SWITCHES, *FLAGS) and "enabled" in value)


def _precision_settings(document: Document, prefix: str, section: Mapping[str, Any]) -> list[Setting]:
    spoken = [key for key, value in section.items() if value is not None and not _is_section(key, value)]
    keys = [key for key in spoken if key in PRECISION_KEYS]
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


def training_settings(document: Document, prefix: str, section: Mapping[str, Any]) -> list[Setting]:
    """The learning rate and clipping, where they are numbers."""
    found = []
    for key, value in section.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and key in LEARNING_RATE | CLIPPING:
            what = "learning rate" if key in LEARNING_RATE else "gradient clipping"
            found.append(document.setting(prefix + key, value, what))
    return found


def from_deepspeed(path: str) -> Source:
    """`fp16.enabled` and `bf16.enabled` of DeepSpeed's JSON; `auto` leaves them to the launcher."""
    document = read_document("deepspeed", path)
    try:
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
    return Source("deepspeed", document.place, found, training_settings(document, "", document.content))


def _switch_of(document: Document, key: str, value: Mapping[str, Any]) -> Setting:
    claim = next(iter(_claims(document, key + ".", {"bf16" if key == _OLD_BF16 else key: value})), None)
    means = meaning(claim) if claim else "left to the launcher"
    return document.setting(f"{key}.enabled", value["enabled"], means, claim)


def meaning(claim: Claim | None) -> str:
    """What a claim comes to, in words."""
    if claim is None:
        return "no effect: its switch is off, or the launcher decides"
    if claim.says:
        return "the device decides" if claim.meaning == "auto" else f"compute in {claim.meaning}"
    if len(claim.denies) == 1:
        return f"not in {next(iter(claim.denies))}"
    return "mixed precision off: fp32" if claim.otherwise == "fp32" else "mixed precision on, no format named"
