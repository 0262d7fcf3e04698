"""Print the check of settings at 80 columns, plain without a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, indented, pairs, print_finding, ruled_table
from halfstep.doctor.settings import shown
from halfstep.printable import in_line
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.doctor.checkup import PrecisionStatus, SettingsReport
    from halfstep.doctor.located import Edit
    from halfstep.doctor.settings import FoundSetting

_KEY_WIDTH = 32
"""The width of the longest variable, which should not be wrapped."""


def show(report: SettingsReport, changed: Sequence[Edit] | None) -> None:
    """Print the whole report with the lines that --fix changed, if it was given; the verdict last."""
    console = screen()
    heading(console, "Sources")
    console.print(pairs({source.kind: source.place for source in report.sources}))
    heading(console, "Settings", "" if report.settings else "none of them speaks of precision")
    if report.settings:
        console.print(_settings(report.settings, console))
    for finding in report.findings:
        print_finding(console, finding)
    if changed is not None:
        _print_changes(console, changed)
    console.print()
    print_status(console, report.status)


def _settings(rows: Sequence[FoundSetting], console: Console) -> Table:
    table = ruled_table(console)
    widest = max(len(row.key) for row in rows)
    table.add_column("source", no_wrap=True)
    table.add_column("key", overflow="fold", no_wrap=widest <= _KEY_WIDTH)
    table.add_column("value", overflow="fold")
    table.add_column("means", overflow="fold")
    for row in rows:
        source = f"{row.kind}:{row.line}" if row.line else row.kind
        table.add_row(source, Text(row.key), Text(shown(row.value)), Text(row.means))
    return table


def _print_changes(console: Console, changes: Sequence[Edit]) -> None:
    heading(console, "Changes applied", "" if changes else "none: nothing contradicts")
    for change in changes:
        lines = f"{shown(change.file)}, line {change.line}\n- {change.before}\n+ {change.after}"
        console.print(indented(Text(in_line(lines))))
    files = dict.fromkeys(change.file for change in changes)
    if files:
        console.print(indented(Text(in_line(f"Files modified: {', '.join(files)}"))))


def print_status(console: Console, status: PrecisionStatus) -> None:
    """Print the status check of the radio-map guide: one verdict, and what it rests on."""
    console.print(Text("=== Configuration Status Check ===", style="bold"))
    console.print(Text(_verdict(status, console), style="green" if status.aligned else "red"))
    lines = {
        "AMP": status.amp,
        "FP16": status.fp16,
        "Learning Rate": status.learning_rate,
        "Gradient Clipping": status.clipping,
        "NaN Handling": status.nan_handling,
        "Final Status": status.final,
    }
    for name, words in lines.items():
        console.print(indented(Text(f"{name}: {words}"), 3))


def _verdict(status: PrecisionStatus, console: Console) -> str:
    # A terminal without Unicode cannot print the symbols.
    plain = console.options.ascii_only
    if not status.aligned:
        return f"{'NO:' if plain else '❌'} Configuration is not aligned: precision mismatch"
    known = {None: "nothing speaks of precision", "auto": "the device decides"}
    what = known.get(status.precision, f"everything asks for {status.precision}")
    return f"{'OK:' if plain else '✅'} Configuration is properly aligned: {what}"
