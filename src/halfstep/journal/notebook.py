"""The console of a notebook: one cell output with the header, a progress bar, a table that grows, and one curve."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

from halfstep.draw.html import render_html_fragment
from halfstep.draw.series import RunSeries
from halfstep.draw.svg import escape_svg
from halfstep.journal import events
from halfstep.journal.events import Event
from halfstep.journal.latest import LatestEvents
from halfstep.journal.lines import ConsoleSize
from halfstep.journal.status_items import list_status_items
from halfstep.journal.table import BEST, EpochRow, EpochTable, TableConsole
from halfstep.numbers import format_clock, format_count
from halfstep.page import Block, Column, Items, Page, Span, Table, Text, build_charts

Display = Callable[[str, str, str], None]
"""Called with the name of an output, its HTML and its text: shows it, or replaces the one of that name."""
PROGRESS, TABLE = "progress", "table"
"""The outputs: the first is replaced while the run continues, the second after an epoch."""
PAUSE = 1.0
"""Seconds between two updates of the progress."""
SHORTEST_PAUSE, SHARE_OF_TIME = 5.0, 0.01
"""Limits to drawing the curve, which blocks training: seconds between two, and the share of the run's time."""
MOST_ROWS = 100
"""Rows of the table; of a longer run, the last ones and the best one."""
_TEXT = 'style="white-space: pre-wrap; margin: 0; font-family: var(--jp-code-font-family, monospace); font-size: 13px"'


def find_notebook_display() -> Display | None:
    """Return the display of this kernel; None outside of one."""
    # A kernel has loaded it; halfstep does not depend on it.
    if "IPython" not in sys.modules:
        return None
    display = importlib.import_module("IPython.display").display
    handles: dict[str, Any] = {}

    def show(name: str, html: str, text: str) -> None:
        content = {"text/html": html, "text/plain": text}
        if name in handles:
            handles[name].update(content, raw=True)
        else:
            handles[name] = display(content, raw=True, display_id=True)

    return show


