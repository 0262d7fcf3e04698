"""Read precision settings from every source, compare them, and report the status. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from halfstep.doctor import sources as places
from halfstep.doctor.located import Edit, LocatedFinding, split_lines
from halfstep.doctor.repairs import format_setting_line
from halfstep.doctor.settings import FoundSetting, SettingSource, format_found_value
from halfstep.doctor.settings_page import Conflict, NamedSource, PrecisionStatus, Resolution, SettingsReport
from halfstep.finding import Finding, Severity
from halfstep.precision.names import (
    AMP,
    AMP_MEANS,
    AUTO,
    FORMATS,
    SWITCHES,
    SettledClaims,
    parse_precision,
    resolve_claims,
)

DEFAULT_GUARD = "watch"
"""The guard of a recipe that names none, as in its schema."""


class SettingsVerdict(NamedTuple):
    """The precision that all settings agree on, or their conflicts."""

    precision: str | None
    conflicts: list[Conflict]


def compare_precision_settings(settings: Sequence[FoundSetting]) -> SettingsVerdict:
    """Return whether all settings about precision agree; `auto` agrees with any other file."""
    speaking = [s for s in settings if s.claim]
    if not speaking:
        return SettingsVerdict(None, [])
    # `auto` can still conflict with other settings of the same file, so those are compared per file below.
    firm = [s for s in speaking if s.claim and (s.claim.meaning != AUTO or s.claim.denies)]
    groups = [firm, *(_select_file_settings(speaking, s) for s in speaking if s not in firm)]
    for group in groups:
        settled = _settle_precision(group)
        if settled and settled.against:
            return SettingsVerdict(settled.name, _list_conflicts(settled, group, settings))
    # Without a firm setting, `auto` is what all of them say.
    decided = _settle_precision(firm) or _settle_precision(speaking)
    return SettingsVerdict(decided.name if decided else None, [])


def _settle_precision(settings: Sequence[FoundSetting]) -> SettledClaims | None:
    claims = [s.claim for s in settings if s.claim]
    return resolve_claims(claims) if claims else None


def _select_file_settings(settings: Sequence[FoundSetting], one: FoundSetting) -> list[FoundSetting]:
    return [s for s in settings if s.place == one.place]


def _list_conflicts(
    settled: SettledClaims, settings: Sequence[FoundSetting], everything: Sequence[FoundSetting]
) -> list[Conflict]:
    by_claim = {id(s.claim): s for s in settings}
    one = by_claim[id(settled.by)]
    found = []
    for claim in settled.against:
        other = by_claim[id(claim)]
        if other is one:
            continue
        # Each conflict gets two resolutions: change the one file, or change the other.
        asked = _find_file_precision(other, one, settings, settled.name)
        ways = (
            Resolution(settled.name, other.where, _suggest_setting_lines(other, settled.name, everything)),
            Resolution(asked, one.where, _suggest_setting_lines(one, asked, everything)),
        )
        found.append(Conflict(one, other, ways))
    return found


def _suggest_setting_lines(setting: FoundSetting, precision: str, everything: Sequence[FoundSetting]) -> str:
    """Return the line to write and, below it, a dormant format that the changed switch would activate."""
    own = format_setting_line(setting, precision)
    if setting.leaf not in SWITCHES or precision in ("fp32", "tf32"):
        return own
    asleep = [
        s for s in everything
        if s.leaf in FORMATS and s.claim is None and s.place == setting.place
        and _name_section(s) == _name_section(setting)
    ]  # fmt: skip
    lines = [format_setting_line(s, precision) for s in asleep if parse_precision(s.value).name != precision]
    return "\n    ".join([own, *lines])


def _name_section(setting: FoundSetting) -> str:
    return setting.key.rpartition(".")[0]


def _find_file_precision(other: FoundSetting, one: FoundSetting, settings: Sequence[FoundSetting], refused: str) -> str:
    """Return the precision the other setting's file asks for as a whole: `amp: true` with `fp16: false` means bf16."""
    own = _settle_precision([s for s in _select_file_settings(settings, other) if s is not one])
    asked = own.name if own else refused
    if asked == AMP:  # another program needs a format
        return "bf16"
    if asked not in (refused, AUTO):
        return asked
    return "fp32" if refused != "fp32" else "bf16"


