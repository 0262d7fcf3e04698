"""curves.png: what the journal told, drawn as the run goes on."""

from __future__ import annotations

import time
from pathlib import Path

from halfstep.draw.curves import Series, draw_curves
from halfstep.train.journal.journal import END, EPOCH, Event

SHORTEST_PAUSE = 10.0
_SHARE_OF_TIME = 0.01


class Curves:
    """Draws after an epoch, if the last drawing is some time ago, and at the end."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "curves.png"
        self._series = Series()
        self._not_before = 0.0
        self._is_drawn = True

    def hear(self, event: Event) -> None:
        self._series.add(event)
        kind = event["event"]
        if kind == EPOCH:
            self._is_drawn = False
            if time.monotonic() >= self._not_before:
                self._draw()
        elif kind == END:
            self._draw()

    def recall(self, event: Event) -> None:
        self._series.add(event)

    def close(self) -> None:
        """A run that was killed between its last epoch and its end has its picture too."""
        if not self._is_drawn:
            self._draw()

    def _draw(self) -> None:
        began = time.monotonic()
        draw_curves(self._series, self._path)
        ended = time.monotonic()
        # Drawing happens between two steps, so it may only take a small share of the run.
        self._not_before = ended + max(SHORTEST_PAUSE, (ended - began) / _SHARE_OF_TIME)
        self._is_drawn = True
