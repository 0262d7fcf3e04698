"""The check of settings as a page for a terminal, readable at 80 columns, plain where there is no terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.cli._doctor_page import heading, pairs, print_finding
from halfstep.doctor.settings import shown

_KEY_WIDTH = 32
"""Room for the longest variable, which should not be broken in two."""


def show(report: dict[str, Any]) -> None:
    """Print the whole report; the verdict comes last, where the eye stays."""
    console = Console(highlight=False)
    heading(console, "Sources")
    console.print(pairs({source["kind"]: source["place"] for source in report["sources"]}))
    heading(console, "Settings", "" if report["settings"] else "none of them speaks of precision")
    if report["settings"]:
        console.print(_settings(report["settings"], console))
    for finding in report["findings"]:
        print_finding(console, finding)
    console.print()
    _print_status(console, report["status"])


def _settings(rows: list[dict[str, Any]], console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, show_edge=False)
    widest = max(len(row["key"]) for row in rows)
    table.add_column("source", no_wrap=True)
    table.add_column("key", overflow="fold", no_wrap=widest <= _KEY_WIDTH)
    table.add_column("value", overflow="fold")
    table.add_column("means", overflow="fold")
    for row in rows:
        source = f"{row['source']}:{row['line']}" if row["line"] else row["source"]
        table.add_row(source, Text(row["key"]), Text(shown(row["value"])), Text(row["means"]))
    return table


def _print_status(console: Console, status: dict[str, Any]) -> None:
    console.print(Text("=== Configuration Status Check ===", style="bold"))
    console.print(Text(_verdict(status, console), style="green" if status["aligned"] else "red"))
    lines = {
        "AMP": status["amp"],
        "FP16": status["fp16"],
        "Learning Rate": status["learning_rate"],
        "Gradient Clipping": status["clipping"],
    }
    for name, words in lines.items():
        console.print(Padding(Text(f"{name}: {words}"), (0, 0, 0, 3), expand=False))


def _verdict(status: dict[str, Any], console: Console) -> str:
    plain = console.options.ascii_only
    if not status["aligned"]:
        return f"{'NO:' if plain else '❌'} Configuration is not aligned: precision mismatch"
    known = {None: "nothing speaks of precision", "auto": "the device decides"}
    what = known.get(status["precision"], f"everything asks for {status['precision']}")
    return f"{'OK:' if plain else '✅'} Configuration is properly aligned: {what}"