# Pitfalls in settings that do not conflict.
# Verified with accelerate 1.15, except for two known only from its source, since they need an fp8 GPU and DeepSpeed:
# `fp8_falls_to_fp16` and `deepspeed_file`.


NARROW = ("fp16", "bf16", "fp8")


class SettingsLookup:
    """Settings by source and key."""

    def __init__(self, sources: Sequence[SettingSource]) -> None:
        self.sources = sources
        self._found: dict[tuple[str, str], FoundSetting] = {
            (s.kind, s.key): s for source in sources for s in source.precision
        }

    def get(self, kind: str, key: str) -> FoundSetting | None:
        """Return a setting by source and key, None if it is not set."""
        return self._found.get((kind, key))

    def value(self, kind: str, key: str) -> object:
        """Return the value of a setting, None if it is not set."""
        setting = self.get(kind, key)
        return setting.value if setting else None

    def of_accelerate(self) -> list[FoundSetting]:
        """Return the settings that decide accelerate's precision, from its file and its variable."""
        keys = (("accelerate", "mixed_precision"), ("accelerate", "fp16"), ("environment", places.MIXED_PRECISION))
        return [setting for key in keys if (setting := self._found.get(key))]

    def accelerate_text(self) -> str:
        """Return the text of accelerate's file, empty without one."""
        return next((source.text for source in self.sources if source.kind == "accelerate"), "")

    def asks(self, *precisions: str) -> FoundSetting | None:
        """Return accelerate's setting that asks for one of these precisions, None if there is none."""
        return next((s for s in self.of_accelerate() if s.claim and s.claim.meaning in precisions), None)


def list_settings_findings(sources: Sequence[SettingSource]) -> list[Finding]:
    """Return all findings about the settings."""
    lookup = SettingsLookup(sources)
    return [finding for check in _CHECKS for finding in check(lookup)]


def note_default_file(variables: Mapping[str, str]) -> list[Finding]:
    """Return a note where `accelerate launch` would read a default file that was not given here."""
    place = places.find_default_config(variables)
    if not place.is_file():
        return []
    evidence = f"{place} exists and was not compared; accelerate launch reads it unless it is given --config_file"
    return [Finding("accelerate.default_file", "note", evidence, f"add --accelerate {place}")]


def _build_located_finding(
    setting: FoundSetting, name: str, severity: Severity, evidence: str, fix: str
) -> LocatedFinding:
    return LocatedFinding(name, severity, evidence, fix, setting.place, setting.line)


def _find_cpu_fp16(lookup: SettingsLookup) -> Iterator[Finding]:
    fp16 = lookup.asks("fp16")
    variable = lookup.get("environment", places.USE_CPU)
    in_file = lookup.get("accelerate", "use_cpu")
    forced = in_file if in_file and in_file.value is True else None
    # Both force the CPU; where both are set, the variable is named.
    if variable and str(variable.value).lower() in places.ON:
        forced = variable
    if fp16 and forced:
        evidence = f"{fp16} with {forced} ({forced.where}): accelerate reports fp16 but silently computes in fp32"
        yield _build_located_finding(
            fp16, "accelerate.fp16_on_cpu", "warning", evidence, "write mixed_precision: bf16, or 'no'"
        )


def _find_unquoted_no(lookup: SettingsLookup) -> Iterator[Finding]:
    setting, text = lookup.get("accelerate", "mixed_precision"), lookup.accelerate_text()
    if setting and places.has_unquoted_boolean(text):
        evidence = (
            f"{setting} without quotes ({setting.where}): accelerate launch reads a boolean and stops with an error"
        )
        yield _build_located_finding(
            setting, "accelerate.unquoted_no", "warning", evidence, "write mixed_precision: 'no'"
        )


