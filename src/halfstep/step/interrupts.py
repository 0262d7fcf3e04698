"""Handle Ctrl-C in the middle of a step: it leaves the state before the step or after it, never one in between."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import FrameType
from typing import Any

# The C functions below the module `signal`, which converts numbers to enums: that takes ten times as long as the calls
# themselves, twice in every step.
_get, _set = _signal.getsignal, _signal.signal
_SIGINT = int(signal.SIGINT)
_MAIN = threading.main_thread().ident


class DeferredInterrupts:
    """A context around a step: Ctrl-C stops forward and backward at once, but is deferred during apply and rollback.

    A handler that was installed before is called in the same way, and restored afterwards. Python runs handlers in the
    main thread only, so steps in other threads are not interrupted.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._installed = False
        self._outer: Any = None
        self._waiting: tuple[int, FrameType | None] | None = None
        self._interruptible = False
        """Whether a window is being computed: it may be interrupted anywhere, and is then rolled back."""

    def __enter__(self) -> None:
        # Before anything that an exit has to reverse: until `_set`, Ctrl-C raises here, and there is no exit.
        if not self._depth and threading.get_ident() == _MAIN:
            outer = _get(_SIGINT)
            # Not callable means ignored, left to the system, or set by code that is not Python: then nothing is
            # deferred.
            if callable(outer):
                self._outer = outer
                _set(_SIGINT, self._arrives)
                self._installed = True
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth or not self._installed:
            return
        self._interruptible = self._installed = False
        try:
            _set(_SIGINT, self._outer)
        finally:
            # Also if one arrives just now, which the restored handler raises: none may wait for the next step.
            waiting, self._waiting = self._waiting, None
        # Delivered only now, to the restored handler: the step is complete even if that handler raises.
        if waiting is not None:
            self._outer(*waiting)

    def allow(self) -> None:
        """Allow interruption from here on, and deliver a Ctrl-C that is already pending."""
        self._interruptible = True
        if self._waiting is not None:
            self._deliver(*self._waiting)

    def forbid(self) -> bool:
        """Defer Ctrl-C from here on; return whether it was allowed."""
        allowed, self._interruptible = self._interruptible, False
        return allowed

    def _arrives(self, number: int, frame: FrameType | None) -> None:
        if self._interruptible and not _is_in_context_switch(frame):
            self._deliver(number, frame)
        else:
            self._waiting = number, frame

    def _deliver(self, number: int, frame: FrameType | None) -> None:
        # Before the handler raises: a second Ctrl-C must not interrupt the rollback of the first.
        self._interruptible, self._waiting = False, None
        self._outer(number, frame)
        self._interruptible = True  # reached only if the handler raised nothing


def _is_in_context_switch(frame: FrameType | None) -> bool:
    """Return whether a context manager is being entered or left.

    An exception in there would leave set what it sets: autocast, a mode of torch, a handler of signals.
    """
    while frame is not None:
        if frame.f_code.co_name in _SWITCHES:
            return True
        frame = frame.f_back
    return False


_SWITCHES = frozenset({"__enter__", "__exit__"})
