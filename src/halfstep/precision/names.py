"""Read the names of precisions, including those of other projects. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from halfstep.errors import Contradiction, PrecisionRefused, UnknownName, build_unknown_name_error

AUTO = "auto"
AMP = "amp"
"""Mixed precision without a format: bf16 if the device has it, else fp16."""
AMP_MEANS = "bf16 if the device has it, else fp16"
FP8 = "fp8"
FP8_KINDS = (FP8, "fp8-rowwise", "fp8-rowwise-gw-hp", "mxfp8")
"""Precisions in which linear layers compute in fp8, and the rest in bf16."""
TF32 = "tf32"
FP64 = "fp64"
"""The precision of a Stepper over a float64 model; recipes and commands build float32 models and refuse it."""


@dataclass(frozen=True)
class NamedPrecision:
    """A precision's canonical name, and what it was read from where an alias was given."""

    name: str
    took: str = ""


_ALIASES: dict[str, tuple[str, str]] = {
    "16-mixed": ("fp16", "Lightning's word"),
    "bf16-mixed": ("bf16", "Lightning's word"),
    "32-true": ("fp32", "Lightning's word"),
    "16": ("fp16", "Lightning's old word"),
    "32": ("fp32", "Lightning's old word"),
    "bfloat16": ("bf16", "torch's word"),
    "bfloat": ("bf16", "short for torch's word"),
    "float16": ("fp16", "torch's word"),
    "half": ("fp16", "torch's word"),
    "float32": ("fp32", "torch's word"),
    "float": ("fp32", "torch's word"),
    "tensorfloat32": ("tf32", "NVIDIA's long word"),
    "no": ("fp32", "accelerate's word"),
    "false": ("fp32", "what YAML makes of accelerate's 'no', the word"),
    "float8_e4m3fn": (FP8, "torch's word"),
    "float8_e5m2": (FP8, "torch's word"),
}

_FP64_ALIASES = {
    "64-true": "Lightning's word",
    "64": "Lightning's old word",
    "float64": "torch's word",
    "double": "torch's word",
}

_NARROW_WEIGHTS = (
    "{given} stores the weights themselves in 16 bits, so small updates are lost in rounding",
    "trainable weights stay in fp32; computing in 16 bits is {use!r}",
    "write precision={use!r}",
)
_WIDE = (
    "{given} computes in 64 bits, which recipes, commands and GradScaler do not",
    "computing in fp32 or less; in 64 bits a Stepper over a model in float64",
    "write precision={use!r} for strict fp32, or Stepper(model.double(), optimizer, precision='fp64') in your own loop",
)
_NVFP4 = (
    "{given} has no kernels here: torchao has them for NVIDIA's SM100 only, as a prototype, and no emulation",
    "fp8, fp8-rowwise, fp8-rowwise-gw-hp or mxfp8",
    "write precision={use!r}; halfstep estimate CASE --survive nvfp4 shows the effect of its rounding",
)
_UNSAID = (
    "{given} says that mixed precision is on, but not in which format",
    "bf16, fp16 or auto",
    "write precision={use!r} and let the device decide, or name the format",
)
_REFUSALS: dict[str, tuple[tuple[str, str, str], str]] = {
    "bf16-true": (_NARROW_WEIGHTS, "bf16"),
    "16-true": (_NARROW_WEIGHTS, "fp16"),
    **{word: (_WIDE, "fp32") for word in (FP64, *_FP64_ALIASES)},
    "true": (_UNSAID, AUTO),
    "nvfp4": (_NVFP4, "mxfp8"),
}


def parse_precision(value: object) -> NamedPrecision:
    """Return the precision that a word, a number or a torch dtype means.

    Raises PrecisionRefused for a precision that no run can have, and UnknownName for anything else.
    """
    if is_policy(value):
        return _parse_policy(value)
    if isinstance(value, Mapping):
        raise PrecisionRefused(
            f"the policy {dict(value)} has no {DEFAULT!r}",
            allowed="a precision for all modules, and others by pattern",
            do=f"precision: {{{DEFAULT}: bf16, {', '.join(f'{key!r}: {name}' for key, name in value.items())}}}",
        )
    word = _normalize_word(value)
    if word in _REFUSALS:
        sentences, use = _REFUSALS[word]
        given, allowed, do = (sentence.format(given=repr(value), use=use) for sentence in sentences)
        raise PrecisionRefused(given, allowed=allowed, do=do)
    if word in (AUTO, AMP, *list_precision_names(), *FP8_KINDS):
        return NamedPrecision(word)
    if word in _ALIASES:
        name, whose = _ALIASES[word]
        return NamedPrecision(name, f"{value!r} is {whose} for {name}")
    raise build_unknown_name_error(
        "precision", value, [AUTO, AMP, *list_precision_names(), *FP8_KINDS, *(set(_ALIASES) - {"false"})]
    )


