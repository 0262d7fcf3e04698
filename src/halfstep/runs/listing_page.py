"""A list of runs, and its page. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from halfstep import numbers
from halfstep.draw.notebook import PageResult
from halfstep.page import Block, Column, Page, Paragraph, Table
from halfstep.printable import escape_to_one_line

_COLUMNS = (
    Column("run", wrap="cut", widest=40),
    Column("state", wrap="never"),
    Column("precision", wrap="never", left_out=2),
    Column("metric", wrap="never", left_out=6),
    Column("steps", "right", "never", left_out=5),
    Column("skips", "right", "never", left_out=3),
    Column("took", "right", "never", left_out=1),
    Column("age", "right", "never", left_out=4),
)


class RunRow(NamedTuple):
    """One run of a list; None for unknown values."""

    name: str
    state: str
    why: str
    precision: str | None
    metric: str | None
    value: float | None
    """The best of the metric so far."""
    steps: int | None
    """Attempted steps."""
    planned: int | None
    skips: int | None
    seconds: float | None
    """What the run has taken, without the time between its launches."""
    age: float
    """Seconds since the run wrote last."""


@dataclass(frozen=True)
class Listing(PageResult):
    """The newest runs of a folder, and how many others there are."""

    json_keys: ClassVar = ("folder", "runs", "more", "other_folders")

    folder: Path
    runs: list[RunRow]
    more: int
    """Runs that are older than those of the list."""
    other_folders: int
    """Folders that hold no run."""

    def page(self) -> Page:
        """Return a table of the runs, and how many others there are."""
        return Page(f"runs in {self.folder}", tuple(_build_listing_blocks(self)))


def _build_listing_blocks(found: Listing) -> Iterator[Block]:
    if found.runs:
        yield Table(_COLUMNS, tuple(map(_format_cells, found.runs)))
    else:
        yield Paragraph(f"no runs in {escape_to_one_line(found.folder)}", wrap=False)
    if found.more:
        yield Paragraph(f"{found.more:,} more: --most {found.more + len(found.runs)}")
    if found.other_folders:
        yield Paragraph(f"{numbers.format_counted_noun(found.other_folders, 'other folder')} without a run")


def _format_cells(row: RunRow) -> tuple[str, ...]:
    metric = "" if row.metric is None else escape_to_one_line(row.metric)[:12]
    value = "" if row.value is None else f" {numbers.format_metric_value(row.value)}"
    return (
        escape_to_one_line(row.name),
        row.state,
        escape_to_one_line(row.precision or "")[:12],
        f"{metric}{value}",
        "" if row.steps is None else f"{row.steps:,}" + (f"/{row.planned:,}" if row.planned else ""),
        "" if row.skips is None else f"{row.skips:,}",
        "" if row.seconds is None else numbers.format_clock(row.seconds),
        _format_age(row.age),
    )


def _format_age(seconds: float) -> str:
    """Return an age in its largest unit."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now" if seconds < 10 else f"{seconds:.0f} s"