def _find_missing_type(lookup: SettingsLookup) -> Iterator[Finding]:
    place = next((s.place for s in lookup.sources if s.kind == "accelerate"), None)
    if place and not lookup.get("accelerate", places.DISTRIBUTED):
        evidence = f"{place} has no {places.DISTRIBUTED}, without which accelerate launch refuses the file"
        fix = "add the line  distributed_type: 'NO'"
        yield LocatedFinding("accelerate.no_distributed_type", "warning", evidence, fix, place)


def _find_variable_case(lookup: SettingsLookup) -> Iterator[Finding]:
    variable = lookup.get("environment", places.MIXED_PRECISION)
    if variable and not variable.is_computed and str(variable.value) not in places.WORDS:
        evidence = f"{variable}: under plain python accelerate accepts lowercase only, and silently computes in fp32"
        fix = f"export {variable.key}={str(variable.value).lower()}"
        yield _build_located_finding(variable, "accelerate.variable_case", "warning", evidence, fix)


def _find_narrow_sums(lookup: SettingsLookup) -> Iterator[Finding]:
    asked = lookup.asks(*NARROW)
    if asked and asked.claim and lookup.value("accelerate", places.DISTRIBUTED) == "FSDP":
        # accelerate's FSDP policy treats fp8 as bf16.
        name = "bf16" if asked.claim.meaning == "fp8" else asked.claim.meaning
        evidence = f"distributed_type: FSDP with {asked}: accelerate also sums gradients over processes in {name}"
        fix = (
            "in the script, give Accelerator an FSDP plugin whose mixed_precision_policy has reduce_dtype=torch.float32"
        )
        yield _build_located_finding(asked, "accelerate.fsdp_reduces_narrow", "warning", evidence, fix)


def _find_unread_keys(lookup: SettingsLookup) -> Iterator[Finding]:
    settings = [lookup.get("accelerate", f"fsdp_config.{key}") for key in places.POLICIES]
    downcast = lookup.get("accelerate", "downcast_bf16")
    settings += [downcast] if downcast and downcast.value not in (False, "no", "NO") else []
    for setting in filter(None, settings):
        evidence = f"{setting} ({setting.where}): accelerate launch does not read this key from its file"
        tpu = setting.leaf == "downcast_bf16"
        fix = (
            "use accelerate launch --downcast_bf16 (TPU only)" if tpu else "set the policy in the script's FSDP plugin"
        )
        yield _build_located_finding(setting, "accelerate.key_not_read", "warning", evidence, fix)


def _find_two_deepspeed_files(lookup: SettingsLookup) -> Iterator[Finding]:
    word = lookup.get("accelerate", "mixed_precision")
    file = lookup.get("accelerate", "deepspeed_config.deepspeed_config_file")
    if word and file:
        evidence = f"{word} ({word.where}) next to deepspeed_config_file: accelerate refuses to run with both"
        fix = "delete mixed_precision from accelerate's file"
        line = next((line for line in split_lines(lookup.accelerate_text())[(word.line or 1) - 1 :]), "").rstrip("\r\n")
        edits = (Edit(word.place, word.line or 1, line, ""),) if line.lstrip().startswith("mixed_precision") else ()
        found = _build_located_finding(word, "accelerate.deepspeed_file", "error", evidence, fix)
        yield replace(found, edits=edits)


def _find_fp8_fallback(lookup: SettingsLookup) -> Iterator[Finding]:
    asked = lookup.asks("fp8")
    if asked:
        evidence = f"{asked}: on a GPU below compute capability 8.9 accelerate uses fp16 instead"
        fix = "write mixed_precision: bf16 for such a GPU"
        yield _build_located_finding(asked, "accelerate.fp8_falls_to_fp16", "note", evidence, fix)


