"""The journal on disk: one strict JSON object a line, each written before the next step begins."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfstep.errors import BadData
from halfstep.files import LARGEST_JSON
from halfstep.train.journal.cutting import cut_to_lines, last_line_end
from halfstep.train.journal.journal import NOTE, Event
from halfstep.train.journal.opening import to_write

MOST_WAITING = 10_000
"""Lines that are kept for a disk without room."""


def _plain(value: Any) -> Any:
    """What JSON has no form for, such as a path or a number of another library."""
    try:
        return _spoken(float(value))
    except (TypeError, ValueError, RuntimeError):
        return str(value)


_STRICT = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)


class JsonLines:
    """Appends each event to a file. A killed run leaves at most one partial line, which the next one removes.

    Lines that a full disk does not take wait in memory, and are written before the next one as soon as it has room.
    """

    def __init__(self, path: Path) -> None:
        with to_write(path):
            cut_to_lines(path)
            # Unbuffered: each line is one write, which the system keeps even if the process is killed right after it.
            self._file = path.open("ab", buffering=0)
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        """Lines that are gone, and not yet told of in the file."""
        self._is_told = False

    def hear(self, event: Event) -> None:
        self._waiting.append(as_line(event).encode("utf-8", "replace"))
        try:
            self._write_waiting()
        except OSError as failure:
            # Not raised: who fails is never told anything again, and the disk may have room at the next step.
            self._tell_once(failure)
            self._keep_few(event)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._write_waiting()
        if self._waiting:
            _say(f"{self._file.name} ends without its last {len(self._waiting):,} lines, which had no room")
            self._waiting.clear()
        self._file.close()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._append(self._waiting[0])
            self._waiting.popleft()
            self._lost = 0  # if anything was, it is told of in the next line

    def _append(self, line: bytes) -> None:
        """All of the line. Where that fails, the part that was written is removed, or else the rest is what waits."""
        done = 0
        try:
            while done < len(line):
                taken = self._file.write(line[done:])  # a disk that gets full takes a part, and fails at the next one
                if not taken:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                done += taken
        except OSError:
            try:
                self._file.truncate(os.fstat(self._file.fileno()).st_size - done)
            except OSError:
                self._waiting[0] = line[done:]
            raise

    def _keep_few(self, event: Event) -> None:
        """Bounds what waits: all but the first are given up from the oldest on, and a line in their place says so."""
        while len(self._waiting) > MOST_WAITING:
            if not self._lost:
                self._waiting.insert(1, b"")
            del self._waiting[2]
            self._lost += 1
            text = f"the disk had no room for {self._lost:,} lines of the journal, which are missing here"
            note = {"event": NOTE, "time": event.get("time", 0.0), "text": text, "level": "warning"}
            self._waiting[1] = as_line(note).encode()

    def _tell_once(self, failure: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            why = failure.strerror or failure
            _say(f"{self._file.name} cannot be written: {why}; its lines are kept, and written when that is possible")


def _say(text: str) -> None:
    """To a person: the journal itself, where this belongs, is what cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        print(f"warning: {text}", file=sys.stderr)


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


def kept_events(path: Path, after: int = 0) -> Iterator[Event]:
    """One event after the other, for a run that goes on: a damaged line, or no journal at all, must not hold it up.

    Of those that begin after so many bytes, where these are given.
    """
    with contextlib.suppress(OSError):
        for line in _lines(path, after):
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


def _lines(path: Path, after: int = 0) -> Iterator[bytes]:
    """The whole lines of a file; one that is longer than any of ours comes in parts."""
    with path.open("rb") as file:
        file.seek(after)
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
