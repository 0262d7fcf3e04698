"""Read a file as data, and the parts that every kind of configuration has. Imports no torch.

Foreign files are read with the strict YAML reader, but not validated against halfstep's schema: unknown keys are
ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from halfstep.doctor.settings import (
    OWN_WORD,
    FoundSetting,
    Kind,
    SettingsFile,
    WordReading,
    build_unknown_reading,
    format_safe_text,
)
from halfstep.errors import HalfstepError, MissingExtra
from halfstep.precision.names import AMP, AMP_MEANS, NamedPrecision, PrecisionClaim, parse_precision_claims

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


def read_document(kind: Kind, path: str, text: str | None = None) -> SettingsFile:
    """Read a file as plain data, or the text that stands in its place; recipes may be given by name.

    Raise `MissingExtra` without a YAML reader, and the reader's errors for an invalid file.
    """
    try:
        from halfstep.recipe.sources import is_recipe_path, read_recipe_text
    except ModuleNotFoundError as missing:
        raise _missing_extra_error(missing) from None

    if text is not None:
        return parse_document(kind, path, text)
    # A bare name is a shipped recipe to `read_recipe_text`; with ./ it is a file.
    place = path if kind == "recipe" or is_recipe_path(path) else f"./{path}"
    return parse_document(kind, place, read_recipe_text(place)[1])


def parse_document(kind: Kind, place: str, text: str) -> SettingsFile:
    """Return the text of a file as plain data; raise the reader's errors for anything else."""
    try:
        from halfstep.recipe.strict_yaml import FastLoader, parse_yaml_with_lines
    except ModuleNotFoundError as missing:
        raise _missing_extra_error(missing) from None
    # JSON is valid YAML except for tabs between tokens; tabs inside strings are invalid JSON anyway.
    # A project has hundreds of files: libyaml's parser.
    read = parse_yaml_with_lines(text.replace("\t", " ") if place.endswith(".json") else text, place, FastLoader)
    return SettingsFile(kind, place, read.content, read.lines, text)


def parse_foreign_document(place: str, text: str) -> SettingsFile:
    """Return the text of any project's file as plain data; raise the reader's errors for anything else."""
    try:
        from halfstep.doctor.sources.foreign import read_foreign
    except ModuleNotFoundError as missing:
        raise _missing_extra_error(missing) from None
    read = read_foreign(text, place)
    return SettingsFile("recipe", place, read.content, read.lines, text)


def _missing_extra_error(missing: ModuleNotFoundError) -> MissingExtra:
    return MissingExtra(
        f"{missing.name} is not installed, and YAML cannot be read without it",
        allowed="an installation with the extra [train]",
        do="pip install 'halfstep[train]'",
    )


def read_section_claims(document: SettingsFile, prefix: str, settings: Mapping[str, object]) -> list[PrecisionClaim]:
    """Return the claims of these settings; an error names the file and the section."""
    try:
        return parse_precision_claims(settings)
    except HalfstepError as error:
        section = f" ({format_safe_text(prefix[:-1])})" if prefix else ""
        line = _find_mistake_line(document, prefix, settings)
        given = f"{document.place}{section}: {error.given}{f' (line {line})' if line else ''}"
        raise type(error)(given, allowed=error.allowed, do=error.do, id=error.id, line=line) from None


def _find_mistake_line(document: SettingsFile, prefix: str, settings: Mapping[str, object]) -> int | None:
    for key, value in settings.items():
        try:
            parse_precision_claims({key: value})
        except HalfstepError:
            return document.lines.get(prefix + key)
    return None


LIGHTNING_TRUE = {
    "bf16-true": "bf16",
    "16-true": "fp16",
    "transformer-engine": "fp8",
    "transformer-engine-float16": "fp8",
}
"""Lightning's words for weights that are themselves in a narrow format, which no recipe of halfstep may ask for."""


def read_lightning_word(key: str, value: object) -> WordReading:
    """Return the reading of one of Lightning's words; no claim where Lightning has no such word."""
    word = str(value).strip().lower()
    if word in LIGHTNING_TRUE:
        name = LIGHTNING_TRUE[word]
        return WordReading(
            PrecisionClaim(key, value, says=NamedPrecision(name, "Lightning's word")),
            f"weights are also stored in {name}",
        )
    if word in ("64-true", "64"):
        return WordReading(None, "compute in 64 bits")
    try:
        claim = parse_precision_claims({"precision": value})[0]
    except HalfstepError as error:
        return build_unknown_reading(error.given)
    return WordReading(replace(claim, key=key, value=value), describe_claim(claim))


def read_precision_word(key: str, value: object) -> WordReading:
    """Return the reading of a precision key; no claim, and why, where it cannot be read."""
    try:
        claim = next(iter(parse_precision_claims({key: value})), None)
    except HalfstepError as error:
        return build_unknown_reading(error.given)
    return WordReading(claim, describe_claim(claim))


def read_halfstep_word(key: str, value: object) -> WordReading:
    """Return the reading of a precision key that halfstep itself reads."""
    found = read_precision_word(key, value)
    claim = convert_to_halfstep_claim(found.claim)
    return found if claim is found.claim else WordReading(claim, describe_claim(claim))


def convert_to_halfstep_claim(claim: PrecisionClaim | None) -> PrecisionClaim | None:
    """Return a claim as halfstep takes it: mixed precision without a format is the device's own, in others fp16."""
    without_format = claim is not None and claim.says is None and claim.otherwise == "fp16"
    return replace(claim, otherwise=AMP) if claim is not None and without_format else claim


def read_own_word(key: str, value: object) -> WordReading:
    """Return the reading of a precision key that a project's own code reads.

    A word that is not known is the project's own, and claims nothing.
    """
    try:
        claim = next(iter(parse_precision_claims({key: value})), None)
    except HalfstepError:
        return OWN_WORD
    return WordReading(claim, describe_claim(claim))


def is_precision_word(key: str, value: object) -> bool:
    """Return whether a value of a precision key can be a word on precision; `precision: 4` is a number of digits."""
    if isinstance(value, (bool, Mapping)):
        return True
    if isinstance(value, int):
        return value in ((16, 32, 64) if "precision" in key else (0, 1))
    return isinstance(value, str)


Claims = Callable[[str, object], WordReading]
"""Reads a word of one program."""


def read_training_settings(document: SettingsFile, prefix: str, section: Mapping[str, object]) -> list[FoundSetting]:
    """Return the learning rate and clipping where they are numbers."""
    found = []
    for key, value in section.items():
        # bool is a subclass of int.
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and key in LEARNING_RATE | CLIPPING:
            what = "learning rate" if key in LEARNING_RATE else "gradient clipping"
            found.append(document.setting(prefix + key, value, what))
    return found


def describe_claim(claim: PrecisionClaim | None) -> str:
    """Return a claim in words."""
    if claim is None:
        return "no effect: its switch is off, or the launcher decides"
    if claim.says:
        return "the device decides" if claim.meaning == "auto" else f"compute in {claim.meaning}"
    if claim.otherwise == AMP:
        return f"mixed precision on: {AMP_MEANS}"
    if len(claim.denies) == 1:
        return f"not in {next(iter(claim.denies))}"
    return "mixed precision off: fp32" if claim.otherwise == "fp32" else "mixed precision on, no format named"
