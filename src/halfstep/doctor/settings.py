"""A setting and the place it was found. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from halfstep.precision.names import FLAGS, Claim

Kind = Literal["recipe", "accelerate", "deepspeed", "environment"]
LONGEST_SHOWN = 60


@dataclass(frozen=True)
class FoundSetting:
    """A value in a file or variable, its line, and its meaning."""

    kind: Kind
    place: str
    """The file as the user named it; `the environment` for a variable."""
    key: str
    value: object
    means: str
    line: int | None = None
    claim: Claim | None = None
    """The claim about precision, if any."""

    @property
    def leaf(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def where(self) -> str:
        return f"{self.place}, line {self.line}" if self.line else self.place

    def __str__(self) -> str:
        equals = "=" if self.kind == "environment" else ": "
        return f"{self.key}{equals}{shown(self.value)}"

    def as_dict(self) -> dict[str, Any]:
        value = self.value if isinstance(self.value, (bool, int, float, str, type(None))) else shown(self.value)
        return {
            "source": self.kind,
            "file": self.place,
            "line": self.line,
            "key": self.key,
            "value": value,
            "means": self.means,
        }


class SettingSource(NamedTuple):
    """A source that was read, and its settings."""

    kind: Kind
    place: str
    precision: list[FoundSetting]
    """Settings that affect precision."""
    training: Sequence[FoundSetting] = ()
    """The learning rate and clipping."""
    halfstep: bool = False
    """Whether it is a halfstep recipe, which `halfstep train` runs."""
    text: str = ""
    guard: object = None
    """The guard section of a halfstep recipe."""


@dataclass(frozen=True)
class Document:
    """The content of a file with the line of each dotted key."""

    kind: Kind
    place: str
    content: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    text: str = ""

    def setting(self, key: str, value: object, means: str, claim: Claim | None = None) -> FoundSetting:
        """Return the setting of a key, with its line."""
        return FoundSetting(self.kind, self.place, printable(key), value, means, self.lines.get(key), claim)


def shown(value: object) -> str:
    """Return a value as its file would show it, short and safe for a terminal."""
    # 1e-05 is shown as 1e-5, as users write it.
    text = f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)
    return printable(text)


def printable(text: str) -> str:
    """Return text without control characters, shortened to LONGEST_SHOWN."""
    safe = text if text.isprintable() else repr(text)
    return safe if len(safe) <= LONGEST_SHOWN else f"{safe[: LONGEST_SHOWN - 3]}..."


# -- repairs ----------------------------------------------------------------------------------------------------------
# The exact line that makes a setting ask for another precision, in the vocabulary of its file.


_ACCELERATE = {"fp32": "'no'", "tf32": "'no'"}
_LIGHTNING = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_FULL = ("fp32", "tf32")


def line_for(setting: FoundSetting, precision: str) -> str:
    """Return what to write so that `setting` asks for `precision`."""
    if setting.kind == "environment":
        return _variable(setting, precision)
    if setting.kind == "deepspeed":
        return _deepspeed(setting, precision)
    if setting.kind == "accelerate":
        return f"mixed_precision: {_ACCELERATE.get(precision, precision)}"
    return _recipe_line(setting, precision)


def _deepspeed(setting: FoundSetting, precision: str) -> str:
    # A file that uses DeepSpeed's old spelling must not get both spellings.
    old = setting.key.partition(".")[0] == "bfloat16"
    names = {"fp16": "fp16", "bf16": "bfloat16" if old else "bf16"}
    return ", ".join(f'"{name}": {{"enabled": {str(one == precision).lower()}}}' for one, name in names.items())


def _variable(setting: FoundSetting, precision: str) -> str:
    if setting.claim and setting.claim.says is None and setting.claim.denies == {"tf32"}:
        return f"unset {setting.key}"
    word = "no" if precision in _FULL else precision
    return f"export {setting.key}={word}"


def _recipe_line(setting: FoundSetting, precision: str) -> str:
    key = setting.leaf
    if key in ("amp", "use_amp") or (isinstance(setting.value, bool) and key == "mixed_precision"):
        return f"{key}: {precision not in _FULL}"
    if key in FLAGS:
        return _flags(key, precision)
    if key == "mixed_precision":
        return f"{key}: {_ACCELERATE.get(precision, precision)}"
    if key == "amp_dtype" and setting.claim is None:
        return f"{key}: {_TORCH[precision]}"
    # A dtype cannot switch autocast off; use_amp does.
    if key == "amp_dtype" and precision in _FULL:
        return "use_amp: False"
    took = setting.claim.says.took if setting.claim and setting.claim.says else ""
    words = _LIGHTNING if "Lightning" in took else _TORCH if "torch" in took else {}
    return f"{key}: {words.get(precision, precision)}"


def _flags(key: str, precision: str) -> str:
    own = f"{key}: {key == precision}"
    needs_another = precision in FLAGS if key == "fp32" else precision in ("fp16", "bf16")
    return f"{own} and {precision}: True" if precision != key and needs_another else own
