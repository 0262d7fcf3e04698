"""What a measurement assumes where it cannot know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumption:
    """An assumption about data or numbers that a size or a branch depends on."""

    place: str
    """The line that needs the numbers, as file:line: text; or the setting."""
    what: str

    def __str__(self) -> str:
        return f"assumed at {self.place}: {self.what}"
