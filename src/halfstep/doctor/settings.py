"""One setting, and where it was found. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from halfstep.precision.names import Claim

Kind = Literal["recipe", "accelerate", "deepspeed", "environment"]
LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Setting:
    """What a file or a variable says, on which line, and what that means."""

    kind: Kind
    place: str
    """The file as it was named; `the environment` for a variable."""
    key: str
    value: object
    means: str
    line: int | None = None
    claim: Claim | None = None
    """What it says about precision, where it says anything."""

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


class Source(NamedTuple):
    """A place that was read, and what it holds."""

    kind: Kind
    place: str
    precision: list[Setting]
    """Settings that bear on precision."""
    training: Sequence[Setting] = ()
    """The learning rate and clipping."""
    halfstep: bool = False
    """Whether it is a recipe of ours, which `halfstep train` runs."""
    text: str = ""


@dataclass(frozen=True)
class Document:
    """A file's content, with the line of each dotted key."""

    kind: Kind
    place: str
    content: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    text: str = ""

    def setting(self, key: str, value: object, means: str, claim: Claim | None = None) -> Setting:
        return Setting(self.kind, self.place, printable(key), value, means, self.lines.get(key), claim)


def shown(value: object) -> str:
    """A value as a person would read it in its file, short, and harmless to a terminal."""
    text = f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)
    return printable(text)


def printable(text: str) -> str:
    safe = text if text.isprintable() else repr(text)
    return safe if len(safe) <= LONGEST_SHOWN else f"{safe[: LONGEST_SHOWN - 3]}..."
