"""Files that an evaluation or a prediction left out. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.page import Paragraph, Span
from halfstep.printable import escape_to_one_line


@dataclass(frozen=True)
class LeftOutFile:
    """A file that could not be read, and why."""

    file: str
    reason: str


def build_left_out_line(one: LeftOutFile) -> Paragraph:
    """Return a line about the file."""
    return Paragraph((Span("left out", "warn"), escape_to_one_line(f" {one.file}: {one.reason}")), wrap=False)
