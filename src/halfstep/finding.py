"""The result of a check, for people and machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfstep.json_data import JsonResult

Severity = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Finding(JsonResult):
    """One result of a check: its id, its severity, the evidence, and the exact fix."""

    id: str
    severity: Severity
    evidence: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity} {self.id}: {self.evidence} ({self.fix})"
