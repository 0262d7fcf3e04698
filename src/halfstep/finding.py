"""One thing that a check found, in a shape that people and machines can read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What was found, how bad it is, what shows it, and exactly what to do."""

    id: str
    severity: Severity
    evidence: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity} {self.id}: {self.evidence} ({self.fix})"

    def as_dict(self) -> dict[str, str]:
        return asdict(self)