DEFAULT = "default"
"""The key of a policy for modules that no pattern matches."""


class PolicyRule(NamedTuple):
    """One pattern of a policy, with the precision of the modules that it matches."""

    pattern: str
    name: str
    """A kind of fp8, fp32, or `default`."""


def is_policy(value: object) -> bool:
    """Return whether a precision is a policy: a mapping with patterns, or the name of one."""
    return (isinstance(value, Mapping) and DEFAULT in value) or (isinstance(value, str) and ";" in value)


def format_policy_name(default: str, rules: Iterable[PolicyRule]) -> str:
    """Return the name of a policy, such as `bf16; blocks.*=fp8; head=default`."""
    return "; ".join([default, *(f"{rule.pattern}={rule.name}" for rule in rules)])


def parse_policy_name(name: str) -> tuple[str, tuple[PolicyRule, ...]]:
    """Return the default precision and the rules of a policy's name."""
    default, *rules = (part.strip() for part in name.split(";"))
    return default, tuple(PolicyRule(*rule.rpartition("=")[::2]) for rule in rules if rule)


def _parse_policy(value: Any) -> NamedPrecision:
    given: Mapping[str, object] = (
        value
        if isinstance(value, Mapping)
        else {DEFAULT: parse_policy_name(value)[0], **dict(parse_policy_name(value)[1])}
    )
    default = parse_precision(given[DEFAULT])
    rules = []
    for pattern, asked in given.items():
        if pattern != DEFAULT:
            name = DEFAULT if asked == DEFAULT else parse_precision(asked).name
            rules.append(PolicyRule(str(pattern), DEFAULT if name == default.name else name))
            if (
                rules[-1].name not in (DEFAULT, "fp32", "bf16", *FP8_KINDS)
                or ";" in str(pattern)
                or "=" in str(pattern)
            ):
                raise PrecisionRefused(
                    f"precision of {pattern!r} is {asked!r}",
                    allowed=f"{', '.join(FP8_KINDS)}, fp32, bf16 next to a default in fp8, or {DEFAULT}",
                    do=f"precision: {{default: {default.name}, '{pattern}': fp8}}",
                )
    return NamedPrecision(format_policy_name(default.name, rules), default.took)


def parse_step_precision(value: object) -> NamedPrecision:
    """Return what `parse_precision` returns, and fp64 as well, for a step over a model of the user."""
    word = _normalize_word(value)
    if word == FP64:
        return NamedPrecision(FP64)
    if word in _FP64_ALIASES:
        return NamedPrecision(FP64, f"{value!r} is {_FP64_ALIASES[word]} for {FP64}")
    return parse_precision(value)


def _normalize_word(value: object) -> str:
    return str(value).strip().lower().removeprefix("torch.")


def list_precision_names() -> list[str]:
    """Return the names of the precisions of a recipe; `precision.PRECISIONS` also has fp64 and the kinds of fp8."""
    # Listed here rather than read from PRECISIONS, so that `halfstep --help` does not import torch.
    return ["bf16", "fp16", "fp32", "tf32"]


@dataclass(frozen=True)
class PrecisionClaim:
    """The meaning of one key of a configuration: a precision, or only which ones are excluded."""

    key: str
    value: object
    says: NamedPrecision | None = None
    denies: frozenset[str] = frozenset()
    otherwise: str = ""
    """The precision that the key means if no other key names one."""

    @property
    def meaning(self) -> str:
        """The precision that the key names, or else the one that it implies."""
        return self.says.name if self.says else self.otherwise

    def __str__(self) -> str:
        return f"{self.key}={self.value!r}"


