"""Draw curves.svg from the journal while the run continues."""

from __future__ import annotations

import time
from pathlib import Path

from halfstep.draw.series import RunSeries
from halfstep.journal.events import END, EPOCH, Event

# Drawing blocks training, so it is limited to a share of the run's time as well as to a minimum pause.
SHORTEST_PAUSE = 10.0
_SHARE_OF_TIME = 0.01


class CurvesListener:
    """A listener that draws after an epoch, unless it drew recently, and at the end."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "curves.svg"
        self._series = RunSeries()
        self._not_before = 0.0
        self._is_drawn = True

    def on_event(self, event: Event) -> None:
        """Add an event to the curves; draw after an epoch and at the end."""
        self._series.add(event)
        kind = event["event"]
        if kind == EPOCH:
            self._is_drawn = False
            if time.monotonic() >= self._not_before:
                self._draw()
        elif kind == END:
            self._draw()

    def restore_event(self, event: Event) -> None:
        """Add an event of an earlier launch without drawing."""
        self._series.add(event)

    def close(self) -> None:
        """Draw if there is something new: a run that was stopped has its curves too."""
        if not self._is_drawn:
            self._draw()

    def _draw(self) -> None:
        from halfstep.draw.curves import draw_curves  # not needed before the first epoch ends

        began = time.monotonic()
        draw_curves(self._series, self._path)
        ended = time.monotonic()
        # Drawing happens between two steps, so it may take only a small share of the run's time.
        self._not_before = ended + max(SHORTEST_PAUSE, (ended - began) / _SHARE_OF_TIME)
        self._is_drawn = True
