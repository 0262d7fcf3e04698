"""What a run last said of everything: all that a line of numbers is made of."""

from __future__ import annotations

from collections import Counter
from typing import Any

from halfstep.train.journal.journal import EPOCH, EVALUATING, OBSERVED, SAVED, SPEED, START, STEP, Event

_NOTHING: Event = {}


class Latest:
    """The last event of each kind, and what adds up over the run."""

    def __init__(self) -> None:
        self.by_kind: dict[str, Event] = {}
        self.skipped: Counter[str] = Counter()
        self.saved: dict[str, str] = {}

    def hear(self, event: Event) -> None:
        kind = event["event"]
        self.by_kind[kind] = event
        if kind == STEP:
            if not event["applied"]:
                self.skipped[event["reason"]] += 1
        elif kind == SAVED:
            self.saved[event["what"]] = event["file"]

    @property
    def start(self) -> Event:
        return self.by_kind.get(START, _NOTHING)

    @property
    def step(self) -> Event:
        return self.by_kind.get(STEP, _NOTHING)

    @property
    def speed(self) -> Event:
        return self.by_kind.get(SPEED, _NOTHING)

    @property
    def epoch(self) -> Event:
        return self.by_kind.get(EPOCH, _NOTHING)

    @property
    def evaluating(self) -> Event:
        """How far an evaluation is; nothing while steps are taken."""
        event = self.by_kind.get(EVALUATING, _NOTHING)
        return event if event and event["time"] >= self.step.get("time", 0.0) else _NOTHING

    @property
    def observed_share(self) -> float | None:
        share: float | None = self.by_kind.get(OBSERVED, _NOTHING).get("share")
        return share

    @property
    def metric(self) -> str:
        """The name of the metric that decides which weights are best."""
        name: Any = (self.start.get("metric") or _NOTHING).get("name", "loss")
        return str(name)
