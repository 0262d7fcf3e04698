"""A finding at a line of a project's file, and the change that removes it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from halfstep.finding import Finding


class Edit(NamedTuple):
    """One line of a file, as it is and as it should be."""

    file: str
    line: int
    before: str
    after: str
    """May be several lines; an empty text removes the line."""


@dataclass(frozen=True)
class LocatedFinding(Finding):
    """A finding with its place in a project, and the edits that remove it, if a program can make them."""

    file: str = ""
    line: int | None = None
    edits: tuple[Edit, ...] = ()

    @property
    def where(self) -> str:
        """The place as compilers print it."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {**super().as_dict(), "edits": [edit._asdict() for edit in self.edits]}
