"""`halfstep runs`: list the runs of a folder with their state, the newest first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfstep.cli._options import Json, print_json
from halfstep.printable import in_line, shortened
from halfstep.terminal import say, screen

if TYPE_CHECKING:
    from halfstep.runs.listing import Listing, RunRow

GROUP = "Run"
SHORTEST_NAME, LONGEST_NAME = 12, 40
GAP = 2


def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of runs, or one run.")] = Path("runs"),
    most: Annotated[int, typer.Option(min=1, max=10_000, help="Runs to list at most, the newest first.")] = 50,
    json: Json = False,
) -> None:
    """List the runs of a folder: state, precision, metric, steps, skips, the time taken and when they wrote last."""
    from halfstep.runs.listing import runs

    found = runs(folder, most)
    if json:
        print_json(_as_dict(found))
    else:
        _show(found)


def _as_dict(found: Listing) -> dict[str, Any]:
    rows = [row._asdict() for row in found.runs]
    return {"folder": str(found.folder), "runs": rows, "more": found.more, "other_folders": found.others}


def _show(found: Listing) -> None:
    from rich.table import Table

    if found.runs:
        table, rows = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0)), [_cells(row) for row in found.runs]
        widths = {name: max(len(name), *(len(cells[name]) for cells in rows)) for name in rows[0]}
        columns, for_name = _fitting(widths, screen().width)
        for name in columns:
            table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
        for cells in rows:
            table.add_row(shortened(cells["run"], for_name), *(cells[name] for name in columns[1:]))
        screen().print(table)
        left_out = [name for name in widths if name not in columns]
        if left_out:
            say(f"no room for {', '.join(left_out)} in this terminal: --json has all")
    for line in _rest(found):
        say(line)


def _fitting(widths: dict[str, int], width: int) -> tuple[list[str], int]:
    """Return the columns that a screen has room for, and the room for names.

    Only names of runs are cut: a number without its end is another number.
    """
    columns = list(widths)

    def room() -> int:
        return width - sum(widths[column] + GAP for column in columns[1:]) - GAP

    for name in _LEFT_OUT_FIRST:
        if room() >= min(SHORTEST_NAME, widths["run"]):
            break
        columns.remove(name)
    return columns, max(SHORTEST_NAME, min(room(), LONGEST_NAME))


_NUMBERS = ("steps", "skips", "took", "age")
_LEFT_OUT_FIRST = ("took", "precision", "skips", "age", "steps", "metric")


def _cells(row: RunRow) -> dict[str, str]:
    from halfstep import numbers

    metric = "" if row.metric is None else in_line(row.metric)[:12]
    value = "" if row.value is None else f" {numbers.value(row.value)}"
    steps = "" if row.steps is None else f"{row.steps:,}" + (f"/{row.planned:,}" if row.planned else "")
    return {
        "run": in_line(row.name),
        "state": row.state,
        "precision": in_line(row.precision or "")[:12],
        "metric": f"{metric}{value}",
        "steps": steps,
        "skips": "" if row.skips is None else f"{row.skips:,}",
        "took": "" if row.seconds is None else numbers.clock(row.seconds),
        "age": _ago(row.age),
    }


def _ago(seconds: float) -> str:
    """Return an age in its largest unit."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now" if seconds < 10 else f"{seconds:.0f} s"


def _rest(found: Listing) -> list[str]:
    lines = [] if found.runs else [f"no runs in {in_line(found.folder)}"]
    if found.more:
        lines.append(f"{found.more:,} more: --most {found.more + len(found.runs)}")
    if found.others:
        lines.append(f"{found.others:,} {'folder is' if found.others == 1 else 'folders are'} no run")
    return lines