def _find_hidden_tf32(lookup: SettingsLookup) -> Iterator[Finding]:
    variable = lookup.get("environment", places.TORCH_TF32)
    if variable and variable.value == "1":
        evidence = f"{variable}: what torch calls an fp32 matrix product is a tf32 one on NVIDIA GPUs since Ampere"
        yield _build_located_finding(variable, "torch.tf32_override", "warning", evidence, f"unset {variable.key}")


def _note_accelerate_precedence(lookup: SettingsLookup) -> Iterator[Finding]:
    if lookup.of_accelerate():
        evidence = (
            "who wins in accelerate: Accelerator(mixed_precision=...) in the script, then accelerate launch "
            f"--mixed_precision, then its file. {places.MIXED_PRECISION} applies only under plain python, "
            "where the file is not read"
        )
        fix = "start with accelerate launch, and leave mixed_precision out of the script"
        yield Finding("accelerate.order", "note", evidence, fix)


def _find_gpu_settings(lookup: SettingsLookup) -> Iterator[Finding]:
    """Yield a note on accelerate's GPUs for a halfstep recipe: under torchrun a variable selects them."""
    own = next((source.place for source in lookup.sources if source.halfstep), None)
    setting = lookup.get("accelerate", "gpu_ids")
    # accelerate also knows `all`, which needs no variable.
    named = str(setting.value).replace(" ", "") if setting else ""
    if own and setting and re.fullmatch(r"\d+(,\d+)*", named):
        evidence = f"{setting} ({setting.where}) are accelerate's; halfstep uses all visible GPUs"
        count = named.count(",") + 1
        fix = f"CUDA_VISIBLE_DEVICES={named} torchrun --nproc_per_node={count} -m halfstep train {own}"
        yield _build_located_finding(setting, "accelerate.gpu_ids", "note", evidence, fix)


def _note_ignored_accelerate(lookup: SettingsLookup) -> Iterator[Finding]:
    if lookup.of_accelerate() and any(source.halfstep for source in lookup.sources):
        evidence = "halfstep train follows its recipe only; accelerate's settings matter for your own scripts"
        yield Finding("recipe.not_accelerate", "note", evidence, "nothing, if you only use halfstep train")


_CHECKS: tuple[Callable[[SettingsLookup], Iterator[Finding]], ...] = (
    _find_unquoted_no,
    _find_missing_type,
    _find_cpu_fp16,
    _find_variable_case,
    _find_narrow_sums,
    _find_unread_keys,
    _find_two_deepspeed_files,
    _find_fp8_fallback,
    _find_hidden_tf32,
    _note_accelerate_precedence,
    _find_gpu_settings,
    _note_ignored_accelerate,
)


_FULL = ("fp32", "tf32")


def check_settings(
    recipe: str | None = None,
    *,
    accelerate: str | None = None,
    deepspeed: str | None = None,
    variables: Mapping[str, str] = os.environ,
) -> SettingsReport:
    """Return every precision setting with its source, the conflicts, the findings and the status.

    Raise `BadRecipe` for a file that cannot be read.
    """
    sources = read_sources(recipe, accelerate, deepspeed, variables)
    settings = [setting for source in sources for setting in source.precision]
    verdict = compare_precision_settings(settings)
    findings = [conflict.finding for conflict in verdict.conflicts] + list_settings_findings(sources)
    # accelerate's default file is easily forgotten: it is read without being named.
    findings += note_default_file(variables) if accelerate is None else []
    named = [NamedSource(s.kind, s.place) for s in sources if s.kind != "environment" or s.precision]
    return SettingsReport(
        named, settings, verdict.conflicts, findings, build_precision_status(sources, settings, verdict)
    )


