"""Write plain lines, for train.log and for output without a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from halfstep.journal.events import Event, guard_file_writing
from halfstep.journal.guide import GuideLog
from halfstep.journal.latest import LatestEvents
from halfstep.journal.lines import ConsoleSize, ConsoleStyle
from halfstep.journal.text import fit_encoding
from halfstep.ownership import find_ownership


class PlainListener:
    """A listener that writes the lines of a style, without colors and codes."""

    def __init__(self, stream: IO[str], style: ConsoleStyle) -> None:
        self._stream, self._style = stream, style
        self._latest = LatestEvents()

    def on_event(self, event: Event) -> None:
        """Record an event, and write its lines."""
        self._latest.on_event(event)
        lines = self._style.list_lines(event, self._latest, ConsoleSize())
        if lines:
            text = "".join(f"{' ' * line.indent}{line.text}\n" for line in lines)
            self._stream.write(fit_encoding(text, getattr(self._stream, "encoding", None)))
            self._stream.flush()

    def restore_event(self, event: Event) -> None:
        """Record an event of an earlier launch without writing it."""
        self._latest.on_event(event)

    def close(self) -> None:
        """Do nothing: the stream belongs to the caller."""


class LogFileListener(PlainListener):
    """The listener that writes train.log in a run's folder: in detail, for whatever console the run has."""

    def __init__(self, path: Path) -> None:
        with guard_file_writing(path):
            self._file = path.open("a", encoding="utf-8", errors="replace")
        self._owner = find_ownership(path)
        super().__init__(self._file, GuideLog())

    def on_event(self, event: Event) -> None:
        """Record an event, and write its lines, unless the file may be another run's by now."""
        if self._owner is None or self._owner.lost is None:
            super().on_event(event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
