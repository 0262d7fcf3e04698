"""The journal on disk: one strict JSON object a line, each written before the next step begins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from halfstep.errors import BadData, FolderTaken
from halfstep.files import LARGEST_JSON
from halfstep.train.journal.journal import Event

_BLOCK = 2**16


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
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drop_cut_line(path)
            # Unbuffered: each line is one write, which the system keeps even if the process is killed right after it.
            self._file = path.open("ab", buffering=0)
        except OSError as failure:
            raise FolderTaken(
                f"cannot write {path}: {failure.strerror or failure}",
                allowed="a run folder that can be written to",
                do="choose another one with run.dir=FOLDER",
            ) from failure

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
    events = []
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LARGEST_JSON):
                number += 1
                if not line.endswith(b"\n") and len(line) < LARGEST_JSON:
                    break
                events.append(_event(line, path, number))
    except OSError as failure:
        raise BadData(
            f"cannot read {path}: {failure.strerror or failure}",
            allowed="the journal.jsonl of a run",
            do="give the folder of a run",
        ) from failure
    return events


def _event(line: bytes, path: Path, number: int) -> Event:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict) or "event" not in event:
        raise BadData(
            f"line {number} of {path} is not an event",
            allowed="one JSON object a line, each with `event`",
            do="delete the line, or take the journal of another run",
        )
    return event


def _drop_cut_line(path: Path) -> None:
    """Cut the file after its last whole line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        kept = end
        while kept > 0:
            begin = max(0, kept - _BLOCK)
            file.seek(begin)
            found = file.read(kept - begin).rfind(b"\n")
            if found >= 0:
                kept = begin + found + 1
                break
            kept = begin
        if kept < end:
            file.truncate(kept)
