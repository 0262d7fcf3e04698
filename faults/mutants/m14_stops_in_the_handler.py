"""The signal's handler ends the run where it is, instead of leaving that to the end of the step."""

from __future__ import annotations

import signal
from types import FrameType

from halfstep.errors import Stopped
from halfstep.train.signals import StopSignalHandler

WHAT = "the run ends inside the signal handler"
ROWS = ("F33",)


def apply() -> None:
    def at_once(self: StopSignalHandler, number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    StopSignalHandler._hear = at_once  # type: ignore[method-assign]
