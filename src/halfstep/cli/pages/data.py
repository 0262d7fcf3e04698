"""Print the result of a data check on one page for terminals of 80 columns or more."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import indented
from halfstep.printable import in_line
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.data.check.report import ClassShare, DataReport, Fault

_STYLE = {"error": "bold red", "warning": "yellow", "note": "dim"}
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


def show(report: DataReport, following: str) -> None:
    """Print the data set, its faults, and the verdict and the command to type last."""
    console = screen()
    what = {"segmentation": "photographs with masks", "classification": "a folder for each class"}[report.task]
    console.print(Text(f"{in_line(report.folder)}: {what}", style="bold"))
    console.print(_facts(report))
    if report.classes:
        console.print(_classes(report.classes))
    for finding in report.findings:
        if finding.severity != "note":
            _print_finding(console, finding, report.folder)
    notes = [f"{one.evidence} ({len(one.files):,})" for one in report.findings if one.severity == "note"]
    if notes:
        console.print(Text(f"\nnothing to do: {'; '.join(notes)}", style="dim"))
    console.print()
    console.print(_verdict(report))
    if report.ok:
        console.print(Text(f"next: {in_line(following)}"), soft_wrap=True)


def show_sets(sets: Sequence[DataSet]) -> None:
    """Print the data sets that can be downloaded."""
    table = _grid()
    for one in sets:
        table.add_row(Text(one.name, style="bold"), "here" if one.here else "", Text(one.about))
    console = screen()
    console.print(table)
    console.print("\nhalfstep data get NAME gets one; halfstep data check FOLDER looks over your own.")


def _facts(report: DataReport) -> Padding:
    table = _grid()
    splits = ", ".join(f"{count:,} {name}" for name, count in report.samples.items())
    total = sum(report.samples.values())
    lost = f"; {total - report.readable:,} cannot be read" if total > report.readable else ""
    table.add_row(Text("samples", style="dim"), Text(f"{total:,}: {splits}{lost}"))
    if report.images:
        images = report.images
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in images.kinds.items())
        sizes = {"smallest": images.smallest, "median": images.median, "largest": images.largest}
        table.add_row(
            Text("sizes", style="dim"),
            Text(", ".join(f"{name} {wide} × {high}" for name, (wide, high) in sizes.items())),
        )
        table.add_row(Text("kinds", style="dim"), Text(kinds))
    if report.masks:
        table.add_row(Text("masks", style="dim"), Text(f"are read so: {report.masks['read_as']}"))
    return indented(table)


def _classes(classes: Sequence[ClassShare]) -> Padding:
    table = _grid()
    most = max((_amount(one) for one in classes), default=0) or 1
    for one in classes[:MOST_CLASSES]:
        amount = _amount(one)
        text = f"{one.pixels:.1%} of the pixels, in {one.images:,} images" if one.pixels is not None else f"{amount:,}"
        # A class that is present gets at least one block, however rare it is.
        bar = Text("█" * max(1, round(20 * amount / most)) if amount else "", style="cyan")
        table.add_row(Text(f"class {in_line(one.name)}", style="dim"), bar, Text(text))
    if len(classes) > MOST_CLASSES:
        table.add_row(Text(f"and {len(classes) - MOST_CLASSES} more", style="dim"))
    return indented(table)


def _amount(one: ClassShare) -> float:
    return one.images if one.pixels is None else one.pixels


def _print_finding(console: Console, finding: Fault, folder: Path) -> None:
    head = Text(f"\n{finding.severity} {finding.id}", style=_STYLE[finding.severity])
    number = f" ({len(finding.files):,})" if finding.files else ""
    console.print(head.append(f"{number}: {finding.evidence}", style="not bold default"))
    names = [in_line(name) for name in finding.files[:MOST_NAMES]]
    more = len(finding.files) - len(names)
    lines = [*names, *([f"and {more:,} more"] if more > 0 else []), f"do: {_typed(finding, folder)}"]
    console.print(indented(Text("\n".join(lines))))


def _typed(finding: Fault, folder: Path) -> str:
    """Return the fix, with the file's name in it where there is only one."""
    if len(finding.files) != 1:
        return finding.fix
    path = in_line(shlex.quote(os.path.join(folder, finding.files[0])))
    # Quoted, so that the command can be copied whatever the file is called.
    return finding.fix.replace("FILE", path)


def _verdict(report: DataReport) -> Text:
    errors = sum(finding.severity == "error" for finding in report.findings)
    rest = sum(finding.severity == "warning" for finding in report.findings)
    if errors:
        remarks = f" and {rest} remark{'s' * (rest != 1)}" if rest else ""
        text = f"{errors} kind{'s' * (errors != 1)} of mistakes{remarks}; mend the mistakes, then check again"
        return Text(text, style="bold red")
    remarks = f", {rest} remark{'s' * (rest != 1)}" if rest else ""
    return Text(f"fit to train on{remarks}", style="green")


def _grid() -> Table:
    return Table.grid(padding=(0, 2))
