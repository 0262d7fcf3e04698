"""Print the doctor's device report at 80 columns, plain without a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.doctor.located import LocatedFinding
from halfstep.finding import Finding
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.doctor.device_report import DeviceReport
    from halfstep.precision.probe import Measurements
    from halfstep.precision.select import Choice

_OPERATIONS = ("GEMM", "conv2d", "conv3d")
_STYLE = {"note": "cyan", "warning": "yellow", "error": "red"}


def show(found: DeviceReport) -> None:
    """Print the whole report."""
    from halfstep.precision.hardware import facts

    console = screen()
    heading(console, "Device")
    console.print(pairs({"name": found.device.name, **facts(found.device)}))
    heading(console, "Build", "what torch was built for")
    console.print(pairs({key: words for key, words in found.build.as_dict().items() if key != "torch"}))
    heading(console, "Formats", _how_measured(found.measured))
    console.print(_formats(found, console))
    heading(console, "torch's fp32 switches", "a run sets its own and puts these back")
    console.print(pairs(found.flags))
    heading(console, "Choice")
    _print_choice(console, found.choice)
    for finding in found.findings:
        print_finding(console, finding)


def indented(content: RenderableType, by: int = 2) -> Padding:
    """Return text or a table moved to the right, no wider than it needs."""
    return Padding(content, (0, 0, 0, by), expand=False)


def ruled_table(console: Console, **more: Any) -> Table:
    """Return a table with a line below its titles; without it where the output is no terminal."""
    return Table(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False, **more)


def heading(console: Console, title: str, aside: str = "") -> None:
    """Print a heading with an optional remark."""
    console.print()
    console.print(Text(title, style="bold").append(f"  {aside}" if aside else "", style="not bold dim"))


def _how_measured(found: Measurements) -> str:
    if not any(found.speedups.values()):
        return "nothing to measure"
    source = "kept, see --fresh" if found.cached else f"measured in {found.seconds:.1f} s"
    how = f", {found.how}" if found.how else ""
    return f"times strict fp32, with backward{how}; {source}"


def pairs(rows: dict[str, str]) -> Padding:
    """Return an indented table of keys and values."""
    table = Table.grid(padding=(0, 2))
    for key, value in rows.items():
        table.add_row(Text(key, style="dim"), Text(value))
    return indented(table)


def _formats(found: DeviceReport, console: Console) -> Table:
    table = ruled_table(console)
    table.add_column("format", no_wrap=True)
    table.add_column("native", no_wrap=True)
    for title in (*_OPERATIONS, "combined"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in found.formats:
        cells = [_times(row.speedups.get(name)) for name in _OPERATIONS]
        native = Text("yes", style="green") if row.native else Text("no", style="yellow")
        table.add_row(row.name, native, *cells, _times(row.combined), row.reason)
    return table


def _times(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio else "-"


def _print_choice(console: Console, choice: Choice) -> None:
    asked = f"asked for {choice.asked}" + (f" ({choice.took})" if choice.took else "")
    precision = choice.precision
    verdict = Text(precision.name, style="bold green").append(f"  {asked}: {precision.summary}", style="not bold")
    console.print(indented(verdict))
    ladder = Table.grid(padding=(0, 2))
    for rung in choice.rungs:
        ladder.add_row(rung.name, "taken" if rung.accepted else "passed over", rung.reason)
    console.print(Padding(ladder, (1, 0, 0, 2), expand=False))


def print_finding(console: Console, finding: Finding) -> None:
    """Print a finding with its place, if it has one, its evidence and its fix."""
    words = Text(f"{finding.severity} {finding.id}", style=_STYLE[finding.severity])
    if isinstance(finding, LocatedFinding) and finding.file:
        words.append(f"  {finding.where}", style="not bold")
    console.print()
    # A path is copied: it is not broken.
    console.print(words, soft_wrap=True)
    advice = f"\ndo: {finding.fix}" if finding.fix else ""
    console.print(indented(Text(f"{finding.evidence}{advice}")))
