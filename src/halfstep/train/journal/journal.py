"""The one seam after the update: events, as plain data, to everyone who listens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

Event = dict[str, Any]
"""`event` (one of the names below), `time` (seconds that the run has taken), and fields of plain data."""

START, OBSERVED, STEP, SPEED, REPLACED, EVALUATING, EPOCH, SAVED, GUARD, NOTE, END = (
    "start",
    "observed",
    "step",
    "speed",
    "replaced",
    "evaluating",
    "epoch",
    "saved",
    "guard",
    "note",
    "end",
)


class Listener(Protocol):
    """Hears every event of a run, in order."""

    def hear(self, event: Event) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Remembering(Protocol):
    """A listener that must know what was told before it came, without telling it again."""

    def recall(self, event: Event) -> None: ...


class Journal:
    """Tells its listeners. Only rank 0 has any. One that fails is left out, and the others are told why.

    A run that is taken up again `began_with` the seconds that it had taken before.
    """

    def __init__(self, listeners: Iterable[Listener] = (), began_with: float = 0.0) -> None:
        self.listeners = list(listeners)
        self._began = time.monotonic() - began_with

    def begin(self, listeners: Iterable[Listener], began_with: float) -> None:
        """From here on these listen, and the clock shows `began_with`: for a run that knows its past only now."""
        self.listeners = list(listeners)
        self._began = time.monotonic() - began_with

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._began

    def tell(self, event: str, **fields: Any) -> None:
        told = {"event": event, "time": round(self.seconds, 3), **fields}
        for listener in tuple(self.listeners):
            try:
                listener.hear(told)
            except Exception as failure:
                # A full disk or a tracker without a network is no reason to lose what was trained.
                self._leave_out(listener, failure)

    def note(self, text: str, level: str) -> None:
        """Anything else worth a line."""
        self.tell(NOTE, text=text, level=level)

    def close(self) -> None:
        for listener in tuple(self.listeners):
            try:
                listener.close()
            except Exception as failure:
                self._leave_out(listener, failure)
        self.listeners.clear()

    def _leave_out(self, listener: Listener, failure: Exception) -> None:
        self.listeners.remove(listener)
        with contextlib.suppress(Exception):
            listener.close()
        self.tell(NOTE, text=f"{type(listener).__name__} stopped: {failure or type(failure).__name__}", level="warning")
