"""A run that is asked to stop: the signal is noted, and the run ends where it can do so well."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

HEARD = (signal.SIGTERM, signal.SIGINT)


@dataclass
class _Heard:
    first: str | None = None
    interrupts: int = 0


_active: _Heard | None = None
"""Of the main thread's Stopping; one that is entered inside of it shares it."""


class Stopping:
    """Inside, SIGTERM and Ctrl-C end nothing: they set `asked`. A second Ctrl-C is a KeyboardInterrupt at once.

    One that is entered inside of another has the same `asked`, also where that was set before. In threads other than
    the main one no signals can be heard; there it shows what the main thread's one heard, if there is one.
    """

    def __init__(self) -> None:
        self._heard = _Heard()
        self._outer: _Heard | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> str | None:
        """The name of the first signal that asked to stop."""
        return self._heard.first

    def __enter__(self) -> Stopping:
        global _active
        self._heard = _active or _Heard()
        if threading.current_thread() is threading.main_thread():
            self._outer, _active = _active, self._heard
            for number in HEARD:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if self._before:
            _active = self._outer
        while self._before:
            number, handler = self._before.popitem()
            # None is a handler that was not set from Python, and cannot be set again from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        heard = self._heard
        heard.first = heard.first or signal.Signals(number).name
        if number == signal.SIGINT:
            heard.interrupts += 1
            if heard.interrupts > 1 and not _is_at_the_door(frame):
                raise KeyboardInterrupt


def asked_to_stop() -> str | None:
    """The name of the signal that asked the process to stop, for long work that is told of no Stopping."""
    return None if _active is None else _active.first


_DOOR = (Stopping.__enter__.__code__, Stopping.__exit__.__code__)


def _is_at_the_door(frame: FrameType | None) -> bool:
    """Whether a Stopping is being entered or left: an error would leave its handlers behind when it is over."""
    while frame is not None:
        if frame.f_code in _DOOR:
            return True
        frame = frame.f_back
    return False
