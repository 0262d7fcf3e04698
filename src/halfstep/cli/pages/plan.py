"""Print a plan: the choice, the reasons, then everything that was measured."""

from __future__ import annotations

import math
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.cli.pages.layout import heading, indented, pairs, ruled_table
from halfstep.clock import FEWEST_FOR_INTERVAL
from halfstep.measure.conditions import busy, flags_in_words
from halfstep.measure.plan.choice import NotMeasured
from halfstep.measure.setting import size_in_words
from halfstep.printable import printable
from halfstep.terminal import screen


def show(report: dict[str, Any]) -> None:
    """Print the plan without the next command."""
    console = screen()
    _print_verdict(console, report)
    heading(console, "Why")
    console.print(pairs({part: printable(words) for part, words in _why(report).items()}))
    heading(console, "Measured", "times as fast as strict fp32, with the median's 95 % interval")
    console.print(indented(_ladder(report, console), 1))
    cut = _cut(report["ladder"])
    if cut:
        heading(console, "Passed over")
        console.print(pairs(cut))
    heading(console, "Under")
    console.print(pairs(_conditions(report)))


def show_next(report: dict[str, Any]) -> None:
    """Print the next command."""
    console = screen()
    console.print()
    if report["interrupted"]:
        _print_line(console, "interrupted: to measure the rest, type")
        _print_line(console, f"  halfstep plan {_again(report)}")
    elif report["written"]:
        _print_line(console, f"wrote {report['written']}; to train with it, type")
        _print_line(console, f"  halfstep train {_quoted(report['written'])}")
    elif report["file"]:
        _print_line(console, "nothing was written; to write the recipe, type")
        _print_line(console, f"  halfstep plan {_again(report)} --yes --write {_quoted(report['file'])}")
        if not report["settings"]:
            _print_line(console, "or train with the same settings at once:")
            _print_line(console, f"  halfstep train {_words(report)} {_settings(report)}")
    else:
        _print_line(console, "to apply it, in your own loop:")
        for line in report["python"]:
            _print_line(console, f"  {line}")


def _print_verdict(console: Console, report: dict[str, Any]) -> None:
    name, gap, speed = printable(report["verdict"]).partition("  ")
    verdict = Text(name, style="bold green").append(f"{gap}{speed}", style="not bold")
    console.print(verdict)
    if report["growth"]:
        console.print(Text(report["growth"]["words"], style="yellow"))
    changed = _changed(report)
    console.print(Text(printable(f"{report['name']}: {changed or 'as it is now'}")))
    console.print(Text(printable(f"{report['device']['name']}: {_formats(report['formats'])}"), style="dim"))
    if any(cell["cut"] == NotMeasured.NO_TIME for cell in report["ladder"]):
        more = f"not everything was measured in {report['seconds']:.0f} s: --seconds {_more(report)} sees more"
        console.print(Text(more, style="yellow"))
    disturbed = busy(report["conditions"])
    if disturbed:
        console.print(Text(disturbed, style="yellow"))
    if report["interrupted"]:
        console.print(Text("interrupted: this is the best of what had been measured", style="yellow"))


def _more(report: dict[str, Any]) -> int:
    """Return three times the seconds, in whole minutes."""
    return 60 * math.ceil(float(report["seconds"]) / 20)


def _changed(report: dict[str, Any]) -> str:
    now, then = report["now"], report["choice"]["setting"]
    return "; ".join(f"{key} {_shown(now[key])} -> {_shown(then[key])}" for key in then if now[key] != then[key])


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _formats(formats: dict[str, Any]) -> str:
    native = [name for name, found in formats.items() if found["native"]]
    lacking = [name for name, found in formats.items() if not found["native"]]
    return f"computes in {', '.join(native)}" + (f"; not in {', '.join(lacking)}" if lacking else "")


