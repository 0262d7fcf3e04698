"""The detailed console: reasons, facts, a summary of every epoch, bars on a terminal. train.log has its lines."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from halfstep import numbers
from halfstep.journal import events
from halfstep.journal import text as words
from halfstep.journal.bars import draw_bars
from halfstep.journal.events import Event
from halfstep.journal.jsonl import LOG
from halfstep.journal.latest import CHECKPOINT, LatestEvents
from halfstep.journal.lines import ConsoleLine, ConsoleSize, RunClocks
from halfstep.journal.status_items import list_status_items
from halfstep.printable import escape_to_one_line

ListLines = Callable[[Event, LatestEvents], list[str]]


class GuideLog:
    """The lines without a terminal: one for every few steps, and for every event that a user should know of."""

    def __init__(self) -> None:
        self._lines: dict[str, ListLines] = {
            events.START: lambda event, _: _describe_start(event),
            events.STAGE: lambda event, _: [f"{escape_to_one_line(event['text'])} ..."],
            events.PRECISION_CHECK: lambda event, _: [words.describe_precision_check(event)],
            events.STEP: _describe_step,
            events.SPEED: _describe_speed,
            events.BAD_SAMPLE: lambda event, _: [words.describe_bad_sample(event)],
            events.EPOCH: _describe_epoch,
            events.SAVED: _describe_saved,
            events.GUARD: lambda event, _: words.describe_guard_event(event),
            events.NOTE: lambda event, _: [words.describe_note(event)],
            events.END: words.describe_ending,
        }

    def list_lines(self, event: Event, latest: LatestEvents, size: ConsoleSize) -> list[ConsoleLine]:
        """Return the lines of an event."""
        kind = event["event"]
        # A line per applied step would drown the log; the speed event has one for every few steps.
        if kind not in self._lines or (kind == events.STEP and event["applied"]):
            return []
        return [ConsoleLine(line) for line in self._lines[kind](event, latest)]

    def draw_live_area(self, latest: LatestEvents, clocks: RunClocks, width: int, encoding: str) -> list[Text]:
        """Return bars and numbers."""
        return draw_bars(latest, clocks, width, encoding)


def _describe_start(event: Event) -> list[str]:
    title = f"halfstep train {escape_to_one_line(event['label'])}, {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"
    header = words.describe_run(event)
    width = max(len(word) for word, _ in header)
    again = [f"warning: {text}" if alarm else text for text, alarm in words.describe_resume(event)]
    lines = [
        title,
        *again,
        *words.list_precision_lines(event),
        *(f"  {line}" for line in words.explain_precision(event)),
        *(f"  {word.ljust(width)}  {line}" for word, line in header),
    ]
    return [*lines, *(text for text, _ in words.list_start_remarks(event)), ""]


def _describe_step(event: Event, latest: LatestEvents) -> list[str]:
    nth = latest.skipped[event["reason"]]
    return [words.describe_skipped_step(event, nth)] if words.is_skip_printed(nth) else []


def _describe_speed(event: Event, latest: LatestEvents) -> list[str]:
    step = latest.step
    if not step:
        return []
    where = f"{words.format_epoch_place(latest)} {step['step_in_epoch']}/{words.count_epoch_steps(latest)}"
    left = f"{'about ' if event.get('is_rough') else ''}{numbers.format_clock(event['seconds_left'])} left"
    items = [item.text for item in list_status_items(latest)]
    return [" · ".join([numbers.format_clock(event["time"]), where, left, *items])]


def _describe_epoch(event: Event, latest: LatestEvents) -> list[str]:
    # With a colon, because users search for it: grep "lr:" train.log
    return [line.replace(" · lr ", " · lr: ", 1) for line in words.format_epoch_summary(event, latest.metric)]


def _describe_saved(event: Event, _: LatestEvents) -> list[str]:
    """Return no line for a checkpoint: there may be one per minute, and the line of numbers has the latest."""
    return [] if event["kind"] == CHECKPOINT else [words.describe_saved_file(event)]


BELOW = 5
"""The rows that the bars and numbers take, with a blank one above them."""
LEAST = 24
"""The rows of the smallest terminal in common use; in a smaller one, lines scroll away."""
_LEVELS = {"info": "cyan", "warning": "yellow", "error": "bold red"}


class GuideScreen:
    """The lines on a terminal, above bars and numbers: they contain what the bars do not show."""

    def __init__(self) -> None:
        self._lines: dict[str, Callable[[Event, LatestEvents], list[ConsoleLine]]] = {
            events.PRECISION_CHECK: lambda event, _: [ConsoleLine(words.describe_precision_check(event), "green")],
            events.STEP: _list_skip_lines,
            events.BAD_SAMPLE: lambda event, _: [ConsoleLine(words.describe_bad_sample(event), "yellow")],
            events.EPOCH: _list_summary_lines,
            events.GUARD: lambda event, _: _list_guard_lines(event),
            events.NOTE: lambda event, _: [_build_note_line(event)],
            events.END: _list_ending_lines,
        }

    def list_lines(self, event: Event, latest: LatestEvents, size: ConsoleSize) -> list[ConsoleLine]:
        """Return the lines of an event."""
        kind = event["event"]
        if kind == events.START:
            first = build_first_screen(event, size.width, size.height)
            return [*(ConsoleLine(line.text, line.style, line.indent) for line in first), ConsoleLine("")]
        return self._lines[kind](event, latest) if kind in self._lines else []

    def draw_live_area(self, latest: LatestEvents, clocks: RunClocks, width: int, encoding: str) -> list[Text]:
        """Return bars and numbers."""
        return draw_bars(latest, clocks, width, encoding)


def _list_skip_lines(event: Event, latest: LatestEvents) -> list[ConsoleLine]:
    if event["applied"] or event["reason"] == words.ORDINARY:
        return []
    nth = latest.skipped[event["reason"]]
    return [ConsoleLine(words.describe_skipped_step(event, nth), "yellow")] if words.is_skip_printed(nth) else []


def _list_summary_lines(event: Event, latest: LatestEvents) -> list[ConsoleLine]:
    title, *rows, closing = words.format_epoch_summary(event, latest.metric)
    last = ConsoleLine(closing, "green" if event.get("is_best") else "dim")
    return [ConsoleLine(title, "bold"), *(ConsoleLine(row) for row in rows), last]


def _list_guard_lines(event: Event) -> list[ConsoleLine]:
    first, *others = words.describe_guard_event(event)
    style = _LEVELS.get(event.get("level", ""), "yellow")
    return [ConsoleLine(first, style), *(ConsoleLine(line.strip(), "dim", 2) for line in others)]


def _build_note_line(event: Event) -> ConsoleLine:
    return ConsoleLine(escape_to_one_line(event["text"]), "yellow" if event.get("level") == "warning" else "dim")


def _list_ending_lines(event: Event, latest: LatestEvents) -> list[ConsoleLine]:
    first, *others = words.describe_ending(event, latest)
    style = "bold green" if event["reason"] in words.DONE else "bold yellow"
    lines = [ConsoleLine(""), ConsoleLine(first, style)]
    for line in others:
        if line.strip().startswith(words.TO_TYPE):
            lines.append(ConsoleLine(line, "bold", fit="keep"))
        else:
            lines.append(ConsoleLine(line.strip(), indent=2))
    return lines


class ScreenLine(NamedTuple):
    """One line of the first screen."""

    text: str
    style: str = ""
    indent: int = 0
    spare: bool = False
    """Whether the line is left to the log if there is no room."""


def build_first_screen(start: Event, width: int, height: int) -> list[ScreenLine]:
    """Return the title, the precision and its reasons, the header and remarks; the rest is only in train.log."""
    lines = _list_start_lines(start)
    room = max(height, LEAST) - BELOW - 1 - sum(_count_rows(line, width) for line in lines if not line.spare)
    shown, left_out = [], 0
    for line in lines:
        rows = _count_rows(line, width) if line.spare else 0
        if rows <= room:
            room -= rows
            shown.append(line)
        else:
            # After the first line that does not fit no later spare one is shown, so that the list has no gaps.
            room, left_out = 0, left_out + 1
    if left_out:
        log = os.path.join(start["dir"], LOG)
        shown.append(
            ScreenLine(escape_to_one_line(f"{numbers.format_counted_noun(left_out, 'line')} more in {log}"), "dim")
        )
    return shown


def _list_start_lines(start: Event) -> list[ScreenLine]:
    mixed = words.is_mixed_precision(start["precision"]["chosen"])
    header = words.describe_run(start)
    label = max(len(word) for word, _ in header)
    return [
        ScreenLine(f"halfstep train {escape_to_one_line(start['label'])}", "bold"),
        *(ScreenLine(text, "yellow" if alarm else "cyan") for text, alarm in words.describe_resume(start)),
        *(ScreenLine(text, "bold green" if mixed else "bold") for text in words.list_precision_lines(start)),
        *(ScreenLine(text, "dim", 2, spare=True) for text in words.explain_precision(start)),
        *(ScreenLine(f"{word.ljust(label)}  {text}", "", 2) for word, text in header),
        *(
            ScreenLine(text, "yellow" if alarm else "dim", 0, spare=not alarm)
            for text, alarm in words.list_start_remarks(start)
        ),
    ]


def _count_rows(line: ScreenLine, width: int) -> int:
    return max(1, math.ceil(cell_len(line.text) / max(width - line.indent, 1)))
