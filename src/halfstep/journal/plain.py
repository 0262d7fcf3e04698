"""Write plain lines, for train.log, notebooks and output without a terminal."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import IO

from halfstep import numbers
from halfstep.journal import events
from halfstep.journal import text as words
from halfstep.journal.console import list_line_items
from halfstep.journal.events import Event, guard_file_writing
from halfstep.journal.latest import CHECKPOINT, LatestEvents
from halfstep.ownership import find_ownership
from halfstep.printable import escape_to_one_line


class PlainListener:
    """A listener that writes a line for every few steps, and for every event that a user should know of."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._latest = LatestEvents()
        self._lines: dict[str, Callable[[Event], list[str]]] = {
            events.START: self._start,
            events.STAGE: lambda event: [f"{escape_to_one_line(event['text'])} ..."],
            events.PRECISION_CHECK: lambda event: [words.describe_precision_check(event)],
            events.STEP: self._step,
            events.SPEED: self._speed,
            events.BAD_SAMPLE: lambda event: [words.describe_bad_sample(event)],
            events.EPOCH: self._epoch,
            events.SAVED: self._saved,
            events.GUARD: words.describe_guard_event,
            events.NOTE: self._note,
            events.END: lambda event: words.describe_ending(event, self._latest),
        }

    def on_event(self, event: Event) -> None:
        """Record an event, and write its lines."""
        self._latest.on_event(event)
        kind = event["event"]
        # A line per applied step would drown the log; the speed event has one for every few steps.
        if kind == events.STEP and event["applied"]:
            return
        lines = self._lines[kind](event) if kind in self._lines else []
        if lines:
            text = "".join(f"{line}\n" for line in lines)
            self._stream.write(words.fit_encoding(text, getattr(self._stream, "encoding", None)))
            self._stream.flush()

    def restore_event(self, event: Event) -> None:
        """Record an event of an earlier launch without writing it."""
        self._latest.on_event(event)

    def close(self) -> None:
        """Do nothing: the stream belongs to the caller."""

    def _start(self, event: Event) -> list[str]:
        title = (
            f"halfstep train {escape_to_one_line(event['label'])}, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
        )
        header = words.describe_run(event)
        width = max(len(word) for word, _ in header)
        again = [f"warning: {text}" if alarm else text for text, alarm in words.describe_resume(event)]
        lines = [
            title,
            *again,
            words.describe_precision(event),
            *(f"  {line}" for line in words.explain_precision(event)),
        ]
        lines += [f"  {word.ljust(width)}  {line}" for word, line in header]
        if not words.is_resumed(event):
            lines += ["  recipe", *(f"    {line}" for line in words.describe_recipe(event))]
        return [*lines, *(text for text, _ in words.list_start_remarks(event)), ""]

    def _step(self, event: Event) -> list[str]:
        nth = self._latest.skipped[event["reason"]]
        return [words.describe_skipped_step(event, nth)] if words.is_skip_printed(nth) else []

    def _speed(self, event: Event) -> list[str]:
        step = self._latest.step
        if not step:
            return []
        where = (
            f"{words.format_epoch_place(self._latest)} {step['step_in_epoch']}/{words.count_epoch_steps(self._latest)}"
        )
        left = f"{'about ' if event.get('is_rough') else ''}{numbers.format_clock(event['seconds_left'])} left"
        items = [item.text for item in list_line_items(self._latest)]
        return [" · ".join([numbers.format_clock(event["time"]), where, left, *items])]

    def _epoch(self, event: Event) -> list[str]:
        # With a colon, because users search for it: grep "lr:" train.log
        return [line.replace(" · lr ", " · lr: ", 1) for line in words.format_epoch_summary(event, self._latest.metric)]

    def _saved(self, event: Event) -> list[str]:
        """Return no line for a checkpoint: there may be one per minute, and the line of numbers has the latest."""
        return [] if event["kind"] == CHECKPOINT else [words.describe_saved_file(event)]

    def _note(self, event: Event) -> list[str]:
        level = "warning: " if event.get("level") == "warning" else ""
        return [level + escape_to_one_line(event["text"])]


class LogFileListener(PlainListener):
    """The listener that writes train.log in a run's folder."""

    def __init__(self, path: Path) -> None:
        with guard_file_writing(path):
            self._file = path.open("a", encoding="utf-8", errors="replace")
        self._owner = find_ownership(path)
        super().__init__(self._file)

    def on_event(self, event: Event) -> None:
        """Record an event, and write its lines, unless the file may be another run's by now."""
        if self._owner is None or self._owner.lost is None:
            super().on_event(event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
