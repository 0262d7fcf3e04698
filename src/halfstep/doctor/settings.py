"""A setting and the place it was found. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

from halfstep.precision.names import PrecisionClaim

Kind = Literal[
    "recipe",
    "accelerate",
    "deepspeed",
    "environment",
    "lightning",
    "transformers",
    "hydra",
    "launch",
    "code",
]  # fmt: skip
LONGEST_SHOWN = 60
UNRESOLVED = "(not known before the run)"
"""The value of a setting that only the run itself computes: `${...}`, `$VAR`, a variable of a script."""


WordStatus = Literal["known", "unknown", "own"]
"""Whether the program that reads a word knows it; `own` is a word that only the project's own parser may know."""
PROJECT = "project"
"""The owner of a setting that the project's own code reads."""
_PROGRAMS = frozenset({"accelerate", "deepspeed", "lightning", "lightning cli", "fabric", "transformers", "halfstep"})
"""Programs whose words are known; a word of theirs is judged, a word of any other is shown."""

_LEVELS = {"environment": "environment", "launch": "flag", "code": "code"}


class WordReading(NamedTuple):
    """A word as the program that reads it understands it."""

    claim: PrecisionClaim | None
    means: str
    status: WordStatus = "known"


def build_unknown_reading(why: str) -> WordReading:
    """Return the reading of a word that the program which reads it does not know."""
    return WordReading(None, f"cannot be read: {why}", "unknown")


OWN_WORD = WordReading(None, "the project's own word", "own")


@dataclass(frozen=True)
class FoundSetting:
    """A value in a file or variable, its line, and its meaning."""

    json_keys: ClassVar = ("source=kind", "file=place", "line", "key", "value=json_value", "means")

    kind: Kind
    place: str
    """The file as the user named it; `the environment` for a variable."""
    key: str
    value: object
    means: str
    line: int | None = None
    claim: PrecisionClaim | None = None
    """The claim about precision, if any."""
    tool: str = ""
    """The program that reads the setting, where it is another than the kind's own."""
    level: str = ""
    """Where a tool ranks it: file, environment, flag, code, or default (of a script's own argument)."""
    argument: str = ""
    """The script's own argument that this setting takes its value from."""
    decides: bool = True
    """Whether it holds for the whole run; an autocast in a function, or a default that a flag replaces, does not."""
    status: WordStatus = "known"

    def read_as(self, reading: WordReading) -> FoundSetting:
        """Return the setting with the claim and the meaning of its word."""
        return replace(self, claim=reading.claim, means=reading.means, status=reading.status)

    @property
    def leaf(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def where(self) -> str:
        return f"{self.place}, line {self.line}" if self.line else self.place

    @property
    def owner(self) -> str:
        """The program that reads the setting."""
        return self.tool or self.kind

    @property
    def is_judged(self) -> bool:
        """Return whether the words of its owner are known."""
        return self.owner in _PROGRAMS or (self.kind == "recipe" and self.tool != PROJECT)

    @property
    def rank(self) -> str:
        """Where its owner ranks the setting; a key of a file unless the reader said otherwise."""
        return self.level or _LEVELS.get(self.kind, "file")

    def __str__(self) -> str:
        if self.kind == "launch":
            return f"{self.key} {format_found_value(self.value)}" if self.value is not True else self.key
        equals = "=" if self.kind in ("environment", "code") else ": "
        return f"{self.key}{equals}{format_found_value(self.value)}"

    @property
    def json_value(self) -> object:
        """Return the value if JSON has it, else in words."""
        return (
            self.value
            if isinstance(self.value, (bool, int, float, str, type(None)))
            else format_found_value(self.value)
        )


def remove_ambiguous_claims(settings: Sequence[FoundSetting]) -> list[FoundSetting]:
    """Take the claims from calls of one kind that name different formats: which part of the run has which is not
    known.
    """
    named: dict[str, set[str]] = {}
    for setting in settings:
        if setting.claim:
            named.setdefault(_name_call(setting), set()).add(setting.claim.meaning)
    return [replace(s, claim=None) if len(named.get(_name_call(s), ())) > 1 else s for s in settings]


def _name_call(setting: FoundSetting) -> str:
    return setting.key.removesuffix("(enabled)")


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
    names: Sequence[str] = ()
    """Files and modules that it names: what a script imports, what a launch line starts."""
    tools: frozenset[str] = frozenset()
    """The libraries whose precision a script decides, or the launcher of a launch line."""
    words: frozenset[str] = frozenset()
    """Words that a script defines: choices of its arguments, keys of its dictionaries of formats, members of enums."""


@dataclass(frozen=True)
class SettingsFile:
    """The content of a file with the line of each dotted key."""

    kind: Kind
    place: str
    content: Mapping[str, object]
    lines: Mapping[str, int] = field(default_factory=dict)
    text: str = ""

    def setting(self, key: str, value: object, means: str, claim: PrecisionClaim | None = None) -> FoundSetting:
        """Return the setting of a key, with its line."""
        return FoundSetting(self.kind, self.place, format_safe_text(key), value, means, self.lines.get(key), claim)


def format_found_value(value: object) -> str:
    """Return a value as its file would show it, short and safe for a terminal."""
    # 1e-05 is shown as 1e-5, as users write it.
    text = f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)
    return format_safe_text(text)


def format_safe_text(text: str) -> str:
    """Return text without control characters, shortened to LONGEST_SHOWN."""
    safe = text if text.isprintable() else repr(text)
    return safe if len(safe) <= LONGEST_SHOWN else f"{safe[: LONGEST_SHOWN - 3]}..."
