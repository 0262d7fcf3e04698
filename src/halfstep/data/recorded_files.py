"""Record the files of a source at the start of a run, and detect files that change before a sample is read again."""

from __future__ import annotations

import os
from array import array

from halfstep.data.dataset import Source
from halfstep.data.file_state import FileState, RecordedFile, describe_file_change
from halfstep.data.fingerprint import NOT_READ, UNREADABLE, SourcePrint

_PER_FILE = len(FileState._fields)
_BITS = 2**64 - 1
"""Times before 1970 are negative, and some file systems number files beyond 63 bits."""


class RecordedFiles:
    """The state of every file of a source: 32 bytes for each, and one `stat` for each when its sample is read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._contents: dict[str, str] = {}
        self._whole = False
        self._ends, self._states = array("Q"), array("Q")
        for number in range(len(source)):
            for _, path in source.files_of(number):
                self._states.extend(value & _BITS for value in _read_file_state(path))
            self._ends.append(len(self._states))

    def take_contents(self, found: SourcePrint) -> None:
        """Take the digests of the files that a fingerprint read, by which a file that was touched is still the same."""
        self._whole = found.whole
        self._contents = {row.key: row.content for row in found.rows or () if row.content not in (NOT_READ, UNREADABLE)}

    def __call__(self, number: int) -> str:
        """Return how a file of this sample has changed; empty if none has."""
        place = self._ends[number - 1] if number else 0
        for key, path in self._source.files_of(number):
            now = FileState(*(value & _BITS for value in _read_file_state(path)))
            before = FileState(*self._states[place : place + _PER_FILE])
            place += _PER_FILE
            # A file that is not there is reported by its reader.
            if now != before and now != _MISSING:
                recorded = RecordedFile(before, self._contents.get(key, ""), self._whole)
                if change := describe_file_change(recorded, now, path):
                    return change
        return ""


_MISSING = FileState(0, 0, 0, 0)


def _read_file_state(path: str | os.PathLike[str]) -> FileState:
    try:
        return FileState.of(os.stat(path))
    except (OSError, ValueError):
        return _MISSING
