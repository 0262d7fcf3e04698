"""Print an audit: the verdict, the findings, the modules and islands, and one command to type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, indented, print_finding, ruled_table
from halfstep.printable import printable
from halfstep.terminal import screen

_MOST_MODULES = 12
_WIDE = 100
"""Terminal columns from which on the page has room for gradients."""
_MIXED = 0.995
_FEW_BITS = 1.0
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def show(report: dict[str, Any], *, every: bool = False, picture: Path | None = None) -> None:
    """Print the whole report."""
    console = screen()
    if report["interrupted"]:
        console.print(Text("interrupted: this is what was seen until then", style="yellow"))
    console.print(_verdict(report))
    console.print(Text(printable(_circumstances(report)), style="dim"))
    if report["stopped"]:
        console.print(Text(f"the step ended early: {printable(report['stopped'])}", style="yellow"))
    for finding in report["findings"]:
        print_finding(console, {key: printable(value) for key, value in finding.items() if isinstance(value, str)})
    _print_modules(console, report, every)
    _print_islands(console, report["islands"])
    console.print()
    for note in report["notes"]:
        console.print(Text(printable(note), style="dim"))
    if picture is not None and report["modules"]:
        console.print(Text(f"picture: {printable(picture)}"), soft_wrap=True)
    if report["next"]:
        console.print()
        console.print(
            Text(f"  $ {printable(report['next'])}", style="bold"), soft_wrap=True
        )  # not wrapped, for copying


def _verdict(report: dict[str, Any]) -> Text:
    worst = {finding["severity"] for finding in report["findings"]}
    colour = "red" if "error" in worst else "yellow" if "warning" in worst or report["interrupted"] else "green"
    return Text(printable(report["precision"]), style=f"bold {colour}").append(
        f": {report['verdict']}", style="not bold"
    )


def _circumstances(report: dict[str, Any]) -> str:
    words = [report["subject"], report["device"]]
    total = sum(report["flops"].values())
    if total:
        shares = ", ".join(f"{name} {_share(count / total)}" for name, count in report["flops"].items())
        words.append(f"all work: {shares}")
    if report["island_share"]:
        words.append(f"{_share(report['island_share'])} in islands")
    if report["loss_scale"]:
        words.append(f"loss scale {report['loss_scale']:.0f}")
    return "; ".join(words)


def _print_modules(console: Console, report: dict[str, Any], every: bool) -> None:
    rows = report["modules"] if every else together(report["modules"])
    rows = sorted(rows, key=lambda row: _first(row, report))
    if not rows:
        return
    shown = rows if every else rows[:_MOST_MODULES]
    count = sum(row.get("times", 1) for row in shown)
    aside = "" if count == len(report["modules"]) else f"; {count} of {len(report['modules'])}, see --all"
    heading(console, "Modules", f"findings and islands first, then by work{aside}")
    console.print(_table(shown, console, report))


def together(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge modules whose paths differ only by a number and whose formats agree into one row."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        formats = [
            _formats(row["stored"]),
            _formats(row["saved"]),
            *(f"{n} {s:.2f}" for n, s in row["computed"].items()),
        ]
        pattern = _NUMBER.sub("*", row["module"])
        groups.setdefault((pattern, row["kind"], *formats), []).append(row)
    return [group[0] if len(group) == 1 else _one(group, key[0]) for key, group in groups.items()]


def _one(group: list[dict[str, Any]], pattern: str) -> dict[str, Any]:
    """Return one row with the sum of the FLOPs and the worst of the numbers."""
    worst = {way: _worst([row[way] for row in group if row[way]]) for way in ("forward", "backward")}
    names = [row["module"] for row in group]
    return {**group[0], **worst, "module": pattern, "names": names, "times": len(group),
            "share": sum(row["share"] for row in group)}  # fmt: skip


def _worst(numbers: list[dict[str, Any]]) -> dict[str, Any] | None:
    bits = [one["headroom_bits"] for one in numbers if one["headroom_bits"] is not None]
    vanish = max((one["underflow"] for one in numbers), default=0.0)
    return {"headroom_bits": min(bits, default=None), "underflow": vanish} if numbers else None


def _first(row: dict[str, Any], report: dict[str, Any]) -> tuple[bool, float]:
    named = {module for finding in report["findings"] for module in finding["modules"]}
    mine = set(row.get("names", [row["module"]]))
    return not (mine & named or row["island"] in mine), -row["share"]


def _table(rows: list[dict[str, Any]], console: Console, report: dict[str, Any]) -> Table:
    table = ruled_table(console)
    values, wide = any(row["forward"] for row in rows), console.width >= _WIDE
    table.add_column("module", overflow="fold")
    for title in ("stored", "computed", "kept"):
        table.add_column(title, no_wrap=True)
    titles = ["work"]
    if values:
        titles += ["headroom", "vanish", "gradients\nheadroom", "gradients\nvanish"] if wide else ["headroom", "vanish"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = [_numbers(row["forward"], row["backward"], wide)] if values else []
        table.add_row(_name(row), _formats(row["stored"]), _computed(row, report["format"]), _formats(row["saved"]),
                      _share(row["share"]), *(cell for group in cells for cell in group))  # fmt: skip
    return table


def _name(row: dict[str, Any]) -> Text:
    name = Text(printable(row["module"]))
    if row.get("times"):
        kind = f" {row['kind']}" if row["module"].endswith("*") else ""
        name.append(printable(f"{kind} x{row['times']}"), style="dim")
    return name.append(" (island)", style="cyan") if row["island"] == row["module"] else name


def _computed(row: dict[str, Any], asked: str) -> Text:
    shares = row["computed"]
    if not shares:
        return Text("-", style="dim")
    name, share = next(iter(shares.items()))
    words = name if share >= _MIXED else f"{name} {share:.0%}"
    # Work in another format than asked for, and in no island: probably unintended.
    stray = bool(row["flops"]) and name != asked and row["island"] is None
    return Text(words, style="yellow" if stray else "cyan" if row["island"] is not None else "")


def _formats(sizes: dict[str, int]) -> str:
    names = [name for name, _ in sorted(sizes.items(), key=lambda item: -item[1])]
    return "+".join(names[:2]) if names else "-"


def _numbers(forward: dict[str, Any] | None, backward: dict[str, Any] | None, wide: bool) -> list[Text]:
    cells = [_bits(forward), _vanish(forward)]
    return [*cells, _bits(backward), _vanish(backward)] if wide else cells


def _bits(numbers: dict[str, Any] | None) -> Text:
    if numbers is None or numbers["headroom_bits"] is None:
        return Text("-", style="dim")
    # Adding 0.0 turns -0.0 into 0.0.
    bits = numbers["headroom_bits"] + 0.0
    return Text(f"{bits:.1f} bits", style="red" if bits < 0 else "yellow" if bits < _FEW_BITS else "")


def _vanish(numbers: dict[str, Any] | None) -> Text:
    return Text(_share(numbers["underflow"]) if numbers else "-")


def _share(share: float) -> str:
    if not share:
        return "-"
    return f"{share:.1%}" if share >= 0.001 else "<0.1%"


def _print_islands(console: Console, islands: list[dict[str, Any]]) -> None:
    if not islands:
        return
    heading(console, "Islands", "the same step without each of them")
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=34, overflow="fold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in islands:
        word, colour = {True: ("needed", "green"), False: ("not needed", "yellow"), None: ("unknown", "dim")}[
            one["needed"]
        ]
        path = one["path"] or "(the model itself)"
        table.add_row(Text(printable(path)), Text(word, style=colour), Text(printable(one["why"])))
    console.print(indented(table))
