"""The journal on disk: one strict JSON object a line, each written before the next step begins."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfstep.errors import BadData
from halfstep.files import LARGEST_JSON
from halfstep.train.journal.cutting import cut_to_lines, last_line_end
from halfstep.train.journal.journal import Event
from halfstep.train.journal.opening import to_write


def _plain(value: Any) -> Any:
    """What JSON has no form for, such as a path or a number of another library."""
    try:
        return _spoken(float(value))
    except (TypeError, ValueError, RuntimeError):
        return str(value)


_STRICT = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)


class JsonLines:
    """Appends each event to a file. A killed run leaves at most one partial line, which the next one removes."""

    def __init__(self, path: Path) -> None:
        with to_write(path):
            cut_to_lines(path)
            # Unbuffered: each line is one write, which the system keeps even if the process is killed right after it.
            self._file = path.open("ab", buffering=0)

    def hear(self, event: Event) -> None:
        self._file.write(as_line(event).encode("utf-8", "replace"))

    def close(self) -> None:
        self._file.close()


def as_line(event: Event) -> str:
    """One line of strict JSON; numbers that JSON has no sign for are the words NaN, Infinity and -Infinity."""
    try:
        return _STRICT.encode(event) + "\n"
    except ValueError:
        return _STRICT.encode(_spoken(event)) + "\n"


def _spoken(value: Any) -> Any:
    """The same, with words for the numbers that JSON has no sign for."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _spoken(inner) for key, inner in value.items()}
    return [_spoken(inner) for inner in value] if isinstance(value, list | tuple) else value


def read_events(path: Path) -> list[Event]:
    """All events of a journal; a last line that was cut off is left out."""
    try:
        return [_event(line, path, number) for number, line in enumerate(_lines(path), start=1)]
    except OSError as failure:
        raise BadData(
            f"cannot read {path}: {failure.strerror or failure}",
            allowed="the journal.jsonl of a run",
            do="give the folder of a run",
        ) from failure


def kept_events(path: Path) -> Iterator[Event]:
    """One event after the other, for a run that goes on: a damaged line, or no journal at all, must not hold it up."""
    with contextlib.suppress(OSError):
        for line in _lines(path):
            event = _read(line)
            if event is not None:
                yield event


def last_time(path: Path) -> float:
    """The `time` of a journal's last whole line, from which a run that is taken up again counts on; 0.0 without one."""
    try:
        with path.open("rb") as file:
            end = last_line_end(file, file.seek(0, 2))
            begin = last_line_end(file, end - 1)
            file.seek(begin)
            event = _read(file.read(min(end - begin, LARGEST_JSON))) or {}
        told = float(event.get("time", 0.0))
    except (OSError, TypeError, ValueError):
        return 0.0
    return told if 0.0 <= told < math.inf else 0.0


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file; one that is longer than any of ours comes in parts."""
    with path.open("rb") as file:
        while line := file.readline(LARGEST_JSON):
            if not line.endswith(b"\n") and len(line) < LARGEST_JSON:
                return
            yield line


def _event(line: bytes, path: Path, number: int) -> Event:
    event = _read(line)
    if event is None:
        raise BadData(
            f"line {number} of {path} is not an event",
            allowed="one JSON object a line, each with `event`",
            do="delete the line, or take the journal of another run",
        )
    return event


def _read(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "event" in event else None
