"""Summarize the journal of a run of any length: read it once, from its end, and keep a few hundred points a curve.

It reads backwards because the last record of a step counts: steps repeated after a restart replace the earlier ones,
and only the end of the journal shows which these are. The last attempt, which determines the spans of a curve, comes
first too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.draw.thinning import AttemptPoint, AttemptSpans, ThinnedCurve
from halfstep.journal.events import (
    BAD_SAMPLE,
    END,
    EPOCH,
    GUARD,
    NOTE,
    PRECISION_CHECK,
    SAVED,
    SPEED,
    START,
    STEP,
    Event,
)
from halfstep.journal.jsonl import check_start_format, iterate_lines_backwards, iterate_saved_events, parse_event
from halfstep.journal.latest import CHECKPOINT
from halfstep.journal.thinning import MOST_NAMES, Subsample, ValuesByName, parse_journal_number

STEP_CURVES = ("loss", "lr", "loss_scale", "grad_norm")
_SPEED_GROUPS, _EPOCH_GROUPS = ("memory", "gpu", "train_metrics", "meters"), ("train", "val")
MOST_SKIPS, MOST_EVENTS = 1000, 200
"""Skips of a reason, and launches, events of the guard and notes, that are kept of any number."""
MOST_CURVES = 2 * MOST_NAMES
LONGEST_TEXT, LONGEST_NAME, _LONGEST_UTC, MOST_IDS = 2000, 200, 40, 16
LARGEST_FACTS = 2**16
"""Bytes of a line whose facts are kept."""
LARGEST_BETWEEN = 2**25
"""Bytes of lines between two steps that are kept until the attempt that they belong to is known."""
_SHOWN = (SPEED, EPOCH, SAVED, END, PRECISION_CHECK, GUARD, NOTE, BAD_SAMPLE)
_LARGEST_ATTEMPT = 2**53
_SPAN = 4096


class SkippedStep(NamedTuple):
    """A step that was not applied."""

    attempt: int
    reason: str
    loss: float
    loss_scale: float
    grad_norm: float
    ids: tuple[int, ...]
    """The first of its samples."""


class EventAtStep(NamedTuple):
    """An event, and the last attempt before it."""

    attempt: int
    event: Event


@dataclass
class Summary:
    """What the journal of a run tells, in bounded space. Counts are of everything, lists are of a bounded sample."""

    axis: AttemptSpans
    lines: int = 0
    damaged: int = 0
    """Lines that are no events."""
    superseded: int = 0
    """Steps that were done again after a restart; the later ones count."""
    left_out: int = 0
    """Events between two steps beyond `LARGEST_BETWEEN`."""
    attempts: int = 0
    applied: int = 0
    last_attempt: int = 0
    start: Event = field(default_factory=dict)
    """The start of the last launch."""
    end: Event = field(default_factory=dict)
    """How the last launch ended; empty if it did not say."""
    precision_check: Event = field(default_factory=dict)
    speed: Event = field(default_factory=dict)
    epoch: Event = field(default_factory=dict)
    checkpoints: int = 0
    seconds: float = 0.0
    first_utc: str = ""
    last_utc: str = ""
    steps: dict[str, ThinnedCurve] = field(default_factory=dict)
    """Curves of every step: `loss`, `lr`, `loss_scale` and `grad_norm`."""
    speeds: dict[str, ThinnedCurve] = field(default_factory=dict)
    """Curves of the machine, such as `samples_per_second`, `wait_share`, `memory.host_bytes` and `gpu.power_watts`."""
    epochs: dict[str, ThinnedCurve] = field(default_factory=dict)
    """Curves of the epochs, such as `train.loss` and `val.top1`."""
    headroom: dict[str, AttemptPoint] = field(default_factory=dict)
    """The least headroom in bits of each module that was metered."""
    _launches: Subsample[EventAtStep] = field(default_factory=lambda: Subsample(MOST_EVENTS))
    _guard: Subsample[EventAtStep] = field(default_factory=lambda: Subsample(MOST_EVENTS))
    _notes: Subsample[EventAtStep] = field(default_factory=lambda: Subsample(MOST_EVENTS))
    _bad_samples: Subsample[EventAtStep] = field(default_factory=lambda: Subsample(MOST_EVENTS))
    _skips: ValuesByName[Subsample[SkippedStep]] = field(
        default_factory=lambda: ValuesByName(lambda: Subsample(MOST_SKIPS))
    )

    @property
    def skipped(self) -> Counter[str]:
        """Return how many steps were skipped for each reason."""
        return Counter({reason: sample.count for reason, sample in self._skips.values.items()})

    @property
    def skips(self) -> list[SkippedStep]:
        """Return the skips that were kept, in the order of their attempts: all, or a sample for each reason."""
        return sorted(skip for sample in self._skips.values.values() for skip in sample.kept)

    @property
    def are_all_skips_kept(self) -> bool:
        """Return whether `skips` has every one."""
        return all(sample.count == len(sample.kept) for sample in self._skips.values.values())

    @property
    def launch_count(self) -> int:
        """Return how often the run was started or resumed."""
        return self._launches.count

    @property
    def launches(self) -> list[EventAtStep]:
        """Return the starts that were kept, without their recipes."""
        return self._launches.kept[::-1]

    @property
    def guard(self) -> list[EventAtStep]:
        """Return the events of the guard that were kept, in order."""
        return self._guard.kept[::-1]

    @property
    def notes(self) -> list[EventAtStep]:
        """Return the notes that were kept, in order."""
        return self._notes.kept[::-1]

    @property
    def bad_sample_count(self) -> int:
        """Return the number of samples that could not be used."""
        return self._bad_samples.count

    @property
    def bad_samples(self) -> list[EventAtStep]:
        """Return the samples that could not be used and were kept, in order."""
        return self._bad_samples.kept[::-1]


def summarize(path: Path) -> Summary:
    """Return the summary of a journal in all its files; damaged lines are counted and skipped.

    Raises OtherForm if another version of halfstep wrote it in another format, and OSError if it cannot be read.
    """
    reading = _SummaryBuilder(path)
    for line in iterate_lines_backwards(path):
        reading.add(line)
    return reading.done()


def _read_attempt(event: Event) -> int:
    """Return the attempt of a step; 0 if it is no valid one."""
    attempt = event.get("attempt")
    return attempt if type(attempt) is int and 0 < attempt < _LARGEST_ATTEMPT else 0


class _SummaryBuilder:
    """The state of reading a journal from its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # The attempt of the first step in the files that are left of a journal; 1 without one.
        attempts = (_read_attempt(event) for event in iterate_saved_events(path) if event["event"] == STEP)
        self._first: int = next((attempt for attempt in attempts if attempt), 1)
        self._found = Summary(AttemptSpans.of(self._first, self._first))
        self._lowest = _LARGEST_ATTEMPT
        """The lowest attempt that was read: what comes before it in the journal with a higher one was done again."""
        self._between: list[Event] = []
        self._between_bytes = 0
        self._rows: list[tuple[Any, ...]] = []
        """Steps of one span of the axis: the attempt, and what `STEP_CURVES` names."""
        self._span_begin = _LARGEST_ATTEMPT
        self._newest: Event = {}
        self._oldest: Event = {}

    def add(self, line: bytes) -> None:
        """Add the line before those that were added."""
        self._found.lines += 1
        event = parse_event(line)
        kind = event["event"] if event is not None else None
        if event is None or not isinstance(kind, str):
            self._found.damaged += 1
            return
        self._newest = self._newest or event
        self._oldest = event
        if kind == STEP:
            self._step(event)
        elif kind == START:
            check_start_format(event, self._path)
            self._start(event)
        elif kind in _SHOWN:
            self._wait(kind, event, len(line))

    def _wait(self, kind: str, event: Event, size: int) -> None:
        """Keep an event until the attempt that it belongs to is read."""
        if kind in (GUARD, NOTE):
            kept = {key: event.get(key) for key in ("event", "time", "utc", "kind", "level")}
            text = str(event.get("text", ""))[:LONGEST_TEXT]
            facts = event.get("facts") if size <= LARGEST_FACTS else None
            size = min(size, LARGEST_FACTS if "facts" in event else LONGEST_TEXT)
            event = kept | {"text": text, "facts": facts if isinstance(facts, dict) else {}}
        elif kind == BAD_SAMPLE:
            kept = {key: event.get(key) for key in ("event", "name", "reason", "replacement")}
            event = {key: value[:LONGEST_TEXT] if isinstance(value, str) else value for key, value in kept.items()}
        if self._between_bytes + size > LARGEST_BETWEEN:
            self._found.left_out += 1
            return
        self._between.append(event)
        self._between_bytes += size

    def done(self) -> Summary:
        """Return the summary once all lines are added."""
        self._place(0)
        self._flush()
        found = self._found
        found.first_utc, found.last_utc = _read_utc(self._oldest), _read_utc(self._newest)
        found.seconds = parse_journal_number(self._newest.get("time", 0.0))
        return found

    def _start(self, event: Event) -> None:
        resumed = event.get("resumed")
        attempt = resumed.get("attempt") if isinstance(resumed, dict) else None
        at = attempt if type(attempt) is int and 0 <= attempt < _LARGEST_ATTEMPT else 0
        self._place(at)
        if isinstance(resumed, dict):
            self._lowest = min(self._lowest, at + 1)
        found = self._found
        found.start = found.start or event
        found._launches.add(EventAtStep(at, {key: event.get(key) for key in ("time", "utc", "host", "job", "resumed")}))

    def _step(self, event: Event) -> None:
        get, found = event.get, self._found
        attempt = get("attempt")
        # As `_read_attempt`, without a call: a long journal has millions of these lines.
        if type(attempt) is not int or not 0 < attempt < _LARGEST_ATTEMPT:
            found.damaged += 1
            return
        if self._between:
            self._place(attempt)
        if attempt >= self._lowest:
            found.superseded += 1
            return
        if not found.attempts:
            found.last_attempt = attempt
            found.axis = AttemptSpans.of(min(self._first, attempt), attempt)
            found.steps = {name: ThinnedCurve(found.axis) for name in STEP_CURVES}
        self._lowest = attempt
        found.attempts += 1
        if attempt < self._span_begin or len(self._rows) == _SPAN:
            self._flush()
            self._span_begin = found.axis.begin(attempt)
        self._rows.append((attempt, get("loss"), get("lr"), get("loss_scale"), get("grad_norm")))
        if get("applied"):
            found.applied += 1
        else:
            self._skip(attempt, event)

    def _flush(self) -> None:
        """Add the steps that were collected: the extremes of a whole list are found faster than one by one."""
        if self._rows:
            attempts, *columns = zip(*self._rows, strict=True)
            for curve, column in zip(self._found.steps.values(), columns, strict=True):
                curve.add_span(
                    attempts, [value if type(value) is float else parse_journal_number(value) for value in column]
                )
            self._rows.clear()

    def _skip(self, attempt: int, event: Event) -> None:
        reason = str(event.get("reason"))[:LONGEST_NAME]
        ids = event.get("ids")
        known = tuple(one for one in ids[:MOST_IDS] if type(one) is int) if isinstance(ids, list) else ()
        loss, loss_scale, grad_norm = (
            parse_journal_number(event.get(name)) for name in ("loss", "loss_scale", "grad_norm")
        )
        self._found._skips[reason].add(SkippedStep(attempt, reason, loss, loss_scale, grad_norm, known))

    def _place(self, attempt: int) -> None:
        """Add the events that came after an attempt, unless it was done again."""
        # An attempt of 0 is before the first step: it is never done again.
        if attempt < self._lowest:
            for event in self._between:
                self._other(attempt, event)
        self._between.clear()
        self._between_bytes = 0

    def _other(self, attempt: int, event: Event) -> None:
        kind, found = event["event"], self._found
        if kind == SPEED:
            found.speed = found.speed or event
            self._curves(found.speeds, attempt, event, _SPEED_GROUPS)
            self._headroom(attempt, event)
        elif kind == EPOCH:
            found.epoch = found.epoch or event
            self._curves(found.epochs, attempt, event, _EPOCH_GROUPS)
        elif kind == SAVED:
            found.checkpoints += event.get("kind") == CHECKPOINT
        elif kind == END and not found._launches.count:
            found.end = found.end or event
        elif kind == PRECISION_CHECK:
            found.precision_check = found.precision_check or event
        elif kind in (GUARD, NOTE):
            (found._guard if kind == GUARD else found._notes).add(EventAtStep(attempt, event))
        elif kind == BAD_SAMPLE:
            found._bad_samples.add(EventAtStep(attempt, event))

    def _curves(self, curves: dict[str, ThinnedCurve], attempt: int, event: Event, groups: tuple[str, ...]) -> None:
        for name, value in _iterate_event_numbers(event, groups):
            curve = curves.get(name)
            if curve is None and len(curves) < MOST_CURVES:
                curve = curves[name] = ThinnedCurve(self._found.axis)
            if curve is not None:
                curve.add(attempt, value)

    def _headroom(self, attempt: int, event: Event) -> None:
        meters = event.get("meters")
        if not isinstance(meters, dict) or not meters:
            return
        module, bits, least = (
            meters.get("headroom_module"),
            parse_journal_number(meters.get("headroom_bits")),
            self._found.headroom,
        )
        if isinstance(module, str) and bits == bits:
            name = module[:LONGEST_NAME]
            if (name in least and bits < least[name].value) or (name not in least and len(least) < MOST_EVENTS):
                least[name] = AttemptPoint(attempt, bits)


def _read_utc(event: Event) -> str:
    return str(event.get("utc", ""))[:_LONGEST_UTC]


def _iterate_event_numbers(event: Event, groups: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of an event by name, and those of its groups."""
    for key in ("samples_per_second", "wait_share", "seconds"):
        if key in event:
            yield key, parse_journal_number(event[key])
    for group in groups:
        inner = event.get(group)
        for key, value in inner.items() if isinstance(inner, dict) else ():
            if value is not None and not isinstance(value, bool | dict | list):
                yield f"{group}.{key}"[:LONGEST_NAME], parse_journal_number(value)
