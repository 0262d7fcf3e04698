"""Print the check of a project's folder at 80 columns, plain without a terminal: the verdict first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, indented, print_finding, ruled_table
from halfstep.doctor.settings import shown
from halfstep.numbers import several
from halfstep.printable import in_line
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.doctor.located import LocatedFinding
    from halfstep.doctor.patch import ProjectPatch
    from halfstep.doctor.project_check import ProjectReport, ProjectStatus, RunReport
    from halfstep.doctor.settings import FoundSetting

_MOST_ROWS = 60
"""Settings that a page shows; --json has all of them."""
_MOST_PLACES = 10
"""Places of one finding that a page shows; --json has all of them."""
_START = {"accelerate": "accelerate launch", "fabric": "fabric run", "python": "python or torchrun"}
_ASIDE = frozenset({"distributed_type", "gpu_ids", "zero_optimization.stage", "deepspeed_config.zero_stage"})
"""Keys that say nothing of precision; --json has them."""
_IN_EVERY_FILE = ("code.", "checkpoint.", "accelerate.", "lightning.", "deepspeed.")
"""Findings whose advice is the same wherever they stand."""


def show(
    report: ProjectReport, patch: ProjectPatch | None = None, written: Path | None = None, settings: bool = False
) -> None:
    """Print the verdict, the findings, and what was asked for: a patch, a recipe, the settings."""
    console = screen()
    _print_verdict(console, report)
    for finding in report.findings:
        if not finding.in_tests:
            _print_once(console, finding, report.findings)
    _print_tests(console, report.findings)
    for run in report.runs:
        _print_run(console, run)
    if settings:
        rows = [row for row in report.settings if row.key not in _ASIDE]
        heading(console, "Settings", "" if rows else "none of them speaks of precision")
        console.print(_settings(rows, console))
    if patch is not None:
        _print_patch(console, patch)
    if written is not None:
        heading(console, "Recipe", str(written))


def _print_verdict(console: Console, report: ProjectReport) -> None:
    status = report.status
    why = f" ({status.reason})" if status.reason else ""
    console.print(Text(status.final + why, style="bold green" if status.aligned else "bold red"))
    console.print(indented(Text(_counted(report), style="dim")))
    console.print(indented(Text(f"precision: {_precision(status)}")))
    numbers = {"learning rate": status.learning_rate, "clipping": status.clipping}
    for name, words in numbers.items():
        if words != "not set":
            console.print(indented(Text(f"{name}: {words}")))


def _precision(status: ProjectStatus) -> str:
    if not status.aligned:
        return status.amp
    silent = "what decides is known only in the run" if status.unresolved else "nothing speaks of it"
    known = {None: silent, "auto": "the device decides", "several": status.amp}
    return known.get(status.precision, f"everything asks for {status.precision}")


def _counted(report: ProjectReport) -> str:
    files = report.files
    more = ", and more that were not" if files.more else ""
    count = several(files.read, "file")
    return f"{report.folder}: {count} looked at{more}, {files.with_settings} with settings"


# -- findings ---------------------------------------------------------------------------------------------------------


def _same(one: LocatedFinding, other: LocatedFinding) -> bool:
    same_words = one.id.startswith(_IN_EVERY_FILE) or one.evidence == other.evidence
    return one.id == other.id and one.severity == other.severity and same_words


def _print_once(console: Console, finding: LocatedFinding, findings: Sequence[LocatedFinding]) -> None:
    """Print a finding with all of its places, where it is the first of its kind."""
    all_of_it = [other for other in findings if _same(finding, other) and not other.in_tests]
    if all_of_it[0] is not finding:
        return
    print_finding(console, finding)
    places = [other.where for other in all_of_it]
    if len(places) > 1:
        more = [f"and {len(places) - _MOST_PLACES} more: see --json"] if len(places) > _MOST_PLACES else []
        for place in [f"in {len(places)} places:", *places[:_MOST_PLACES], *more]:
            # A path is copied: it is not broken.
            console.print(Text(f"  {place}"), soft_wrap=True)


def _print_tests(console: Console, findings: Sequence[LocatedFinding]) -> None:
    tests = [finding for finding in findings if finding.in_tests]
    if not tests:
        return
    heading(console, "In tests", "these decide nothing")
    for name in dict.fromkeys(finding.id for finding in tests):
        places = [finding.where for finding in tests if finding.id == name]
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        console.print(Text(f"  {name}  {places[0]}{more}"), soft_wrap=True)


# -- tables -----------------------------------------------------------------------------------------------------------


def _settings(rows: Sequence[FoundSetting], console: Console) -> Table:
    table = ruled_table(console)
    table.add_column("where", overflow="fold", max_width=28)
    table.add_column("setting", overflow="fold", max_width=30)
    table.add_column("means", overflow="fold")
    for row in rows[:_MOST_ROWS]:
        where = f"{row.place}:{row.line}" if row.line else row.place
        table.add_row(Text(where), Text(f"{row.key} = {shown(row.value)}"), Text(row.means))
    if len(rows) > _MOST_ROWS:
        table.add_row("", "", Text(f"and {len(rows) - _MOST_ROWS} more: see --json"))
    return table


def _print_run(console: Console, run: RunReport) -> None:
    if not any(row.overrode or row.unread for row in run.provenance):
        return
    started = f"started by {_START[run.start]}"
    aside = f"{run.name}, {started}" if run.launched else f"no launch line, taken to be {started}"
    heading(console, "Who wins", aside)
    table = ruled_table(console)
    table.add_column("tool", no_wrap=True)
    table.add_column("runs in", no_wrap=True)
    table.add_column("because of", overflow="fold")
    table.add_column("over", overflow="fold")
    for row in run.provenance:
        losers = [*map(_placed, row.overrode), *(f"{_placed(s)}, not read" for s in row.unread)]
        because = "\n".join(map(_placed, row.winners)) or "nothing: its default"
        table.add_row(row.tool, row.precision, Text(because), Text("\n".join(losers) or "-"))
    console.print(table)


def _placed(setting: FoundSetting) -> str:
    where = f"{setting.place}:{setting.line}" if setting.line else setting.place
    return f"{setting.key} = {shown(setting.value)} ({where})"


def _print_patch(console: Console, patch: ProjectPatch) -> None:
    heading(console, "Patch", "" if patch.patch else "none: no finding has an edit")
    if patch.patch:
        console.print(Text(patch.patch), soft_wrap=True)
    if patch.refused:
        words = "settings are left alone, because no edit ends in settings that agree; --fix NAME decides:"
        console.print(indented(Text(in_line(f"{words}\n{patch.refused}"))))
    if patch.files_modified is not None:
        files = ", ".join(patch.files_modified) or "none"
        console.print(indented(Text(in_line(f"Files modified: {files}"))))
    elif patch.patch:
        console.print(indented(Text("apply it with --fix --yes")))
