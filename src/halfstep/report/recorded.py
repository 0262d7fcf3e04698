"""Read the journal of a run, once: all that a report shows of it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.errors import BadData
from halfstep.journal.events import END, EPOCH, GUARD, NOTE, PRECISION_CHECK, SAVED, SPEED, START, STEP, Event
from halfstep.journal.jsonl import JOURNAL, parts_of, saved_events
from halfstep.report.plain import fields, known, number, text

MOST_EVENTS = 2000
"""Events of the guard, notes and single skips that are kept; all are counted."""
CURVES = ("loss", "lr", "loss_scale", "grad_norm")


class Skip(NamedTuple):
    """A step that was not applied."""

    attempt: float
    reason: str


class Speed(NamedTuple):
    """What was measured beside the steps, every `run.log_every` of them."""

    attempt: float
    samples_per_second: float
    wait_share: float
    memory: dict[str, Any]
    gpu: dict[str, Any]
    meters: dict[str, Any]


class Epoch(NamedTuple):
    """The end of an epoch."""

    attempt: float
    epoch: float
    train: dict[str, Any]
    val: dict[str, Any]
    seconds: float
    samples_per_second: float


@dataclass
class Recorded:
    """The events of a run, from the first launch to the last line."""

    start: Event = field(default_factory=dict)
    """The start of the last launch."""
    end: Event = field(default_factory=dict)
    """How the last launch ended; empty where it did not say."""
    check: Event = field(default_factory=dict)
    launches: int = 0
    attempt: array[float] = field(default_factory=lambda: array("d"))
    curves: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in CURVES})
    applied: int = 0
    skips: list[Skip] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    epochs: list[Epoch] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    guard: list[Event] = field(default_factory=list)
    notes: list[Event] = field(default_factory=list)
    checkpoints: int = 0
    first_utc: str = ""
    last_utc: str = ""
    seconds: float = 0.0

    def add(self, event: Event) -> None:
        """Add an event; kinds that a report does not show only move the clock."""
        self.last_utc = text(event.get("utc"), 40) or self.last_utc
        self.first_utc = self.first_utc or self.last_utc
        taken = number(event.get("time"))
        self.seconds = taken if known(taken) else self.seconds
        kind = event.get("event")
        if isinstance(kind, str) and kind in _ADD:
            _ADD[kind](self, event)

    @property
    def last_attempt(self) -> float:
        """Return the newest attempted step; 0 before the first."""
        return self.attempt[-1] if self.attempt else 0.0

    def start_again(self, event: Event) -> None:
        """Begin a launch; the journal was cut back to the checkpoint that it resumes from."""
        self.start, self.end, self.launches = event, {}, self.launches + 1

    def step(self, event: Event) -> None:
        """Add one attempted step."""
        attempt = number(event.get("attempt"))
        if not known(attempt):
            return
        self.attempt.append(attempt)
        for name, values in self.curves.items():
            values.append(number(event.get(name)))
        if event.get("applied"):
            self.applied += 1
            return
        reason = text(event.get("reason"), 200)
        self.skipped[reason] += 1
        if len(self.skips) < MOST_EVENTS:
            self.skips.append(Skip(attempt, reason))

    def speed(self, event: Event) -> None:
        """Add a measurement of the machine."""
        parts = (fields(event.get(name)) for name in ("memory", "gpu", "meters"))
        rate, wait = number(event.get("samples_per_second")), number(event.get("wait_share"))
        self.speeds.append(Speed(self.last_attempt, rate, wait, *parts))

    def epoch(self, event: Event) -> None:
        """Add the end of an epoch."""
        train, val = fields(event.get("train")), fields(event.get("val"))
        figures = (number(event.get(name)) for name in ("seconds", "samples_per_second"))
        self.epochs.append(Epoch(self.last_attempt, number(event.get("epoch")), train, val, *figures))

    def saved(self, event: Event) -> None:
        """Count a checkpoint."""
        self.checkpoints += event.get("kind") == "checkpoint"

    def ended(self, event: Event) -> None:
        """Keep how the launch ended."""
        self.end = event

    def checked(self, event: Event) -> None:
        """Keep what was observed to run."""
        self.check = event

    def guarded(self, event: Event) -> None:
        """Keep an event of the guard."""
        if len(self.guard) < MOST_EVENTS:
            self.guard.append(event)

    def noted(self, event: Event) -> None:
        """Keep a note."""
        if len(self.notes) < MOST_EVENTS:
            self.notes.append(event)


_ADD: dict[str, Callable[[Recorded, Event], None]] = {
    START: Recorded.start_again,
    STEP: Recorded.step,
    SPEED: Recorded.speed,
    EPOCH: Recorded.epoch,
    SAVED: Recorded.saved,
    END: Recorded.ended,
    PRECISION_CHECK: Recorded.checked,
    GUARD: Recorded.guarded,
    NOTE: Recorded.noted,
}


def read_recorded(run: Path, why_empty: str = "") -> Recorded:
    """Return what the journal of a run says, passing over damaged lines.

    Raises BadData where there is no journal, or none of its lines is the start of a run, and OtherForm where another
    version of halfstep wrote it. `why_empty` is what else is known of a run without one.
    """
    path = run / JOURNAL
    if not any(part.path.is_file() for part in parts_of(path)):
        ended = f": {why_empty}" if why_empty else ""
        raise BadData(
            f"{run} has a recipe and no {JOURNAL}{ended}",
            allowed="a run that has begun",
            do=f"start it again with the same command; {run}/train.log has what it said, if anything",
        )
    found = Recorded()
    for event in saved_events(path):
        found.add(event)
    if not found.launches:
        raise BadData(
            f"no line of {path} can be read as the start of a run",
            allowed="the journal as `halfstep train` wrote it",
            do="take it from a backup; the checkpoints of the run are not affected, and the same command resumes it",
        )
    return found
