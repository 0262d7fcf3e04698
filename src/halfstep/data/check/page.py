"""The result of a data check, and its page."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.draw.notebook import PageResult
from halfstep.finding import Finding
from halfstep.json_data import JsonResult, convert_to_json_data
from halfstep.numbers import format_counted_noun
from halfstep.page import Block, Column, Page, Pairs, Paragraph, Span, Style, Table, Text
from halfstep.printable import escape_to_one_line

MOST_FILES = 1000
"""Files listed per fault; the rest is counted."""
MOST_NAMES = 3
"""The most files named per fault; --json has them all."""
MOST_CLASSES = 12


@dataclass(frozen=True)
class Fault(Finding):
    """A finding, with the files or classes that show it."""

    files: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with as many files as a reader can use, and their number."""
        return {**super().as_dict(), "files": list(self.files[:MOST_FILES]), "count": len(self.files)}


@dataclass(frozen=True)
class ImageFacts:
    """Sizes and file formats of the images that can be read; a size is width and height."""

    median: tuple[int, int]
    smallest: tuple[int, int]
    largest: tuple[int, int]
    kinds: Mapping[str, int]
    """Number of images by file format."""


@dataclass(frozen=True)
class ClassShare(JsonResult):
    """How often a class occurs."""

    name: str
    images: int
    pixels: float | None = None
    """Share of all pixels; None if images have a class as a whole."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with pixels where there are masks."""
        return {key: value for key, value in super().as_dict().items() if value is not None}


@dataclass(frozen=True)
class DataReport(PageResult, JsonResult):
    """The facts of a data set, and everything that is wrong with it."""

    folder: Path
    task: str
    recipe: str
    """The recipe that trains on it."""
    ok: bool
    """Whether a run can be trained on it."""
    samples: Mapping[str, int]
    """Number of samples by split."""
    readable: int
    images: ImageFacts | None
    masks: Mapping[str, object] | None
    """How masks are read, in words and as settings of a recipe; None without masks."""
    classes: tuple[ClassShare, ...]
    findings: tuple[Fault, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for `json.dumps`."""
        return {**super().as_dict(), "images": convert_to_json_data(self.images or {})}

    def page(self) -> Page:
        """Return the facts of the data set, its faults, and the verdict."""
        what = {"segmentation": "photographs with masks", "classification": "a folder for each class"}[self.task]
        blocks: list[Block] = [
            Paragraph(Span(f"{escape_to_one_line(self.folder)}: {what}", strong=True)),
            _build_fact_pairs(self),
        ]
        if self.classes:
            blocks.append(_build_class_table(self.classes))
        blocks += build_finding_blocks(self.findings, self.folder)
        blocks.append(Paragraph(describe_verdict(self.findings), gap=True))
        return Page(f"data in {self.folder}", tuple(blocks))


def _build_fact_pairs(report: DataReport) -> Pairs:
    splits = ", ".join(f"{count:,} {name}" for name, count in report.samples.items())
    total = sum(report.samples.values())
    lost = f"; {total - report.readable:,} cannot be read" if total > report.readable else ""
    rows = [("samples", f"{total:,}: {splits}{lost}")]
    if report.images:
        images = report.images
        sizes = {"smallest": images.smallest, "median": images.median, "largest": images.largest}
        rows.append(("sizes", ", ".join(f"{name} {wide} × {high}" for name, (wide, high) in sizes.items())))
        rows.append(("formats", ", ".join(f"{count:,} {kind}" for kind, count in images.kinds.items())))
    if report.masks:
        rows.append(("masks", f"interpreted as: {report.masks['read_as']}"))
    return Pairs(tuple(rows))


def _build_class_table(classes: Sequence[ClassShare]) -> Table:
    most = max((_select_amount(one) for one in classes), default=0) or 1
    rows: list[tuple[Text, ...]] = []
    for one in classes[:MOST_CLASSES]:
        amount = _select_amount(one)
        text = f"{one.pixels:.1%} of the pixels, in {one.images:,} images" if one.pixels is not None else f"{amount:,}"
        # A class that is present gets at least one block, however rare it is.
        bar = Span("█" * max(1, round(20 * amount / most)) if amount else "", "note")
        rows.append((Span(f"class {escape_to_one_line(one.name)}", "dim"), bar, text))
    if len(classes) > MOST_CLASSES:
        rows.append((Span(f"and {len(classes) - MOST_CLASSES} more", "dim"), "", ""))
    return Table((Column(), Column(), Column()), tuple(rows))


def _select_amount(one: ClassShare) -> float:
    return one.images if one.pixels is None else one.pixels


def build_finding_blocks(findings: Sequence[Fault], folder: Path) -> list[Block]:
    """Return the blocks of all findings; those that need no action in one line."""
    blocks = [block for one in findings if one.severity != "note" for block in _build_finding_paragraphs(one, folder)]
    notes = [f"{one.evidence} ({len(one.files):,})" for one in findings if one.severity == "note"]
    if notes:
        blocks.append(Paragraph(Span(f"nothing to do: {'; '.join(notes)}", "dim"), gap=True))
    return blocks


def _build_finding_paragraphs(finding: Fault, folder: Path) -> tuple[Block, ...]:
    tone: Style = "bad" if finding.severity == "error" else "warn"
    head = Span(f"{finding.severity} {finding.id}", tone, strong=tone == "bad")
    number = f" ({len(finding.files):,})" if finding.files else ""
    names = [escape_to_one_line(name) for name in finding.files[:MOST_NAMES]]
    more = len(finding.files) - len(names)
    lines = [*names, *([f"and {more:,} more"] if more > 0 else []), f"do: {_format_fix(finding, folder)}"]
    return Paragraph((head, f"{number}: {finding.evidence}"), gap=True), Paragraph("\n".join(lines), indent=True)


def _format_fix(finding: Fault, folder: Path) -> str:
    """Return the fix, with the file's name in it where there is only one."""
    if len(finding.files) != 1:
        return finding.fix
    path = escape_to_one_line(shlex.quote(os.path.join(folder, finding.files[0])))
    # Quoted, so that the command can be copied for any file name.
    return re.sub(r"\bFILE\b", lambda _: path, finding.fix)


def describe_verdict(findings: Sequence[Fault]) -> Span:
    """Return the verdict on a set with these findings."""
    errors = sum(finding.severity == "error" for finding in findings)
    rest = sum(finding.severity == "warning" for finding in findings)
    warnings = format_counted_noun(rest, "warning")
    if errors:
        kinds = f"{format_counted_noun(errors, 'error')}{f' and {warnings}' if rest else ''}"
        return Span(f"{kinds}; fix {'it' if errors == 1 else 'the errors'}, then check again", "bad", strong=True)
    return Span(f"fit to train on{f', {warnings}' if rest else ''}", "good")
