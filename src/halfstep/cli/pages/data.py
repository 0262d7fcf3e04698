"""The page of a data check, and of the public data sets."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.page import Block, Column, Page, Pairs, Paragraph, Span, Style, Table, Text
from halfstep.printable import in_line

if TYPE_CHECKING:
    from halfstep.data.check.report import ClassShare, DataReport, Fault

MOST_NAMES = 3
"""The most files named per fault; --json has them all."""
MOST_CLASSES = 12


@dataclass(frozen=True)
class DataSet:
    """A public data set that can be downloaded."""

    name: str
    about: str
    here: bool
    """Whether it is in the cache."""


def check_page(report: DataReport, following: str) -> Page:
    """Return the page of a check: the data set, its faults, and the verdict and the command to type last."""
    what = {"segmentation": "photographs with masks", "classification": "a folder for each class"}[report.task]
    blocks: list[Block] = [Paragraph(Span(f"{in_line(report.folder)}: {what}", strong=True)), _facts(report)]
    if report.classes:
        blocks.append(_classes(report.classes))
    for finding in report.findings:
        if finding.severity != "note":
            blocks += _finding(finding, report.folder)
    notes = [f"{one.evidence} ({len(one.files):,})" for one in report.findings if one.severity == "note"]
    if notes:
        blocks.append(Paragraph(Span(f"nothing to do: {'; '.join(notes)}", "dim"), gap=True))
    blocks.append(Paragraph(_verdict(report), gap=True))
    if report.ok:
        blocks.append(Paragraph(f"next: {in_line(following)}", wrap=False))
    return Page(f"data in {report.folder}", tuple(blocks))


def sets_page(sets: Sequence[DataSet]) -> Page:
    """Return the page of the data sets that can be downloaded."""
    rows = tuple((Span(one.name, strong=True), "here" if one.here else "", one.about) for one in sets)
    more = Paragraph("halfstep data get NAME gets one; halfstep data check FOLDER looks over your own.", gap=True)
    return Page("public data sets", (Table((Column(), Column(), Column()), rows, indent=0), more))


def _facts(report: DataReport) -> Pairs:
    splits = ", ".join(f"{count:,} {name}" for name, count in report.samples.items())
    total = sum(report.samples.values())
    lost = f"; {total - report.readable:,} cannot be read" if total > report.readable else ""
    rows = [("samples", f"{total:,}: {splits}{lost}")]
    if report.images:
        images = report.images
        sizes = {"smallest": images.smallest, "median": images.median, "largest": images.largest}
        rows.append(("sizes", ", ".join(f"{name} {wide} × {high}" for name, (wide, high) in sizes.items())))
        rows.append(("kinds", ", ".join(f"{count:,} {kind}" for kind, count in images.kinds.items())))
    if report.masks:
        rows.append(("masks", f"are read so: {report.masks['read_as']}"))
    return Pairs(tuple(rows))


def _classes(classes: Sequence[ClassShare]) -> Table:
    most = max((_amount(one) for one in classes), default=0) or 1
    rows: list[tuple[Text, ...]] = []
    for one in classes[:MOST_CLASSES]:
        amount = _amount(one)
        text = f"{one.pixels:.1%} of the pixels, in {one.images:,} images" if one.pixels is not None else f"{amount:,}"
        # A class that is present gets at least one block, however rare it is.
        bar = Span("█" * max(1, round(20 * amount / most)) if amount else "", "note")
        rows.append((Span(f"class {in_line(one.name)}", "dim"), bar, text))
    if len(classes) > MOST_CLASSES:
        rows.append((Span(f"and {len(classes) - MOST_CLASSES} more", "dim"), "", ""))
    return Table((Column(), Column(), Column()), tuple(rows))


def _amount(one: ClassShare) -> float:
    return one.images if one.pixels is None else one.pixels


def _finding(finding: Fault, folder: Path) -> tuple[Block, ...]:
    tone: Style = "bad" if finding.severity == "error" else "warn"
    head = Span(f"{finding.severity} {finding.id}", tone, strong=tone == "bad")
    number = f" ({len(finding.files):,})" if finding.files else ""
    names = [in_line(name) for name in finding.files[:MOST_NAMES]]
    more = len(finding.files) - len(names)
    lines = [*names, *([f"and {more:,} more"] if more > 0 else []), f"do: {_typed(finding, folder)}"]
    return Paragraph((head, f"{number}: {finding.evidence}"), gap=True), Paragraph("\n".join(lines), indent=True)


def _typed(finding: Fault, folder: Path) -> str:
    """Return the fix, with the file's name in it where there is only one."""
    if len(finding.files) != 1:
        return finding.fix
    path = in_line(shlex.quote(os.path.join(folder, finding.files[0])))
    # Quoted, so that the command can be copied whatever the file is called.
    return finding.fix.replace("FILE", path)


def _verdict(report: DataReport) -> Span:
    errors = sum(finding.severity == "error" for finding in report.findings)
    rest = sum(finding.severity == "warning" for finding in report.findings)
    remarks = f"{rest} remark{'s' * (rest != 1)}"
    if errors:
        kinds = f"{errors} kind{'s' * (errors != 1)} of mistakes{f' and {remarks}' if rest else ''}"
        return Span(f"{kinds}; mend the mistakes, then check again", "bad", strong=True)
    return Span(f"fit to train on{f', {remarks}' if rest else ''}", "good")
