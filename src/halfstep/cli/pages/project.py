"""Print the check of a project's folder at 80 columns, plain without a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, indented, print_finding, ruled_table
from halfstep.cli.pages.settings import print_status
from halfstep.doctor.settings import shown
from halfstep.printable import in_line
from halfstep.terminal import screen

_MOST_ROWS = 60
"""Settings that a page shows; --json has all of them."""
_START = {"accelerate": "accelerate launch", "fabric": "fabric run", "python": "python or torchrun"}
_ASIDE = frozenset({"distributed_type", "gpu_ids", "zero_optimization.stage", "deepspeed_config.zero_stage"})
"""Keys that say nothing of precision; --json has them."""


def show(report: dict[str, Any]) -> None:
    """Print the whole report, the verdict last."""
    console = screen()
    heading(console, "Project", _counted(report))
    settings = [row for row in report["settings"] if row["key"] not in _ASIDE]
    if settings:
        console.print(_settings(settings, console))
    for run in report["runs"]:
        _print_run(console, run)
    for finding in report["findings"]:
        print_finding(console, finding)
    _print_patch(console, report)
    if "written" in report:
        heading(console, "Recipe", report["written"])
    console.print()
    print_status(console, report["status"])


def _counted(report: dict[str, Any]) -> str:
    files = report["files"]
    more = ", and more that were not" if files["more"] else ""
    count = "1 file" if files["read"] == 1 else f"{files['read']:,} files"
    return f"{report['folder']}: {count} looked at{more}, {files['with_settings']} with settings"


def _settings(rows: list[dict[str, Any]], console: Console) -> Table:
    table = ruled_table(console)
    table.add_column("where", overflow="fold", max_width=28)
    table.add_column("setting", overflow="fold", max_width=30)
    table.add_column("means", overflow="fold")
    for row in rows[:_MOST_ROWS]:
        where = f"{row['file']}:{row['line']}" if row["line"] else row["file"]
        table.add_row(Text(where), Text(f"{row['key']} = {shown(row['value'])}"), Text(row["means"]))
    if len(rows) > _MOST_ROWS:
        table.add_row("", "", Text(f"and {len(rows) - _MOST_ROWS} more: see --json"))
    return table


def _print_run(console: Console, run: dict[str, Any]) -> None:
    if not run["provenance"]:
        return
    started = f"started by {_START[run['start']]}"
    aside = f"{run['name']}, {started}" if run["launched"] else f"no launch line, taken to be {started}"
    heading(console, "Who wins", aside)
    table = ruled_table(console)
    table.add_column("tool", no_wrap=True)
    table.add_column("runs in", no_wrap=True)
    table.add_column("because of", overflow="fold")
    table.add_column("over", overflow="fold")
    for row in run["provenance"]:
        losers = [*map(_placed, row["overrode"]), *(f"{_placed(s)}, not read" for s in row["not_read"])]
        because = "\n".join(map(_placed, row["wins"])) or "nothing: its default"
        table.add_row(row["tool"], row["precision"], Text(because), Text("\n".join(losers) or "-"))
    console.print(table)


def _placed(setting: dict[str, Any]) -> str:
    where = f"{setting['file']}:{setting['line']}" if setting["line"] else setting["file"]
    return f"{setting['key']} = {shown(setting['value'])} ({where})"


def _print_patch(console: Console, report: dict[str, Any]) -> None:
    if "patch" not in report:
        return
    applied = "files_modified" in report
    heading(console, "Patch", "" if report["patch"] else "none: no finding has an edit")
    if report["patch"]:
        console.print(Text(report["patch"]), soft_wrap=True)
    if applied:
        files = ", ".join(report["files_modified"]) or "none"
        console.print(indented(Text(in_line(f"Files modified: {files}"))))
    elif report["patch"]:
        console.print(indented(Text("apply it with --fix --yes")))