def read_sources(
    recipe: str | None,
    accelerate: str | None,
    deepspeed: str | None,
    variables: Mapping[str, str],
    texts: Mapping[str, str] | None = None,
) -> list[SettingSource]:
    """Read every source that was given, and the environment; `texts` stand in the place of files."""
    now = texts or {}
    readers = (
        (places.from_recipe, recipe),
        (places.from_accelerate, accelerate),
        (places.from_deepspeed, deepspeed),
    )
    given = [read(place, now.get(place)) for read, place in readers if place is not None]
    return [*given, places.from_environment(variables)]


def build_precision_status(
    sources: Sequence[SettingSource], settings: Sequence[FoundSetting], verdict: SettingsVerdict
) -> PrecisionStatus:
    """Return the status check of the radio-map guide: alignment, AMP, FP16, learning rate, clipping, NaN handling."""
    return PrecisionStatus(
        aligned=not verdict.conflicts,
        precision=None if verdict.conflicts else verdict.precision,
        amp=_describe_amp(settings, verdict),
        fp16=_describe_fp16(settings, verdict),
        learning_rate=_describe_found_settings(sources, places.LEARNING_RATE),
        clipping=_describe_found_settings(sources, places.CLIPPING),
        nan_handling=_describe_nan_handling(sources),
        final=_describe_readiness(sources, verdict),
    )


def _describe_nan_handling(sources: Sequence[SettingSource]) -> str:
    """Return the guard mode of a halfstep recipe; other projects handle NaN in code, which is not read."""
    own = next((source for source in sources if source.halfstep), None)
    if own is None:
        return "not set here (halfstep.Stepper skips such steps)"
    said = own.guard.get("mode") if isinstance(own.guard, Mapping) else own.guard
    mode = str(said or DEFAULT_GUARD)
    return "off: such steps are skipped, and their cause is not named" if mode == "off" else f"guard: {mode}"


def _describe_readiness(sources: Sequence[SettingSource], verdict: SettingsVerdict) -> str:
    if verdict.conflicts:
        return "not ready: settle the contradiction, or let --fix bf16 do it"
    own = next((source.place for source in sources if source.halfstep), None)
    return f"ready: halfstep train {own}" if own else "ready"


def _describe_amp(settings: Sequence[FoundSetting], verdict: SettingsVerdict) -> str:
    if verdict.conflicts:
        sides = {s.where: str(s) for c in verdict.conflicts for s in (c.one, c.other)}
        return f"disputed ({' against '.join(sides.values())})"
    if verdict.precision is None:
        return "not set"
    if verdict.precision == AUTO:
        return "the device decides"
    if verdict.precision == AMP:
        return f"enabled ({AMP_MEANS})"
    if verdict.precision in _FULL:
        return f"disabled (computes in {verdict.precision})"
    named = any(s.claim and s.claim.says and s.claim.meaning == verdict.precision for s in settings)
    return f"enabled (in {verdict.precision}{'' if named else ', which no setting names'})"


def _describe_fp16(settings: Sequence[FoundSetting], verdict: SettingsVerdict) -> str:
    own = next((s for s in settings if s.leaf == "fp16" or s.key == "fp16.enabled"), None)
    if verdict.conflicts:
        return f"disputed ({own})" if any(own in (c.one, c.other) for c in verdict.conflicts) else _quote_setting(own)
    if verdict.precision == "fp16":
        return "enabled"
    if verdict.precision in (None, AUTO):
        return _quote_setting(own)
    if verdict.precision == AMP:
        return "enabled if the device has no bf16"
    return f"disabled (the format is {verdict.precision})"


def _quote_setting(setting: FoundSetting | None) -> str:
    return f"as written ({setting})" if setting else "not set"


def _describe_found_settings(sources: Iterable[SettingSource], keys: frozenset[str]) -> str:
    found = [s for source in sources for s in source.training if s.leaf in keys]
    return "; ".join(f"{format_found_value(s.value)} ({s.key}, {s.where})" for s in found) or "not set"
