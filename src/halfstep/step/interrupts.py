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
        self.interruptible = False
        """Whether a window is being computed: it may be interrupted anywhere, and is then rolled back."""

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1 or threading.get_ident() != _MAIN:
            return
        outer = _get(_SIGINT)
        # Not callable means ignored, left to the system, or set by code that is not Python: then nothing is deferred.
        if callable(outer):
            self._outer = outer
            self._installed = True
            _set(_SIGINT, self._arrives)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth or not self._installed:
            return
        self._installed = False
        _set(_SIGINT, self._outer)
        # Delivered only now, to the restored handler: the step is complete even if that handler raises.
        waiting, self._waiting, self.interruptible = self._waiting, None, False
        if waiting is not None:
            self._outer(*waiting)

    def allow(self) -> None:
        """Allow interruption from here on, and deliver a Ctrl-C that is already pending."""
        self.interruptible = True
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._arrives(*waiting)

    def _arrives(self, number: int, frame: FrameType | None) -> None:
        if not self.interruptible:
            self._waiting = number, frame
            return
        # Before the handler raises: a second Ctrl-C must not interrupt the rollback of the first.
        self.interruptible = False
        self._outer(number, frame)
        self.interruptible = True  # reached only if the handler raised nothing
