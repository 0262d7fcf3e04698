"""The live console: an area at the bottom of a terminal that is drawn again and again, everything else above it."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time

from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from halfstep import numbers
from halfstep.journal import events
from halfstep.journal.events import Event
from halfstep.journal.latest import LatestEvents
from halfstep.journal.lines import ConsoleLine, ConsoleSize, ConsoleStyle, RunClocks
from halfstep.journal.text import fit_encoding

REFRESHES_A_SECOND = 4


class LiveConsole:
    """A listener that records events cheaply and draws in its own thread, a few times per second."""

    def __init__(self, console: Console, style: ConsoleStyle) -> None:
        self._console, self._style = console, style
        self._latest = LatestEvents()
        self._time = 0.0
        self._heard = self._measured = self._epoch_began = self._stage_began = time.monotonic()
        self._live = Live(
            console=console, get_renderable=self._area, refresh_per_second=REFRESHES_A_SECOND, transient=True
        )

    def on_event(self, event: Event) -> None:
        """Record an event, and print its lines above the live area."""
        self._latest.on_event(event)
        self._heard, self._time = time.monotonic(), event["time"]
        kind = event["event"]
        if kind == events.STEP:
            if event["step_in_epoch"] <= 1:
                self._epoch_began = self._heard
            if event["applied"]:
                return  # no style prints it, and asking for the size of the terminal is a system call
        elif kind in (events.SPEED, events.EVALUATING):
            self._measured = self._heard
        elif kind == events.STAGE:
            self._stage_began = self._heard
        elif kind == events.START:
            # An epoch that is resumed in its middle has no first step that could start its clock.
            self._epoch_began = self._heard
        elif kind == events.END:
            self.close()
        self._print(self._style.list_lines(event, self._latest, self._size))
        if kind == events.START:
            # Without this, a crash would leave the terminal without a cursor.
            atexit.register(self.close)
            self._live.start()

    def restore_event(self, event: Event) -> None:
        """Record an event of an earlier launch without printing it."""
        self._latest.on_event(event)

    def close(self) -> None:
        """Stop drawing and restore the cursor, also after an interruption."""
        self._live.stop()
        atexit.unregister(self.close)

    @property
    def _size(self) -> ConsoleSize:
        return ConsoleSize(self._console.width, self._console.height)

    def _print(self, lines: list[ConsoleLine]) -> None:
        for line in lines:
            text = Text(fit_encoding(line.text, self._console.encoding), style=line.style)
            if line.fit == "keep":
                text.pad_left(line.indent)
                self._console.print(text, soft_wrap=True)
                continue
            if line.fit == "cut":
                text.truncate(max(self._console.width - line.indent, 1), overflow="ellipsis")
                text.no_wrap = True
            self._console.print(Padding(text, (0, 0, 0, line.indent), expand=False))

    def _area(self) -> Group:
        now = time.monotonic()
        # Time left is emitted only now and then; in between it is counted down here, so that the clock moves.
        since = now - self._measured
        told = self._latest.time_left
        left, in_epoch = (
            max(numbers.to_float(told[name]) - since, 0.0) if told.get(name) is not None else math.nan
            for name in ("seconds_left", "seconds_left_in_epoch")
        )
        run = self._time + now - self._heard
        rough, stage = bool(told.get("is_rough")), now - self._stage_began
        clocks = RunClocks(run, now - self._epoch_began, left, in_epoch, rough, stage)
        area = self._style.draw_live_area(self._latest, clocks, self._console.width, self._console.encoding)
        return Group(*area)


def _restore_streams() -> None:
    """Restore the real streams in a forked worker of a data loader."""
    # The live area belongs to the parent. A worker that printed through rich's proxy could wait forever for a lock that
    # some thread of the parent held at the fork.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_streams)