class NotebookListener:
    """A listener that draws with the display of a notebook, in the thread of the run."""

    def __init__(self, display: Display) -> None:
        self._display, self._console = display, TableConsole(is_live=True)
        self._latest, self._series = LatestEvents(), RunSeries()
        self._table: EpochTable | None = None
        self._rows: list[EpochRow] = []
        self._header: list[str] = []
        self._between: list[str] = []
        self._ending: list[str] = []
        self._epoch_since = 0.0
        self._not_before = self._drawn_after = 0.0
        self._is_drawn = True
        self._chart = ""

    def on_event(self, event: Event) -> None:
        """Record an event, and update what it changes."""
        self._latest.on_event(event)
        self._series.add(event)
        kind = event["event"]
        lines = [line.text for line in self._console.list_lines(event, self._latest, ConsoleSize())]
        if kind == events.START:
            self._header, self._epoch_since = lines, event["time"]
        elif kind == events.EPOCH:
            self._add_row(event)
        elif kind == events.END:
            self._ending = [line for line in lines if line]
        elif kind == events.SPEED:
            self._header += lines
        else:
            self._between += lines
        if kind in (events.EPOCH, events.END) or (lines and kind != events.START):
            self._show_table(at_once=kind == events.END)
        self._show_progress(at_once=kind in (events.START, events.EPOCH, events.END))

    def restore_event(self, event: Event) -> None:
        """Record an event of an earlier launch: its rows are in the table."""
        self._latest.on_event(event)
        self._series.add(event)
        if event["event"] == events.EPOCH:
            self._add_row(event)
        elif event["event"] == events.START:
            self._epoch_since = event["time"]

    def close(self) -> None:
        """Draw if there is something new."""
        if not self._is_drawn:
            self._show_table(at_once=True)

    def _add_row(self, event: Event) -> None:
        if self._table is None:
            self._table = EpochTable.fitting(event, self._latest)
        row = self._table.build_row(event, self._epoch_since)
        # Here rows can change: only the best one of all is marked.
        earlier = [one._replace(is_best=False) for one in self._rows] if row.is_best else self._rows
        self._rows, self._epoch_since, self._is_drawn = [*earlier, row], event["time"], False

    def _show_progress(self, *, at_once: bool) -> None:
        now = time.monotonic()
        if not at_once and now < self._not_before:
            return
        self._not_before = now + PAUSE
        status = [*self._header, self._describe_progress(), *self._ending]
        text = "\n".join(line for line in status if line)
        before, after = ("\n".join(map(escape_svg, lines)) for lines in (self._header, status[len(self._header) :]))
        bar = f'<progress value="{self._find_share():.4f}" max="1" style="width: 100%; max-width: 46em"></progress>'
        self._display(PROGRESS, f"<div><pre {_TEXT}>{before}</pre>{bar}<pre {_TEXT}>{after}</pre></div>", text)

    def _find_share(self) -> float:
        steps = self._latest.start.get("steps") or 0
        return min(self._latest.attempt / steps, 1.0) if steps else 0.0

    def _describe_progress(self) -> str:
        latest = self._latest
        if self._ending:
            return ""
        if not latest.step or latest.stage:
            return str(latest.stage.get("text", "preparing the first step"))
        count = f"step {format_count(latest.attempt)} of {format_count(latest.start['steps'])}"
        items = [item.text for item in list_status_items(latest) if item.name in ("loss", "metric", "skips", "speed")]
        left = latest.time_left.get("seconds_left")
        return "  ".join([count, *items, *([f"{format_clock(left)} left"] if left is not None else [])])

    def _show_table(self, *, at_once: bool) -> None:
        if self._table is None:
            if self._between:
                text = "\n".join(self._between)
                self._display(TABLE, f"<pre {_TEXT}>{escape_svg(text)}</pre>", text)
            return
        if at_once or time.monotonic() >= self._drawn_after:
            self._draw_chart()
        page = Page("", (_build_table(self._table, self._rows), *_build_items(self._between)))
        rows = [self._table.head, *map(self._table.format_row, self._rows), *self._between]
        self._display(TABLE, render_html_fragment(page) + self._chart, "\n".join(rows))
        self._is_drawn = True

    def _draw_chart(self) -> None:
        from halfstep.draw.curves import build_series_charts

        began = time.monotonic()
        loss, *others = build_series_charts(self._series)
        # One curve: the metric that decides which weights are best, or the loss.
        has_metric = self._series.metric not in ("", "loss") and not others[0].is_empty
        # As HTML: a chart refers to the series, which grow until the next one is drawn.
        blocks = build_charts(others[0] if has_metric else loss)
        self._chart = render_html_fragment(Page("", blocks)) if blocks else ""
        ended = time.monotonic()
        self._drawn_after = ended + max(SHORTEST_PAUSE, (ended - began) / SHARE_OF_TIME)


def _build_table(table: EpochTable, rows: list[EpochRow]) -> Table:
    titles = [column.title for column in table.columns]
    columns = (Column("epoch"), *(Column(title, "right") for title in (*titles, "time", "left")), Column(""))
    last = rows[-MOST_ROWS:]
    kept = [row for row in rows[:-MOST_ROWS] if row.is_best] + last
    return Table(columns, tuple(_build_cells(table, row) for row in kept))


def _build_cells(table: EpochTable, row: EpochRow) -> tuple[Text, ...]:
    cells: list[Text] = [Span(row.place, strong=row.is_best)]
    for column, cell in zip(table.columns, row.cells, strict=True):
        cells.append(Span(cell, strong=row.is_best and column.is_main))
    note: Text = Span(f"{BEST} best", "good") if row.is_best else row.skipped
    return (*cells, row.time, row.left, note)


def _build_items(lines: list[str]) -> tuple[Block, ...]:
    return (Items(tuple(Span(line, "warn") for line in lines)),) if lines else ()
