"""A profile as a page for a terminal: the cause and what to type, then where the time went and what shows it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from halfstep.cli._doctor_page import heading
from halfstep.cli._printable import printable

_BAR = 30
_FINE = "already-fast"
_SHOWN = 6


def show(report: dict[str, Any]) -> None:
    """Print the whole report."""
    console = Console(highlight=False)
    facts, cause = report["facts"], report["cause"]
    if report["interrupted"]:
        console.print(Text("interrupted: this is what was measured until then", style="yellow"))
    style = "bold green" if cause["id"] == _FINE else "bold yellow"
    console.print(Text(cause["id"], style=style).append(f": {printable(cause['sentence'])}", style="not bold"))
    _indented(console, f"do: {cause['do']}")
    console.print(Text(f"  $ {printable(cause['command'])}", style="bold"), soft_wrap=True)  # to be copied as one line
    if cause["evidence"]:
        heading(console, "What shows it")
        _indented(console, cause["evidence"])
    _print_speed(console, facts)
    _print_shares(console, facts)
    _print_layers(console, facts)
    _print_others(console, report)
    if report["conditions"]:
        from halfstep.measure.conditions import in_words

        heading(console, "Conditions")
        _indented(console, in_words(report["conditions"]), "dim")


def _print_speed(console: Console, facts: dict[str, Any]) -> None:
    race = facts["race"]
    if race is None:
        return
    heading(console, "Speed", "a step on a fixed batch")
    rows = {"strict fp32": _ms(race["fp32"])}
    if race["own_fp32"] is not None:
        rows[f"fp32 as set here ({facts['fp32_means']})"] = _ms(race["own_fp32"])
    if facts["asked"] != "fp32":
        interval = f"{race['low']:.2f}-{race['high']:.2f}x over {race['pairs']} pairs"
        rows[facts["asked"]] = f"{_ms(race['asked'])}, {race['speedup']:.2f}x of strict fp32 ({interval})"
    feeding = facts["feeding"]
    if feeding is not None:
        rows["with data"] = f"{_ms(feeding['step'])}, of which {_ms(feeding['wait'])} waiting"
        rows["speed-up with data"] = f"{facts['speedup_with_data']:.2f}x"
    if facts["ceiling"] is not None:
        rows["ceiling"] = f"{facts['ceiling']:.2f}x if matrix work took no time at all"
    console.print(_grid(rows))


def _print_shares(console: Console, facts: dict[str, Any]) -> None:
    if not facts["shares"]:
        return
    from halfstep.measure.profiling.facts import PARTS

    heading(console, "Where a step's time goes", f"in {facts['asked']}")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for part, words in PARTS.items():
        share = facts["shares"].get(part, 0.0)
        if part == "narrow" and facts["format"] in ("bf16", "fp16"):
            words = f"matrix work in {facts['format']}"
        table.add_row(words, f"{share:.0%}", Text("#" * round(share * _BAR), style="cyan"))
    console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _print_layers(console: Console, facts: dict[str, Any]) -> None:
    work = facts["work"]
    narrow = facts["format"] not in ("fp32", "tf32")
    total = sum(work["by_format"].values()) if work else 0
    if narrow and total and work["wide"]:
        shown = {name: flops / total for name, flops in list(work["wide"].items())[:_SHOWN] if flops / total >= 0.01}
        if shown:
            heading(console, "Modules that still compute in fp32", "share of FLOPs")
            console.print(_grid({name: f"{share:.0%}" for name, share in shown.items()}))
    if facts["misaligned"]:
        heading(console, "Channels that are no multiple of 8", "forward and backward, as is and padded")
        console.print(_grid({", ".join(row["names"][:_SHOWN]): _padding(row) for row in facts["misaligned"]}))


def _padding(row: dict[str, Any]) -> str:
    return (
        f"{row['channels']} {_ms(row['seconds'])}, {row['padded']} {_ms(row['padded_seconds'])}: "
        f"{row['low']:.2f}-{row['high']:.2f}x; {row['flops_share']:.0%} of the FLOPs"
    )


def _print_others(console: Console, report: dict[str, Any]) -> None:
    rows = {cause["id"]: cause["sentence"] for cause in report["others"]}
    rows |= {f"not measured: {name}": why for name, why in report["skipped"].items()}
    if rows:
        heading(console, "Also")
        console.print(_grid(rows))


def _grid(rows: dict[str, str]) -> Padding:
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=34, overflow="fold")
    table.add_column(overflow="fold")
    for key, value in rows.items():
        table.add_row(Text(printable(key), style="dim"), Text(printable(value)))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _indented(console: Console, words: str, style: str = "") -> None:
    console.print(Padding(Text(printable(words), style=style), (0, 0, 0, 2), expand=False))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