_Reader = Callable[[str, object], PrecisionClaim | None]

_ON = frozenset({"true", "yes", "on", "1"})
_OFF = frozenset({"false", "no", "off", "0"})
_NARROW = frozenset({"bf16", "fp16", *FP8_KINDS, AUTO})
_FULL = frozenset({"fp32", "tf32"})


def _parse_format_key(key: str, value: object) -> PrecisionClaim | None:
    named = parse_precision(value)
    return _build_formatless_claim(key, value) if named.name == AMP else PrecisionClaim(key, value, says=named)


def _build_formatless_claim(key: str, value: object) -> PrecisionClaim:
    # In other projects fp16, torch's default on a GPU.
    return PrecisionClaim(key, value, denies=_FULL, otherwise="fp16")


def _parse_switch_key(key: str, value: object) -> PrecisionClaim | None:
    """Read mixed precision as on, off or a format."""
    if is_off(value):
        return PrecisionClaim(key, value, denies=_NARROW, otherwise="fp32")
    if is_on(value):
        return _build_formatless_claim(key, value)
    if isinstance(value, Mapping):
        return _ignore_auto(key, value)
    try:
        return _parse_format_key(key, value)
    except UnknownName as error:
        raise UnknownName(f"{key}: {error.given}", allowed=f"true, false, {error.allowed}", do=error.do) from None


def _parse_flag_key(key: str, value: object) -> PrecisionClaim | None:
    """Read `fp16: true`, or DeepSpeed's `fp16: {enabled: true}`. Off excludes only its own precision."""
    if is_off(value):
        return PrecisionClaim(key, value, denies=frozenset({key}), otherwise=AUTO if key == "fp32" else "fp32")
    if is_on(value):
        return PrecisionClaim(key, value, says=NamedPrecision(key))
    return _ignore_auto(key, value)


def _parse_tf32_key(key: str, value: object) -> PrecisionClaim | None:
    """Read `tf32: true`, which names the format of fp32 products alone: next to `bf16: true` it decides nothing."""
    if is_off(value):
        return PrecisionClaim(key, value, denies=frozenset({TF32}), otherwise="fp32")
    if is_on(value):
        return PrecisionClaim(key, value, denies=frozenset({"fp32"}), otherwise=TF32)
    return _ignore_auto(key, value)


def _ignore_auto(key: str, value: object) -> PrecisionClaim | None:
    """Return None for DeepSpeed's `auto`, which decides nothing; refuse any other value."""
    if _read_enabled_word(value) == AUTO:
        return None
    raise PrecisionRefused(
        f"{key} is {repr(value)[:60]}, which is neither on nor off",
        allowed="true or false, also as {enabled: true}",
        do=f"write {key}: true or {key}: false, or name the format with precision: bf16",
    )


def is_on(value: object) -> bool:
    """Return whether a value, or its `enabled` entry, means on."""
    return _read_enabled_word(value) in _ON


def is_off(value: object) -> bool:
    """Return whether a value, or its `enabled` entry, means off."""
    return _read_enabled_word(value) in _OFF


def _read_enabled_word(value: object) -> str:
    return str(value.get("enabled") if isinstance(value, Mapping) else value).strip().lower()


_KEYS: dict[str, _Reader] = {
    "use_amp": _parse_switch_key,
    "amp": _parse_switch_key,
    "mixed_precision": _parse_switch_key,
    "amp_dtype": _parse_format_key,
    "precision_type": _parse_format_key,
    "precision": _parse_format_key,
    "trainer.precision": _parse_format_key,
    "fp16": _parse_flag_key,
    "bf16": _parse_flag_key,
    "fp32": _parse_flag_key,
    TF32: _parse_tf32_key,
}
PRECISION_KEYS = frozenset(_KEYS) - {TF32}
"""The keys by which other projects choose a precision; for most of them `tf32` is a detail of fp32."""
SWITCHES = tuple(key for key, reader in _KEYS.items() if reader is _parse_switch_key)
FLAGS = tuple(key for key, reader in _KEYS.items() if reader is _parse_flag_key)
FORMATS = ("amp_dtype", "precision_type")
"""Keys of the format that mixed precision has if it is on."""


