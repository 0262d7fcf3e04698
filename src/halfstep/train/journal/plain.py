"""Plain lines: where there is no terminal, in a notebook, and in train.log."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import IO

from halfstep.train.journal import journal, numbers, words
from halfstep.train.journal.endings import ending
from halfstep.train.journal.journal import Event
from halfstep.train.journal.latest import CHECKPOINT, Latest
from halfstep.train.journal.moment import line_of
from halfstep.train.journal.opening import to_write
from halfstep.train.journal.resuming import goes_on, resumed


class Plain:
    """Writes a line for every few steps, and for everything that a person would want to know of."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._latest = Latest()
        self._lines: dict[str, Callable[[Event], list[str]]] = {
            journal.START: self._start,
            journal.OBSERVED: lambda event: [words.observed(event)],
            journal.STEP: self._step,
            journal.SPEED: self._speed,
            journal.REPLACED: lambda event: [words.replaced(event)],
            journal.EPOCH: self._epoch,
            journal.SAVED: self._saved,
            journal.GUARD: words.guard,
            journal.NOTE: self._note,
            journal.END: lambda event: ending(event, self._latest),
        }

    def hear(self, event: Event) -> None:
        self._latest.hear(event)
        kind = event["event"]
        if kind == journal.STEP and event["applied"]:
            return
        lines = self._lines[kind](event) if kind in self._lines else []
        if lines:
            text = "".join(f"{line}\n" for line in lines)
            self._stream.write(words.fitted(text, getattr(self._stream, "encoding", None)))
            self._stream.flush()

    def recall(self, event: Event) -> None:
        self._latest.hear(event)

    def close(self) -> None:
        """The stream belongs to someone else."""

    def _start(self, event: Event) -> list[str]:
        title = f"halfstep train {words.clean(event['label'])}, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
        header = words.header(event)
        width = max(len(word) for word, _ in header)
        again = [f"warning: {text}" if alarm else text for text, alarm in resumed(event)]
        lines = [title, *again, words.precision(event), *(f"  {line}" for line in words.why(event))]
        lines += [f"  {word.ljust(width)}  {line}" for word, line in header]
        if not goes_on(event):
            lines += ["  recipe", *(f"    {line}" for line in words.recipe(event))]
        return [*lines, *(text for text, _ in words.remarks(event)), ""]

    def _step(self, event: Event) -> list[str]:
        nth = self._latest.skipped[event["reason"]]
        return [words.skip(event, nth)] if words.is_told(nth) else []

    def _speed(self, event: Event) -> list[str]:
        step = self._latest.step
        if not step:
            return []
        where = f"{words.place(self._latest)} {step['in_epoch']}/{self._latest.start.get('steps_per_epoch', '?')}"
        left = f"{numbers.clock(event['seconds_left'])} left"
        items = [item.text for item in line_of(self._latest)]
        return [" · ".join([numbers.clock(event["time"]), where, left, *items])]

    def _epoch(self, event: Event) -> list[str]:
        # With the colon that people look for: grep "lr:" train.log
        return [line.replace(" · lr ", " · lr: ", 1) for line in words.summary(event, self._latest.metric)]

    def _saved(self, event: Event) -> list[str]:
        """Nothing of a checkpoint: there may be one a minute, and the line of numbers has the last."""
        return [] if event["what"] == CHECKPOINT else [words.saved(event)]

    def _note(self, event: Event) -> list[str]:
        level = "warning: " if event.get("level") == "warning" else ""
        return [level + words.clean(event["text"])]


class LogFile(Plain):
    """train.log: the plain lines of a run, kept in its folder."""

    def __init__(self, path: Path) -> None:
        with to_write(path):
            self._file = path.open("a", encoding="utf-8", errors="replace")
        super().__init__(self._file)

    def close(self) -> None:
        self._file.close()
