"""Emit the events of a run, as plain data, to its listeners."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from halfstep.errors import FolderLost, FolderTaken
from halfstep.files import create_parent_folder


@contextmanager
def guard_file_writing(path: Path) -> Iterator[None]:
    """Guard code that opens or changes `path`; create its folder, and raise FolderTaken for an OSError.

    Raises FolderLost if the run's folder is no longer its own.
    """
    try:
        create_parent_folder(path)
        yield
    except OSError as failure:
        raise FolderTaken(
            f"cannot write {path}: {failure.strerror or failure}",
            allowed="a run folder that can be written to",
            do="choose another one with run.dir=FOLDER",
        ) from failure


FORMAT = 3
"""The form of the journal, in each `start`: raised where an event or a field gets another name or meaning."""

Event = dict[str, Any]
"""Plain data: `event` (a name below), `time` (seconds that the run has taken), `utc` (date and time), and more."""

START, STAGE, PRECISION_CHECK, STEP = "start", "stage", "precision_check", "step"
SPEED, BAD_SAMPLE, EVALUATING, EPOCH = "speed", "bad_sample", "evaluating", "epoch"
SAVED, GUARD, NOTE, END = "saved", "guard", "note", "end"
FAILED_SAVES = "failed_saves"
"""The field of a note about a save that failed: how many did in a row."""


class Listener(Protocol):
    """A receiver of every event of a run, in order."""

    def on_event(self, event: Event) -> None:
        """Receive an event."""
        ...

    def close(self) -> None:
        """Release everything; no event follows."""
        ...


@runtime_checkable
class StatefulListener(Protocol):
    """A listener that needs the events of earlier launches; `restore_event` must not emit them again."""

    def restore_event(self, event: Event) -> None:
        """Receive an event of an earlier launch."""
        ...


class Journal:
    """The emitter of events; only rank 0 has listeners. A listener that fails is removed, and the others get a note.

    `began_with` is the time that a resumed run has already taken.
    """

    def __init__(self, listeners: Iterable[Listener] = (), began_with: float = 0.0) -> None:
        self.listeners = list(listeners)
        self._began = time.monotonic() - began_with

    def begin(self, listeners: Iterable[Listener], began_with: float) -> None:
        """Replace the listeners and set the clock to `began_with`, for a run that learns its past only now."""
        self.listeners = list(listeners)
        self._began = time.monotonic() - began_with

    @property
    def seconds(self) -> float:
        """Return the time that the run has taken."""
        return time.monotonic() - self._began

    def emit(self, event: str, **fields: Any) -> None:
        """Emit an event with these fields to all listeners; raise FolderLost if one finds the run's folder lost."""
        utc = datetime.now(UTC).isoformat(timespec="milliseconds")
        emitted = {"event": event, "time": round(self.seconds, 3), "utc": utc, **fields}
        lost: FolderLost | None = None
        # A copy: a listener that fails is removed while the loop runs.
        for listener in tuple(self.listeners):
            try:
                listener.on_event(emitted)
            except FolderLost as failure:
                lost = failure
                self._remove(listener)
            except Exception as failure:
                # A full disk or an unreachable tracker is no reason to lose the training.
                self._remove(listener)
                self._report(listener, failure)
        if lost is not None:
            raise lost

    def note(self, text: str, level: str) -> None:
        """Emit a note: a line of text with a level, `info` or `warning`."""
        self.emit(NOTE, text=text, level=level)

    def close(self) -> None:
        """Close and remove all listeners."""
        # The last one first: trackers follow the console and the log, which so report what a tracker could not send.
        while self.listeners:
            listener = self.listeners.pop()
            try:
                listener.close()
            except Exception as failure:
                self._report(listener, failure)

    def _remove(self, listener: Listener) -> None:
        self.listeners.remove(listener)
        with contextlib.suppress(Exception):
            listener.close()

    def _report(self, listener: Listener, failure: Exception) -> None:
        self.emit(NOTE, text=f"{type(listener).__name__} stopped: {failure or type(failure).__name__}", level="warning")
