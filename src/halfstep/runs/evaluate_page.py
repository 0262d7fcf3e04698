"""The result of an evaluation, and its page: metrics, classes, confusions, and the worst samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.draw.notebook import PageResult
from halfstep.finding import Finding
from halfstep.json_data import JsonResult
from halfstep.page import Block, Column, Items, Page, Pairs, Paragraph, Span, Table
from halfstep.printable import escape_to_one_line, truncate_text
from halfstep.runs.left_out import LeftOutFile, build_left_out_line
from halfstep.tasks.shared.confusion import ClassScores, Confusion

Columns = dict[str, object]
"""A row of a table whose columns a task names."""

MOST_CLASSES = 12
"""Rows of the table; the CSV has all classes."""
MOST_COLUMNS = 6
"""The most classes whose matrix fits into 80 columns."""
MOST_MISTAKES = 5
NAME = 18
"""The most characters of a class name."""


@dataclass(frozen=True)
class Mistake:
    """Two classes that were confused."""

    truth: str
    answer: str
    count: int
    share: float
    """Share of the true class."""


@dataclass(frozen=True)
class ClassFigures:
    """Figures of classes and samples; a number that is undefined is None."""

    counted: str
    """The unit of the confusion matrix: pixels, images or answers."""
    classes: list[ClassScores]
    confusion: Confusion
    mistakes: list[Mistake]
    """The most frequent confusions."""
    worst: list[Columns]
    each: list[Columns]
    """For each sample its file and its figures."""


@dataclass(frozen=True)
class Evaluation(PageResult, JsonResult):
    """The figures of a run's weights."""

    run: Path
    weights: Path
    precision: str
    device: str
    data: str
    """validation, or a folder."""
    samples: int
    left_out: list[LeftOutFile]
    metric: str
    """The metric that decides."""
    metrics: dict[str, float | None]
    figures: ClassFigures | None
    """None for a task without classes."""
    findings: tuple[Finding, ...]
    written: tuple[Path, ...] = ()
    """The tables and the picture that were requested."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, the figures among the others."""
        found = super().as_dict()
        figures, findings, written = (found.pop(key) for key in ("figures", "findings", "written"))
        return {**found, **(figures or {}), "findings": findings, "written": written}

    def page(self) -> Page:
        """Return the metrics, the classes and how they are confused, the worst samples, and the unreadable ones."""
        where = f" in {self.precision} on {escape_to_one_line(self.device)}"
        blocks: list[Block] = [Paragraph((Span(escape_to_one_line(self.weights), strong=True), where), wrap=False)]
        blocks += _build_metric_blocks(self)
        if self.figures is not None:
            blocks += [
                *_build_class_blocks(self.figures),
                *_build_confusion_blocks(self.figures),
                *_build_worst_blocks(self.figures.worst),
            ]
        blocks += map(build_left_out_line, self.left_out)
        blocks += [
            Paragraph(("written: ", Span(escape_to_one_line(file), strong=True)), wrap=False) for file in self.written
        ]
        return Page(f"evaluation of {self.run}", tuple(blocks))


def format_figure(value: object, form: str = ".4f") -> str:
    """Return a figure with its digits; a dash if it is undefined."""
    return "-" if value is None else escape_to_one_line(value) if isinstance(value, str) else format(value, form)


def _shorten_name(name: str) -> str:
    return truncate_text(escape_to_one_line(name), NAME)


def _build_metric_blocks(report: Evaluation) -> tuple[Block, ...]:
    # Metrics of single classes are in their own table.
    classes = report.figures.classes if report.figures else []
    own = {f"{kind}_{row.name}" for row in classes for kind in ("iou", "dice")}
    deciding = Span("  the metric that selects the best checkpoint", "dim")
    rows = tuple(
        (escape_to_one_line(name), (format_figure(value), deciding) if name == report.metric else format_figure(value))
        for name, value in report.metrics.items()
        if name not in own
    )
    data = "validation samples" if report.data == "validation" else f"samples in {escape_to_one_line(report.data)}"
    return Pairs(rows), Paragraph(Span(f"over {report.samples} {data}", "dim"), indent=True, wrap=False)


def _build_class_blocks(report: ClassFigures) -> Iterator[Block]:
    pixels = report.counted == "pixels"
    total = sum(row.truth for row in report.classes) or 1
    figures = {"IoU": "iou", "Dice": "dice"} if pixels else {"F1": "dice"}
    figures |= {"precision": "precision", "recall": "recall"}
    columns = (Column("class"), *(Column(name, "right") for name in (*figures, report.counted)))
    many = len(report.classes) > MOST_CLASSES
    # A class without truth or predictions has no Dice score.
    rows = sorted(report.classes, key=lambda row: row.dice or 0.0) if many else report.classes
    cells = []
    for row in rows[:MOST_CLASSES]:
        count = f"{row.truth / total:.1%}" if pixels else f"{row.truth:,}"
        cells.append(
            (_shorten_name(row.name), *(format_figure(getattr(row, key), ".3f") for key in figures.values()), count)
        )
    yield Table(columns, tuple(cells), gap=True)
    if many:
        words = f"the lowest {MOST_CLASSES} of {len(rows)} classes; --csv FILE writes them all"
        yield Paragraph(Span(words, "dim"), wrap=False)


def _build_confusion_blocks(report: ClassFigures) -> tuple[Block, ...]:
    names = report.confusion.names
    if len(names) > MOST_COLUMNS:
        return _build_mistake_blocks(report)
    columns = (Column("true \\ predicted"), *(Column(_shorten_name(name)[:10], "right", "never") for name in names))
    rows = []
    for name, row in zip(names, report.confusion.counts.tolist(), strict=True):
        total = sum(row)
        rows.append((_shorten_name(name), *(f"{count / total:.1%}" if total else "-" for count in row)))
    return (Table(columns, tuple(rows), gap=True),)


def _build_mistake_blocks(report: ClassFigures) -> tuple[Block, ...]:
    if not report.mistakes:
        return (Paragraph("nothing was confused", gap=True),)
    rows = tuple(
        f"{_shorten_name(one.truth)} for {_shorten_name(one.answer)}: {one.count:,} {report.counted}, "
        f"{one.share:.1%} of its own"
        for one in report.mistakes[:MOST_MISTAKES]
    )
    return Paragraph("most frequent confusions:", gap=True), Items(rows)


def _build_worst_blocks(rows: Sequence[Columns]) -> tuple[Block, ...]:
    lines = []
    for row in rows:
        words = [f"{key} {format_figure(value, '.3f')}" for key, value in row.items() if key != "file"]
        # As it would be typed in the current folder; names of samples that are no files stay.
        file = str(row["file"]).removeprefix(f"{os.getcwd()}{os.sep}")
        lines.append(f"{escape_to_one_line(file)}  {', '.join(words)}")
    return Paragraph("worst samples:", gap=True), Items(tuple(lines), wrap=False)
