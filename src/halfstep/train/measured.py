"""What was measured when a run began, and is never measured again: the second time could come out otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from halfstep.errors import same_keys


@dataclass(frozen=True)
class Measured:
    """Decisions that a stopwatch had a part in."""

    precision: str
    """The name of the precision that `auto` came to, or that was asked for."""
    reasons: tuple[str, ...]
    """Why it was taken, in words."""
    workers: int
    plan: Mapping[str, Any] | None = None
    """Other choices that were measured, by name."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "reasons": list(self.reasons)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Measured:
        same_keys("what was measured", [*cls.__dataclass_fields__], state)
        return cls(**{**state, "reasons": tuple(state["reasons"])})
