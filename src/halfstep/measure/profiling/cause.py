"""What a profile ends with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

NOTICEABLE = 0.10
"""The least share of a step that a cause must explain to be named."""


@dataclass(frozen=True)
class Cause:
    """Why there is no speed-up, or that nothing is wrong."""

    id: str
    sentence: str
    evidence: str
    do: str
    """What to change."""
    command: str
    """What to type, now or after the change."""
    share: float
    """Of a step's time, what it explains."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
