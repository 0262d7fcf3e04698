"""The result of a check, for people and machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from halfstep.json_data import JsonResult

Severity = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Finding(JsonResult):
    """One result of a check.

    Args:
        id: The name of the check's result, for code and tests.
        severity: `note`, `warning` or `error`.
        evidence: The facts behind it.
        fix: The exact fix.
    """

    id: str
    severity: Severity
    evidence: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity} {self.id}: {self.evidence} ({self.fix})"


def format_first_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
