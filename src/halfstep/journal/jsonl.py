"""Write the journal to disk: one strict JSON object per line, each written before the next step starts."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from halfstep.errors import BadData, FolderLost, StateMismatch, advise_adding_option, check_same_form
from halfstep.files import LARGEST_JSON, check_ownership
from halfstep.journal.events import FORMAT, NOTE, START, Event, guard_file_writing
from halfstep.json_data import format_json_line
from halfstep.ownership import find_ownership

_parse: Callable[[bytes], Any]
try:
    # pydantic's own parser, where it is installed: a line of a step takes it 1.9 µs, and the standard one 7.5 µs.
    from pydantic_core import from_json

    _parse = from_json
except ImportError:
    _parse = json.loads

JOURNAL, LOG = "journal.jsonl", "train.log"


# A journal beyond its maximum size continues in a new file. The earlier files stay next to it and carry their byte
# offset in the whole journal in their name: offsets stay valid even if a user removes files.


_PART = re.compile(r"journal\.([0-9]{15})\.jsonl")


class JournalPart(NamedTuple):
    """A file of a journal, and its byte offset in the whole journal."""

    begin: int
    path: Path


def is_earlier_part(name: str) -> bool:
    """Return whether a file of this name is an earlier part of a journal."""
    return _PART.fullmatch(name) is not None


def list_journal_parts(path: Path) -> list[JournalPart]:
    """Return the files of a journal from the oldest to the one that is written, which may be missing."""
    found: list[JournalPart] = []
    if path.name == JOURNAL:
        with contextlib.suppress(OSError):
            for entry in path.parent.iterdir():
                if (match := _PART.fullmatch(entry.name)) and stat.S_ISREG(entry.lstat().st_mode):
                    found.append(JournalPart(int(match[1]), entry))
    found.sort()
    return [*found, JournalPart(found[-1].begin + _read_file_size(found[-1].path) if found else 0, path)]


def _read_file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


_BLOCK, _LARGE_BLOCK = 2**16, 2**20


def read_journal_sizes(folder: Path) -> dict[str, int]:
    """Return the current sizes of the journal, in all its files, and of the log; 0 for a missing one."""
    last = {name: list_journal_parts(folder / name)[-1] for name in (JOURNAL, LOG)}
    return {name: part.begin + _read_file_size(part.path) for name, part in last.items()}


def truncate_journal(folder: Path, sizes: Mapping[str, int]) -> None:
    """Truncate both files to these sizes, at the end of a line; a file without a size is emptied.

    A file that is already shorter, as after a power loss, only loses an incomplete last line. Raises StateMismatch for
    sizes that halfstep did not write.
    """
    _check_journal_sizes(sizes)
    for name in (JOURNAL, LOG):
        begin = _restore_current_part(folder / name, sizes.get(name, 0))
        truncate_to_complete_lines(folder / name, sizes.get(name, 0) - begin)


def _restore_current_part(path: Path, size: int) -> int:
    """Make the file with the last byte of `size` the current one; return its byte offset."""
    *earlier, last = list_journal_parts(path)
    # Renamed over the newest one, from the newest back: after each, the journal is whole up to an earlier end.
    while earlier and (size <= last.begin or not path.exists()):
        last = earlier.pop()
        with guard_file_writing(path):
            os.replace(last.path, path)
    return last.begin


def truncate_to_complete_lines(path: Path, at_most: int | None = None) -> None:
    """Truncate a file after its last complete line, within its first `at_most` bytes if given."""
    if not path.is_file():
        return
    with guard_file_writing(path), path.open("r+b") as file:
        end = file.seek(0, 2)
        kept = find_last_line_end(file, end if at_most is None else min(at_most, end))
        if kept < end:
            file.truncate(kept)


def find_last_line_end(file: BinaryIO, before: int) -> int:
    """Return the offset at which the last line of a file's first `before` bytes ends; 0 if none does."""
    # Read backwards in blocks: a journal can be long, and so can a line.
    while before > 0:
        begin = max(0, before - _BLOCK)
        file.seek(begin)
        found = file.read(before - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        before = begin
    return 0


def _check_journal_sizes(sizes: Mapping[str, int]) -> None:
    """Raise StateMismatch for sizes that halfstep did not write."""
    # Sizes come from a checkpoint's file: any other name could make a resume truncate any file.
    for name, size in sizes.items():
        # bool is a subclass of int.
        if name not in (JOURNAL, LOG) or not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise StateMismatch(
                f"a saved size of {name!r}: {size!r}",
                allowed=f"whole numbers from 0 for {JOURNAL} and {LOG}",
                do="use another checkpoint: this one was not written by halfstep, or was changed",
            )


MOST_WAITING = 10_000
"""The maximum number of lines that wait for a full disk."""


class JsonLinesListener:
    """A listener that appends each event to a file.

    A killed run leaves at most one partial line, which the next start removes.

    Lines that a full disk does not accept wait in memory, and are written as soon as there is room.
    """

    def __init__(self, path: Path, largest: float = math.inf) -> None:
        """Append to `path`; a file of more than `largest` bytes continues in a new one."""
        self._path, self._largest, self._owner = path, largest, find_ownership(path)
        with guard_file_writing(path):
            truncate_to_complete_lines(path)
            self._open()
        self._is_mid_line = False
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        """The number of lines that were dropped, and are not yet reported in the file."""
        self._has_warned = False

    def on_event(self, event: Event) -> None:
        """Write an event; never raises for a full disk."""
        if self._owner is not None and self._owner.lost is not None:
            return  # the open file may be another run's by now
        self._waiting.append(format_event_line(event).encode("utf-8", "replace"))
        try:
            self._write_waiting()
        except OSError as failure:
            # Not raised: a listener that fails is removed for good, and the disk may have room at the next step.
            self._warn_once(failure)
            self._keep_few(event)

    def close(self) -> None:
        """Write the pending lines, if possible, and close the file."""
        with contextlib.suppress(OSError, FolderLost):
            self._write_waiting()
        if self._waiting:
            _warn_on_stderr(f"{self._file.name} ends without its last {len(self._waiting):,} lines, which had no room")
            self._waiting.clear()
        self._file.close()

    def _open(self) -> None:
        check_ownership(self._path)
        # Unbuffered: each line is one write, which survives even if the process is killed right after it.
        self._file = self._path.open("ab", buffering=0)

    def _write_waiting(self) -> None:
        if self._file.closed:
            self._open()
        while self._waiting:
            self._begin_file_if_due(len(self._waiting[0]))
            self._append(self._waiting[0])
            self._waiting.popleft()
            self._is_mid_line = False
            # If lines were dropped, the next waiting line is the note about them.
            self._lost = 0

    def _begin_file_if_due(self, more: int) -> None:
        written = os.fstat(self._file.fileno()).st_size
        if self._is_mid_line or not written or written + more <= self._largest:
            return
        check_ownership(self._path)
        self._file.close()
        # A file that cannot be renamed is written on.
        with contextlib.suppress(OSError):
            os.replace(
                self._path, self._path.with_name(f"journal.{list_journal_parts(self._path)[-1].begin:015d}.jsonl")
            )
        self._open()

    def _append(self, line: bytes) -> None:
        """Write all of a line; on failure remove the part that was written, or else keep the rest waiting."""
        done = 0
        try:
            while done < len(line):
                # A disk that becomes full accepts a part of the line, and fails at the next write.
                taken = self._file.write(line[done:])
                if not taken:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                done += taken
        except OSError:
            # A partial line in the middle would make the journal unreadable. If it cannot be removed, the rest of the
            # line must be the next thing that is written.
            try:
                self._file.truncate(os.fstat(self._file.fileno()).st_size - done)
            except OSError:
                self._waiting[0], self._is_mid_line = line[done:], done > 0 or self._is_mid_line
            raise

    def _keep_few(self, event: Event) -> None:
        """Limit the waiting lines: drop the oldest, except the first, and put a note in their place."""
        # The first may be half written already, so it must be completed.
        while len(self._waiting) > MOST_WAITING:
            if not self._lost:
                self._waiting.insert(1, b"")
            del self._waiting[2]
            self._lost += 1
            text = f"the disk had no room for {self._lost:,} lines of the journal, which are missing here"
            when = {"time": event.get("time", 0.0), "utc": event.get("utc")}
            note = {"event": NOTE, **when, "text": text, "level": "warning"}
            self._waiting[1] = format_event_line(note).encode()

    def _warn_once(self, failure: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            why = failure.strerror or failure
            _warn_on_stderr(
                f"{self._file.name} cannot be written: {why}; its lines are kept, and written as soon as possible"
            )


def _warn_on_stderr(text: str) -> None:
    """Warn the user on stderr: the journal, where this belongs, is what cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        print(f"warning: {text}", file=sys.stderr)


def format_event_line(event: Mapping[str, object]) -> str:
    """Return an event as one line of strict JSON; non-finite numbers become the words NaN, Infinity and -Infinity."""
    return format_json_line(event)


def read_events(path: Path) -> list[Event]:
    """Return all events of a journal, except an incomplete last line.

    Raises BadData if it cannot be read, and OtherForm if another version of halfstep wrote it in another form.
    """
    try:
        return [_parse_numbered_line(line, path, number) for number, line in enumerate(_iterate_lines(path), start=1)]
    except OSError as failure:
        raise BadData(
            f"cannot read {path}: {failure.strerror or failure}",
            allowed="the journal.jsonl of a run",
            do="give the folder of a run",
        ) from failure


def iterate_saved_events(path: Path, after: int = 0) -> Iterator[Event]:
    """Yield the readable events from byte `after` on, for a resumed run.

    A damaged line or a missing journal must not stop a run, so both are skipped. Raises StateMismatch for a journal in
    another format version.
    """
    with contextlib.suppress(OSError):
        for line in _iterate_lines(path, after):
            event = parse_event(line)
            if event is not None:
                check_start_format(event, path)
                yield event


def check_journal_format(path: Path) -> None:
    """Raise OtherForm if the journal has another format version than this version of halfstep writes."""
    next((event for event in iterate_saved_events(path) if event["event"] == START), None)


def read_last_time(path: Path) -> float:
    """Return the `time` of a journal's last complete line, from which a resumed run continues; 0.0 without one."""
    # The newest file may have no line yet.
    filled = [part.path for part in list_journal_parts(path) if _read_file_size(part.path)]
    try:
        event = parse_event(_read_last_line(filled[-1])) or {} if filled else {}
        seconds = float(event.get("time", 0.0))
    except (OSError, TypeError, ValueError):
        return 0.0
    return seconds if 0.0 <= seconds < math.inf else 0.0


def _read_last_line(path: Path) -> bytes:
    with path.open("rb") as file:
        end = find_last_line_end(file, file.seek(0, 2))
        begin = find_last_line_end(file, end - 1)
        file.seek(begin)
        return file.read(min(end - begin, LARGEST_JSON))


def _iterate_lines(path: Path, after: int = 0) -> Iterator[bytes]:
    """Yield the complete lines of all files of a journal; a line longer than any of ours comes in parts."""
    parts = list_journal_parts(path)
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        if following is not None and following.begin <= after:
            continue
        # A launch that was killed while it began a new file has none yet.
        if following is None and len(parts) > 1 and not part.path.exists():
            return
        with part.path.open("rb") as file:
            file.seek(max(after - part.begin, 0))
            # Bounded: a file without line breaks must not be read into memory as a whole.
            while line := file.readline(LARGEST_JSON):
                if not line.endswith(b"\n") and len(line) < LARGEST_JSON:
                    break
                yield line


def iterate_lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of all files of a journal from the last to the first, without their ends.

    A line longer than any of ours comes as an empty one. Raises OSError if a file cannot be read.
    """
    for part in reversed(list_journal_parts(path)):
        if part.path.is_file():
            with part.path.open("rb") as file:
                yield from _iterate_file_backwards(file)


def _iterate_file_backwards(file: BinaryIO) -> Iterator[bytes]:
    at = find_last_line_end(file, file.seek(0, 2)) - 1
    if at < 0:
        return
    # The rest of a line that starts before this block; None if it is too long to keep.
    rest: bytes | None = b""
    while at > 0:
        begin = max(0, at - _LARGE_BLOCK)
        file.seek(begin)
        first, *lines = file.read(at - begin).split(b"\n")
        if lines:
            yield _join_line(lines.pop(), rest) or b""
            yield from reversed(lines)
            rest = b""
        rest = _join_line(first, rest)
        at = begin
    yield rest or b""


def _join_line(begin: bytes, rest: bytes | None) -> bytes | None:
    return None if rest is None or len(begin) + len(rest) > LARGEST_JSON else begin + rest


def _parse_numbered_line(line: bytes, path: Path, number: int) -> Event:
    event = parse_event(line)
    if event is None:
        raise BadData(
            f"line {number} of {path} is not an event",
            allowed="one JSON object a line, each with `event`",
            do="delete the line, or use the journal of another run",
        )
    check_start_format(event, path)
    return event


def check_start_format(event: Event, path: Path) -> None:
    """Raise OtherForm for a start in another form."""
    # The first form did not name itself. A start that has neither the name nor a field of the first form is damaged.
    form = event.get("format", 1 if "repeats" in event else FORMAT)
    if event["event"] == START and type(form) is int and form >= 1:
        check_same_form(
            path, FORMAT, form, for_earlier=f"use the version that wrote it, or {advise_adding_option('new')}"
        )


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line; None if it is none."""
    try:
        event = _parse(line)
    except (ValueError, RecursionError):
        event = _parse_with_stdlib(line)
    return event if isinstance(event, dict) and "event" in event else None


def _parse_with_stdlib(line: bytes) -> Any:
    """Return what the standard parser makes of a line, which accepts deeper nesting and half surrogate pairs."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
