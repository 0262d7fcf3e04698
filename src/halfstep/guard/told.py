"""What the guardian has to say, in plain data: whoever runs the training decides where it goes."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["verdict", "remedy", "alarm", "probation"]
Level = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Told:
    """One thing that happened: a cause found, a remedy placed, an alarm, or a remedy that was tried without."""

    kind: Kind
    level: Level
    text: str
    """For people: the verdict first."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The same for machines."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def warn(told: Told) -> None:
    """Where nobody else listens: as a warning of Python's, unless it is only for information."""
    if told.level != "info":
        warnings.warn(told.text, stacklevel=4)
