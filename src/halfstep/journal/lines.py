"""The form of a console: the lines that it prints for an event, and the area that it draws below them on a terminal."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

from rich.text import Text

from halfstep.journal.events import Event
from halfstep.journal.latest import LatestEvents
from halfstep.numbers import format_clock
from halfstep.printable import escape_to_one_line

TABLE, GUIDE = "table", "guide"
"""The values of `run.console`."""


class ConsoleLine(NamedTuple):
    """A line of a console."""

    text: str
    style: str = ""
    indent: int = 0
    fit: Literal["wrap", "cut", "keep"] = "wrap"
    """On a terminal that is too narrow: break it between words, end it with an ellipsis, or keep it whole to copy."""


class ConsoleSize(NamedTuple):
    """Columns and rows of a terminal; a file has the width of a usual terminal."""

    width: int = 80
    height: int = 24


class RunClocks(NamedTuple):
    """Times in seconds at the moment when the area is drawn."""

    run: float
    epoch: float
    left: float
    """The time left for the whole run; NaN while it is not known."""
    in_epoch: float = math.nan
    """The time left for the epoch's steps, or for its evaluation."""
    is_rough: bool = False
    """Whether the time left includes an evaluation, and none has been timed yet."""
    stage: float = 0.0
    """The time since the current stage before the first step began."""


class ConsoleStyle(Protocol):
    """The wording and layout of a console. The event was recorded in `latest` before."""

    def list_lines(self, event: Event, latest: LatestEvents, size: ConsoleSize) -> list[ConsoleLine]:
        """Return the lines to print for an event."""
        ...

    def draw_live_area(self, latest: LatestEvents, clocks: RunClocks, width: int, encoding: str) -> list[Text]:
        """Return the lines of the area below; none is longer than `width`."""
        ...


def draw_stage(latest: LatestEvents, clocks: RunClocks, width: int) -> list[Text]:
    """Return the line on what happens before the first step of a launch, and for how long."""
    doing = escape_to_one_line(latest.stage.get("text", "preparing the first step"))
    line = Text(f" {doing}  {format_clock(clocks.stage)}", style="dim", no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return [line]
