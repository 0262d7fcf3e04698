"""The one seam after the update: events, as plain data, to everyone who listens."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

Event = dict[str, Any]
"""`event` (one of the names below), `time` (seconds since the run began), and fields of plain data."""

START, OBSERVED, STEP, SPEED, REPLACED, EPOCH, SAVED, NOTE, END = (
    "start",
    "observed",
    "step",
    "speed",
    "replaced",
    "epoch",
    "saved",
    "note",
    "end",
)


class Listener(Protocol):
    """Hears every event of a run, in order."""

    def hear(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Journal:
    """Tells its listeners. Only rank 0 has any."""

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        self.listeners = list(listeners)
        self._began = time.monotonic()

    def tell(self, event: str, **fields: Any) -> None:
        told = {"event": event, "time": round(time.monotonic() - self._began, 3), **fields}
        for listener in self.listeners:
            listener.hear(told)

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
