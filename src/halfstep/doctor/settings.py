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
    is_computed: bool = False
    """Whether the run computes the value: an expression of a script, or a shell variable."""
    outcomes: tuple[PrecisionClaim | None, ...] = ()
    """What each possible value claims, None for a value that the tool takes as no setting. Empty: any value."""
    lookup: str = ""
    """The dotted key that a computed value is looked up by: `trainer.precision` of `cfg["trainer"]["precision"]`."""
    candidates: tuple[FoundSetting, ...] = ()
    """The settings of the run with that key. The run may read another file, so these are no proof of the value."""

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


def format_possible_values(claims: Sequence[PrecisionClaim | None]) -> str:
    """Return the meanings of claims as `fp16 or fp32`."""
    return " or ".join(dict.fromkeys(map(_format_possible_value, claims)))


def _format_possible_value(claim: PrecisionClaim | None) -> str:
    if claim is None:
        return "not given"
    # A switch of one format that is off says nothing of the others.
    is_switch = claim.says is None and len(claim.denies) == 1
    return f"not {next(iter(claim.denies))}" if is_switch else claim.meaning


def remove_ambiguous_claims(settings: Sequence[FoundSetting]) -> list[FoundSetting]:
    """Take the claims from calls of one kind that name different formats: which of them the run makes is not known.

    Calls of a known program keep all of these claims as possible outcomes.
    """
    named: dict[str, dict[str, PrecisionClaim]] = {}
    for setting in settings:
        if setting.claim:
            named.setdefault(_name_call(setting), {})[setting.claim.meaning] = setting.claim
    choices = {name: tuple(claims.values()) for name, claims in named.items() if len(claims) > 1}
    return [_open_choice(s, choices[_name_call(s)]) if s.claim and _name_call(s) in choices else s for s in settings]


def _open_choice(setting: FoundSetting, claims: tuple[PrecisionClaim, ...]) -> FoundSetting:
    if not setting.is_judged:
        return replace(setting, claim=None)
    means = f"{format_possible_values(claims)}, decided at run time"
    return replace(setting, claim=None, means=means, is_computed=True, outcomes=claims)


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
