"""Keep the latest event of each kind, from which the console and the log make their lines."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from halfstep.journal.events import EPOCH, EVALUATING, PRECISION_CHECK, SAVED, SPEED, STAGE, START, STEP, Event

CHECKPOINT = "checkpoint"
"""The `kind` of a `saved` event for a checkpoint that a run can resume from."""
_NOTHING: Event = {}
_OF_THIS_PROCESS = (SPEED, PRECISION_CHECK, EVALUATING, STAGE)


class CheckpointName(NamedTuple):
    """The name and the step of a checkpoint."""

    name: str
    attempt: int


class LatestEvents:
    """The last event of each kind, and the totals of the run."""

    def __init__(self) -> None:
        self.by_kind: dict[str, Event] = {}
        self.skipped: Counter[str] = Counter()
        self.saved: dict[str, str] = {}
        self.checkpoint: CheckpointName | None = None
        self.validated: tuple[str, ...] = ()
        """The metrics of the last evaluation, by name."""

    def on_event(self, event: Event) -> None:
        """Record an event."""
        kind = event["event"]
        self.by_kind[kind] = event
        if kind == STEP:
            if not event["applied"]:
                self.skipped[event["reason"]] += 1
        elif kind == SAVED:
            self.saved[event["kind"]] = event["file"]
            if event["kind"] == CHECKPOINT:
                self.checkpoint = CheckpointName(event["file"].rpartition("/")[2], event["attempt"])
        elif kind == EPOCH:
            self.validated = tuple(event.get("val") or self.validated)
        elif kind == START:
            self._begin(event)

    def _begin(self, start: Event) -> None:
        """Continue the totals at the start of a launch, and drop what described the previous process."""
        for kind in _OF_THIS_PROCESS:
            self.by_kind.pop(kind, None)
        resumed = start.get("resumed") or _NOTHING
        if resumed.get("checkpoint"):
            # The journal is cut back to before the line about this checkpoint, so only the start event names it.
            self.checkpoint = CheckpointName(resumed["checkpoint"], resumed["attempt"])

    @property
    def start(self) -> Event:
        return self.by_kind.get(START, _NOTHING)

    @property
    def stage(self) -> Event:
        """Return the stage of a launch before its first step; empty once training steps run."""
        return self._since_last_step(STAGE)

    @property
    def step(self) -> Event:
        return self.by_kind.get(STEP, _NOTHING)

    @property
    def attempt(self) -> int:
        """Return the number of attempted steps, even if the journal of the first ones was lost."""
        resumed = self.start.get("resumed") or _NOTHING
        return int(max(self.step.get("attempt", 0), resumed.get("attempt") or 0))

    @property
    def speed(self) -> Event:
        return self.by_kind.get(SPEED, _NOTHING)

    @property
    def time_left(self) -> Event:
        """Return the latest event with an estimate of the time left."""
        speed, evaluating = self.speed, self.evaluating
        return evaluating if evaluating.get("seconds_left") is not None else speed

    @property
    def epoch(self) -> Event:
        return self.by_kind.get(EPOCH, _NOTHING)

    @property
    def evaluating(self) -> Event:
        """Return the progress of an evaluation; empty while steps are taken."""
        return self._since_last_step(EVALUATING)

    def _since_last_step(self, kind: str) -> Event:
        event = self.by_kind.get(kind, _NOTHING)
        return event if event and event["time"] >= self.step.get("time", 0.0) else _NOTHING

    @property
    def precision_check(self) -> Event:
        """Return the latest observation of the precision."""
        return self.by_kind.get(PRECISION_CHECK, _NOTHING)

    @property
    def observed_share(self) -> float | None:
        share: float | None = self.precision_check.get("share")
        return share

    @property
    def metric(self) -> str:
        """Return the name of the metric that decides which weights are best."""
        name: Any = (self.start.get("metric") or _NOTHING).get("name", "loss")
        return str(name)
