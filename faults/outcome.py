"""What a row of the fault matrix found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How many of how many faults were held, and the figure that matters, with its unit."""

    passed: int
    n: int
    worst: str
    broken: bool = False
    """Whether the row itself could not be run."""

    def __str__(self) -> str:
        return f"pass={self.passed} n={self.n} worst={self.worst}"
