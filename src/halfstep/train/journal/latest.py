"""What a run last said of everything: all that a line of numbers is made of."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from halfstep.train.journal.journal import EPOCH, EVALUATING, OBSERVED, SAVED, SPEED, START, STEP, Event

CHECKPOINT = "checkpoint"
"""What a `saved` event is about when a run can go on from it."""
_NOTHING: Event = {}
_OF_THIS_PROCESS = (SPEED, OBSERVED, EVALUATING)


class Checkpoint(NamedTuple):
    name: str
    attempt: int


class Latest:
    """The last event of each kind, and what adds up over the run."""

    def __init__(self) -> None:
        self.by_kind: dict[str, Event] = {}
        self.skipped: Counter[str] = Counter()
        self.saved: dict[str, str] = {}
        self.checkpoint: Checkpoint | None = None

    def hear(self, event: Event) -> None:
        kind = event["event"]
        self.by_kind[kind] = event
        if kind == STEP:
            if not event["applied"]:
                self.skipped[event["reason"]] += 1
        elif kind == SAVED:
            self.saved[event["what"]] = event["file"]
            if event["what"] == CHECKPOINT:
                self.checkpoint = Checkpoint(event["file"].rpartition("/")[2], event["attempt"])
        elif kind == START:
            self._begin(event)

    def _begin(self, start: Event) -> None:
        """Also in the middle of a journal: counts go on, but what the machine did was another process's."""
        for kind in _OF_THIS_PROCESS:
            self.by_kind.pop(kind, None)
        resumed = start.get("resumed") or _NOTHING
        if resumed.get("checkpoint"):
            # A journal is cut back to before the line that tells of the checkpoint.
            self.checkpoint = Checkpoint(resumed["checkpoint"], resumed["attempt"])

    @property
    def start(self) -> Event:
        return self.by_kind.get(START, _NOTHING)

    @property
    def step(self) -> Event:
        return self.by_kind.get(STEP, _NOTHING)

    @property
    def attempt(self) -> int:
        """Steps attempted so far, also where the journal of the first ones was lost."""
        resumed = self.start.get("resumed") or _NOTHING
        return int(max(self.step.get("attempt", 0), resumed.get("attempt") or 0))

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