def parse_precision_settings(settings: Mapping[str, Any]) -> NamedPrecision | None:
    """Return the precision that a configuration asks for, in any project's keys; None if it names none.

    Raises Contradiction if two keys ask for different precisions.
    """
    claims = parse_precision_claims(settings)
    if not claims:
        return None
    settled = resolve_claims(claims)
    if settled.against:
        raise _build_contradiction(settled, settled.against[0])
    if settled.without_format:
        return NamedPrecision(AMP, "" if settled.by.value == AMP else f"{settled.by} names no format: {AMP_MEANS}")
    return NamedPrecision(settled.name, _describe_precision_reading(settled, claims))


@dataclass(frozen=True)
class SettledClaims:
    """The outcome of several claims: a precision, the claim that decides, and the claims that contradict it."""

    name: str
    by: PrecisionClaim
    against: list[PrecisionClaim]
    without_format: bool = False
    """Whether mixed precision is on and no claim names or excludes a format; then `name` is torch's default."""


# Lower wins among keys that only switch: `amp: true` (fp16, or the device's own), then an open `auto`, tf32, and
# everything that means fp32.
_DECIDES = {"fp16": 1, AMP: 1, AUTO: 2, TF32: 3}


def resolve_claims(claims: Sequence[PrecisionClaim]) -> SettledClaims:
    """Return the outcome of one or more claims. A key that names a precision takes priority over a switch."""
    by = min(claims, key=lambda claim: 0 if claim.says else _DECIDES.get(claim.otherwise, 4))
    name = by.meaning if by.says else _resolve_switch(by, claims)
    against = [c for c in claims if (c.says is not None and c.meaning != name) or name in c.denies]
    return SettledClaims(name, by, against, by.says is None and name == "fp16" and len(_list_formats_left(claims)) == 2)


def _list_formats_left(claims: Sequence[PrecisionClaim]) -> list[str]:
    return [name for name in ("fp16", "bf16") if not any(name in c.denies for c in claims)]


def _resolve_switch(switch: PrecisionClaim, claims: Sequence[PrecisionClaim]) -> str:
    """Return the precision that a switch leaves: `amp: true` with `fp16: false` is bf16, by default it is torch's."""
    if switch.meaning in _FULL:
        return switch.meaning
    left = _list_formats_left(claims)
    if switch.meaning in (AUTO, AMP) and len(left) == 2:
        return switch.meaning
    return next(iter(left), "bf16" if switch.meaning == AMP else "fp16")


def parse_precision_claims(settings: Mapping[str, Any]) -> list[PrecisionClaim]:
    """Return the claim of each precision key; a format whose switch is off or `auto` makes none."""
    values = {key: value for key in _KEYS if (value := _find_value(settings, key)) is not None}
    switches = [values.get(switch) for switch in SWITCHES]
    idle = FORMATS if any(is_off(value) or value == AUTO for value in switches) else ()
    read = (_KEYS[key](key, value) for key, value in values.items() if key not in idle)
    return [claim for claim in read if claim is not None]


def _find_value(settings: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, written flat with dots or nested."""
    if key in settings:
        return settings[key]
    outer, dot, inner = key.partition(".")
    folder = settings.get(outer) if dot else None
    return folder.get(inner) if isinstance(folder, Mapping) else None


def _describe_precision_reading(settled: SettledClaims, claims: Iterable[PrecisionClaim]) -> str:
    by = settled.by
    if by.says and by.meaning == by.value and (by.key == "precision" or by.value == AUTO):
        return ""
    if by.value is True and by.key == settled.name and list(claims) == [by]:
        return ""
    ruled_out = {"fp16"} if not by.says and settled.name == "bf16" else set()
    together = [str(c) for c in claims if c.says or c is by or c.otherwise != "fp32" or ruled_out & c.denies]
    return f"{' with '.join(together)} is read as {settled.name}"


def _build_contradiction(settled: SettledClaims, other: PrecisionClaim) -> Contradiction:
    one, name = settled.by, settled.name
    against = f"asks for {other.meaning}" if other.meaning != name else f"rules {name} out"
    return Contradiction(
        f"{one} asks for {name}, but {other} {against}",
        allowed="settings that request one precision",
        do=f"delete {other.key} to run in {name}, or delete {one.key} and keep {other}",
    )
