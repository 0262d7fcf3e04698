"""What the weights of a run were worth when a checkpoint was taken, from the losses in its journal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from halfstep.guard.alarms.spike import REFUSED
from halfstep.train.journal import journal as events
from halfstep.train.journal.cutting import JOURNAL
from halfstep.train.journal.jsonl import kept_events

FAR = 10.0
"""Weights are ruined whose loss is this many times the first one of the run: training them further mends nothing."""


class Losses:
    """Of one run, over all of its launches. Without a journal, nothing is known, and nothing is ruined."""

    def __init__(self, folder: Path) -> None:
        self._after: dict[int, float] = {}
        """By attempt, the lowest loss of the weights that it left."""
        self._first: float | None = None
        waiting: list[int] = []
        """Attempts that left the weights as they are now."""
        for attempt, loss, applied in _steps(folder):
            if not waiting:
                waiting = [attempt - 1]
            if math.isfinite(loss):
                self._first = loss if self._first is None else self._first
                for one in waiting:
                    self._after[one] = min(loss, self._after.get(one, math.inf))
            waiting = [attempt] if applied else [*waiting, attempt]

    def ruined(self, attempt: int) -> bool:
        """Whether the weights after this attempt have a loss far above the one that the run began with."""
        first, after = self._first, self._after.get(attempt)
        if not first or after is None:
            return False
        return after - first > (FAR - 1) * abs(first)


def _steps(folder: Path) -> list[tuple[int, float, bool]]:
    """What a step that failed for its numbers shows says nothing about the weights, and its loss is none."""
    told = []
    for event in kept_events(folder / JOURNAL):
        attempt, loss, applied = (event.get(key) for key in ("attempt", "loss", "applied"))
        if event["event"] == events.STEP and type(attempt) is int:
            counts = applied is True or event.get("reason") == REFUSED
            told.append((attempt, _number(loss) if counts else math.nan, applied is True))
    return told


def _number(loss: Any) -> float:
    return float(loss) if isinstance(loss, (int, float)) else math.nan