def _why(report: dict[str, Any]) -> dict[str, str]:
    found = dict(report["reasons"])
    parity = report["parity"]
    proof = "; a smoke test: `halfstep bench` proves it" if report["choice"]["setting"] != report["baseline"] else ""
    found["parity"] = f"{parity['verdict']}: {parity['why']}{proof}"
    if report["runner_up"]:
        found["runner-up"] = f"{report['runner_up']['name']}: {report['why_not']}"
    if report["growth_ended"]:
        grown = _growth(report["growth"]) if report["growth"] else "none"
        found["larger batch"] = f"{grown}; {report['growth_ended']}"
    return found


def _growth(growth: dict[str, Any]) -> str:
    return (
        f"{growth['setting']['batch']} samples: {growth['speed']['speedup']:.2f}x by samples; learning rate "
        f"{growth['learning_rate']:.3g} ({growth['rule']}), {growth['warmup_steps']} updates of warm-up, "
        f"{growth['note']}"
    )


def _ladder(report: dict[str, Any], console: Console) -> Table:
    table = ruled_table(console, pad_edge=False)
    table.add_column("")
    table.add_column("setting", overflow="fold")
    for title in ("speed", "interval", "pairs", "update", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("parity", no_wrap=True)
    for cell in report["ladder"]:
        if cell["speed"] is not None:
            chosen = cell["setting"] == report["choice"]["setting"]
            table.add_row(*_row(cell, report), style="bold" if chosen else "")
    return table


def _row(cell: dict[str, Any], report: dict[str, Any]) -> list[str]:
    speed, is_baseline = cell["speed"], cell["setting"] == report["baseline"]
    return [
        ">" if cell["setting"] == report["choice"]["setting"] else " ",
        "strict fp32" + cell["name"].removeprefix("fp32") if is_baseline else cell["name"],
        f"{speed['speedup']:.2f}x",
        _range(speed, is_baseline),
        str(speed["pairs"]),
        _time(speed["seconds"]),
        size_in_words(cell["peak"]) if cell["peak"] else "-",
        "-" if is_baseline else cell["parity"]["verdict"],
    ]


def _range(speed: dict[str, Any], is_baseline: bool) -> str:
    if is_baseline:
        return "-"
    return f"{speed['low']:.2f} to {speed['high']:.2f}" if speed["pairs"] >= FEWEST_FOR_INTERVAL else "too few"


def _cut(ladder: list[dict[str, Any]]) -> dict[str, str]:
    """Return why configurations were excluded, grouped by reason."""
    together: dict[str, list[str]] = {}
    for cell in ladder:
        if cell["cut"]:
            together.setdefault(cell["cut"], []).append(cell["name"])
    return {"; ".join(names): printable(reason) for reason, names in together.items()}


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def _conditions(report: dict[str, Any]) -> dict[str, str]:
    found = report["conditions"]
    return {
        "torch": f"{found['torch']}, python {found['python']}, halfstep {found['halfstep']}",
        "device": f"{found['device']}{', ' + found['driver'] if found['driver'] else ''}",
        "threads": f"{found['threads']} on {found['cores']} cores, load {found['load']}",
        "flags": flags_in_words(found),
        "arms": f"{found['arms']}, in turns; memory is predicted",
        "time": f"{report['seconds']:.0f} s",
    }


def _words(report: dict[str, Any]) -> str:
    return shlex.join([report["subject"], *report["settings"]])


def _again(report: dict[str, Any]) -> str:
    """Return the typed command with its options."""
    return shlex.join([report["subject"], *report["settings"], *report["options"]])


def _quoted(path: str) -> str:
    # A bare name would be taken for a shipped recipe.
    return shlex.quote(path if "/" in path else f"./{path}")


def _settings(report: dict[str, Any]) -> str:
    return shlex.join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in report["changes"].items()
    )


def _print_line(console: Console, line: str) -> None:
    """Print a line without wrapping, for copying."""
    console.print(Text(printable(line)), soft_wrap=True)
