"""A bench as a page for a terminal: a sentence for each precision, the table, and what it was measured under."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.cli._doctor_page import heading
from halfstep.cli._printable import printable

if TYPE_CHECKING:
    from halfstep.measure.bench.report import Bench
    from halfstep.measure.bench.row import Row
    from halfstep.measure.bench.words import Cell

_STYLE = {"same": "green", "worse": "red", "can't tell": "yellow"}


def show(bench: Bench, files: Sequence[Path]) -> None:
    """Print the whole report."""
    from halfstep.measure.bench import words

    console = Console(highlight=False)
    _print_verdicts(console, bench)
    main = words.main_columns(bench.metric)
    rest = {
        title: cell
        for title, cell in words.columns(bench.metric, bench.price_per_hour).items()
        if title not in main or title == "Precision"
    }
    told, count = bench.conditions.get("device", ""), len(bench.seeds)
    heading(console, "Figures", printable(f"{bench.name} on {told}, {count} {words.many(count, 'seed')}"))
    console.print(_table(main, bench.rows, console))
    heading(console, "More")
    console.print(_table(rest, bench.rows, console))
    heading(console, "Conditions")
    _print_aside(console, words.footnote(bench.conditions, bench.seeds, bench.metric, raced=bench.raced))
    console.print()
    _print_aside(console, f"wrote {', '.join(map(str, files))}")
    console.print(Text(printable(next_command(bench)), style="bold"))


def _print_verdicts(console: Console, bench: Bench) -> None:
    from halfstep.measure.bench.words import sentence

    if bench.interrupted:
        console.print(Text("Interrupted: these are the runs that were finished.", style="yellow"))
    for row in bench.rows[1:]:
        style = "red" if row.failed else _STYLE.get(row.parity.verdict if row.parity else "", "")
        name, _, words = printable(sentence(row, bench.metric, len(bench.seeds))).partition(": ")
        console.print(Text(name, style=f"bold {style}").append(f": {words}", style="not bold"))
    if bench.baseline.failed:
        console.print(Text(printable(bench.verdicts[0]), style="red"))
    for aside in bench.asides:
        _print_aside(console, aside)


def _table(columns: Mapping[str, Cell], rows: Sequence[Row], console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False)
    for title in columns:
        table.add_column(title, overflow="fold", no_wrap=title == "Precision")
    for row in rows:
        table.add_row(*(Text(printable(cell(row, rows[0]))) for cell in columns.values()))
    return table


def _print_aside(console: Console, text: str) -> None:
    console.print(Padding(Text(printable(text), style="dim"), (0, 0, 0, 2), expand=False))


def next_command(bench: Bench) -> str:
    """What to type next: the fastest precision that is the same, or more seeds where too little is known."""
    is_case = ":" in bench.name
    if bench.interrupted:
        return "do: the same command again" + (", which begins anew" if is_case else " goes on where it was")
    base = bench.baseline
    if base.failed:
        return f"do: mend what {base.name} failed of, then the same command again"
    if base.finite < len(base.runs):
        return f"do: make {base.name} train to a finite {bench.metric.name} first, then the same command again"
    verdicts = [(row, (row.parity.verdict, row.gain.verdict)) for row in bench.rows[1:] if row.parity and row.gain]
    proven = [row for row, verdict in verdicts if verdict == ("same", "faster") and not row.failed]
    if not proven and any("can't tell" in verdict for row, verdict in verdicts if not row.failed):
        names = ",".join(row.name for row in bench.rows if not row.failed)
        words = shlex.join([bench.name, *bench.settings, "--precisions", names])
        return f"do: halfstep bench {words} --seeds {max(5, len(bench.seeds) + 2)}"
    name = max(proven, key=_times).name if proven else base.name
    if is_case:
        return f'do: halfstep.Stepper(model, optimizer, precision="{name}")'
    return f"do: halfstep train {shlex.join([bench.name, *bench.settings, f'precision={name}'])}"


def _times(row: Row) -> float:
    return row.gain.times if row.gain else 0.0
