"""An estimate as a page for a terminal: whether it fits, where the memory goes, and how far one could go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.cli._doctor_page import heading
from halfstep.cli._printable import printable
from halfstep.measure.memory.verdict import place_in_words
from halfstep.measure.sizes import size_in_words
from halfstep.measure.survival_report import THE_MODEL_ITSELF

_MODULES = 5
Column = Mapping[str, Any]


def show(report: dict[str, Any]) -> None:
    """Print the whole report: the answer first."""
    console = Console(highlight=False)
    for line in report["verdict"]["lines"]:
        console.print(Text(printable(line), style="bold green" if line.startswith("fits") else "bold yellow"))
    if report["interrupted"]:
        console.print(Text("interrupted: this is what was known by then", style="yellow"))
    for number, page in enumerate(report["devices"]):
        if number == 0:
            _print_columns(console, page["columns"])
            _print_savings(console, report["verdict"]["savings"])
        _print_device(console, page)
    _print_notes(console, report)
    console.print()
    console.print(Text("next: ", style="dim").append(printable(report["next"]), style="bold not dim"), soft_wrap=True)


def _print_columns(console: Console, columns: Sequence[Column]) -> None:
    """A table for each batch, run in one way: the first that was estimated."""
    kept = [column for column in columns if column["setting"]["recompute"] == columns[0]["setting"]["recompute"]]
    how = ", recomputing" if kept and kept[0]["setting"]["recompute"] else ""
    for samples in dict.fromkeys(column["samples"] for column in kept):
        beside = [column for column in kept if column["samples"] == samples]
        heading(console, f"At the peak, batch {samples}{how}", _moments(beside))
        console.print(_parts(beside, console))
        if any(column["by_format"] for column in beside):
            heading(console, "Kept for backward", "at the end of forward, by format and by module")
            console.print(_activations(beside, console))


def _moments(columns: Sequence[Column]) -> str:
    moments = dict.fromkeys(column["moment"] for column in columns)
    return printable("; ".join(moments)) if len(moments) == 1 else ""


def _parts(columns: Sequence[Column], console: Console) -> Padding:
    table = _table(console, "", [column["setting"]["precision"] for column in columns])
    for part in columns[0]["at_peak"]:
        if any(column["at_peak"][part] for column in columns):
            table.add_row(part, *(size_in_words(column["at_peak"][part]) for column in columns))
    table.add_section()
    table.add_row(
        Text("peak", style="bold"), *(Text(size_in_words(column["peak"]), style="bold") for column in columns)
    )
    if len({column["moment"] for column in columns}) > 1:
        table.add_row("when", *(printable(column["moment"]) for column in columns))
    return _indented(table)


def _activations(columns: Sequence[Column], console: Console) -> Padding:
    table = _table(console, "", [column["setting"]["precision"] for column in columns])
    for key, most in (("by_format", None), ("by_module", _MODULES)):
        table.add_section()
        for name in _largest(columns, key)[:most]:
            table.add_row(printable(name or THE_MODEL_ITSELF), *(_size(column[key].get(name, 0)) for column in columns))
    return _indented(table)


def _largest(columns: Sequence[Column], key: str) -> list[str]:
    """Names with something in any column, most first."""
    most: dict[str, int] = {}
    for column in columns:
        for name, size in column[key].items():
            most[name] = max(size, most.get(name, 0))
    return sorted((name for name, size in most.items() if size), key=lambda name: -most[name])


def _size(size: int) -> str:
    return size_in_words(size) if size else "-"


def _print_savings(console: Console, savings: Sequence[Mapping[str, Any]]) -> None:
    shown = [row for row in savings if row["recompute"] == savings[0]["recompute"]]
    for row in shown:
        change = f"{abs(row['saved']):.0%} {'less' if row['saved'] >= 0 else 'more'} than fp32 at batch {row['batch']}"
        why = f"; {printable(row['why'])}" if row["why"] else ""
        console.print()
        console.print(Padding(Text(f"{row['precision']}: {change}{why}"), (0, 0, 0, 2), expand=False))


def _print_device(console: Console, page: Mapping[str, Any]) -> None:
    device = page["device"]
    usable = f"{size_in_words(device['usable'])} of {size_in_words(device['memory'])} for tensors"
    heading(console, f"How far on {place_in_words(device)}", usable)
    table = _table(console, "precision", ["activations", "peak", "largest batch", "multiple of 8"])
    for row in page["largest"]:
        words = "recomputed" if row["recompute"] else "kept"
        table.add_row(row["precision"], words, _peak(page, row), _reach(row), str(row["preferred"] or "-"))
    if table.row_count:
        console.print(_indented(table))
    for why in dict.fromkeys(row["why"] for row in page["not_searched"]):
        console.print(Padding(Text(printable(why), style="yellow"), (0, 0, 0, 2), expand=False))
    _print_abilities(console, page)
    for row in page["refused"]:
        console.print(Padding(Text(printable(f"{row['given']}\ndo: {row['do']}"), style="red"), (0, 0, 0, 2)))


def _peak(page: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Of the first batch that was asked about."""
    for column in page["columns"]:
        setting = column["setting"]
        if (setting["precision"], setting["recompute"]) == (row["precision"], row["recompute"]):
            return size_in_words(column["peak"])
    return "-"


def _reach(row: Mapping[str, Any]) -> str:
    if not row["batch"]:
        return f"none: {size_in_words(row['missing'])} over"
    if row["at_least"]:
        return f"no limit up to {row['batch']}"
    return f"about {row['batch']}" if row["about"] else f"{row['batch']}"


def _print_abilities(console: Console, page: Mapping[str, Any]) -> None:
    for name, can in page["abilities"].items():
        if can["native"] is False:
            instead = f"; {page['auto']} is the one for it" if page["auto"] != name else ""
            text = f"{name}: not native on {page['device']['name']}: {can['reason']}{instead}"
            console.print(Padding(Text(text, style="yellow"), (0, 0, 0, 2), expand=False))


def _print_notes(console: Console, report: Mapping[str, Any]) -> None:
    said = {row["why"] for row in report["verdict"]["savings"]}
    columns = [column for page in report["devices"] for column in page["columns"] if not column["setting"]["recompute"]]
    notes = dict.fromkeys(note for column in columns for note in column["notes"] if note not in said)
    assumed = dict.fromkeys(
        f"assumed: {size_in_words(page['device']['reserved'])} are taken by the process itself, and "
        f"{page['device']['margin']:.0%} of the rest is left for gaps between tensors"
        for page in report["devices"]
    )
    if notes or assumed:
        heading(console, "Notes")
    for note in (*notes, *assumed):
        console.print(Padding(Text(printable(note), style="dim"), (0, 0, 0, 2), expand=False))


def _table(console: Console, first: str, titles: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False)
    table.add_column(first, overflow="fold")
    for title in titles:
        table.add_column(title, justify="right")
    return table


def _indented(table: Table) -> Padding:
    return Padding(table, (0, 0, 0, 1), expand=False)
