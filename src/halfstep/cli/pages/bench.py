"""Print a benchmark: a sentence per precision, the table, and the conditions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, indented, ruled_table
from halfstep.printable import printable
from halfstep.terminal import screen

if TYPE_CHECKING:
    from halfstep.measure.bench.comparison import BenchRow
    from halfstep.measure.bench.report import Bench, Cell

_WHOLE = ("Config", "Batch", "Precision")
"""Columns whose words are not wrapped."""
_STYLE = {"same": "green", "worse": "red", "can't tell": "yellow"}


def show(bench: Bench, files: Sequence[Path]) -> None:
    """Print the whole report."""
    from halfstep.measure.bench import report

    console = screen()
    _print_verdicts(console, bench)
    main = report.main_columns(bench.metric, configs=bench.has_configs)
    name = next(iter(main))
    rest = {
        title: cell
        for title, cell in report.columns(bench.metric, bench.price_per_hour, configs=bench.has_configs).items()
        if title not in main or title == name
    }
    device, count = bench.conditions.get("device", ""), len(bench.seeds)
    heading(console, "Figures", printable(f"{bench.name} on {device}, {count} {report.many(count, 'seed')}"))
    console.print(_table(main, bench.rows, console))
    heading(console, "More")
    console.print(_table(rest, bench.rows, console))
    heading(console, "Conditions")
    _print_aside(console, report.footnote(bench.conditions, bench.seeds, bench.metric, raced=bench.raced))
    console.print()
    _print_aside(console, f"wrote {', '.join(map(str, files))}")
    console.print(Text(printable(next_command(bench)), style="bold"), soft_wrap=True)


def _print_verdicts(console: Console, bench: Bench) -> None:
    from halfstep.measure.bench.report import best_said, sentence

    if bench.interrupted:
        console.print(Text("Interrupted: these are the runs that were finished.", style="yellow"))
    for row in bench.rows[1:]:
        style = "red" if row.failed else _STYLE.get(row.parity.verdict if row.parity else "", "")
        name, _, words = printable(sentence(row, bench.metric, len(bench.seeds))).partition(": ")
        console.print(Text(name, style=f"bold {style}").append(f": {words}", style="not bold"))
    if bench.best and bench.has_configs:
        console.print(Text(printable(best_said(bench.best, bench.metric)), style="bold green"))
    if bench.baseline.failed:
        console.print(Text(printable(bench.verdicts[0]), style="red"))
    for aside in bench.asides:
        _print_aside(console, aside)


def _table(columns: Mapping[str, Cell], rows: Sequence[BenchRow], console: Console) -> Table:
    table = ruled_table(console)
    for title in columns:
        table.add_column(title, overflow="fold", no_wrap=title in _WHOLE)
    for row in rows:
        table.add_row(*(Text(printable(cell(row, rows[0]))) for cell in columns.values()))
    return table


def _print_aside(console: Console, text: str) -> None:
    console.print(indented(Text(printable(text), style="dim")))


def next_command(bench: Bench) -> str:
    """Return the command to type next: the fastest precision of equal accuracy, or more seeds where it is open."""
    # module:callable is a case; a recipe's name has no colon.
    is_case = ":" in bench.name
    if bench.interrupted:
        return "do: the same command again" + (", which begins anew" if is_case else " goes on where it was")
    base = bench.baseline
    if base.failed:
        return f"do: mend what {base.name} failed of, then the same command again"
    if base.finite < len(base.runs):
        return f"do: make {base.name} train to a finite {bench.metric.name} first, then the same command again"
    if bench.best is None and any(map(_is_open, bench.rows[1:])):
        words = shlex.join([bench.name, *bench.settings, *_arms_typed(bench)])
        return f"do: halfstep bench {words} --seeds {max(5, len(bench.seeds) + 2)}"
    best = bench.best or base
    if is_case:
        return f'do: halfstep.Stepper(model, optimizer, precision="{best.config.precision}")'
    changed = best.config.settings or (f"precision={best.config.precision}",)
    return f"do: halfstep train {shlex.join([bench.name, *bench.settings, *changed])}"


def _is_open(row: BenchRow) -> bool:
    """Return whether more seeds might decide it."""
    verdicts = (row.parity and row.parity.verdict, row.gain and row.gain.verdict)
    return all(verdicts) and "can't tell" in verdicts and not row.failed


def _arms_typed(bench: Bench) -> list[str]:
    """Return the candidates that did not fail, as typed on the command line."""
    rows = [row for row in bench.rows if not row.failed]
    if not bench.has_configs:
        return ["--precisions", ",".join(row.name for row in rows)]
    return [word for row in rows[1:] for word in ("--arm", f"{row.name}: {shlex.join(row.config.settings)}")]
