"""Print the self-test: a line while it runs, one table, and what to do next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.text import Text

from halfstep.cli.pages.layout import heading, indented, ruled_table
from halfstep.selftest.names import FAILED, PASSED, SKIPPED
from halfstep.status_line import show as show_line
from halfstep.terminal import screen

_STYLE = {PASSED: "green", FAILED: "bold red", SKIPPED: "yellow"}
_TICK = 1.0


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback for the part that begins; a line shows it with its seconds, on a terminal."""
    now: list[tuple[str, float]] = []
    done = threading.Event()

    def on_part(name: str, number: int, of: int) -> None:
        words = f"part {number} of {of}, {name}" if name else "looking at the device"
        now[:] = [(words, time.monotonic())]
        tick()

    def tick() -> None:
        for words, began in now:
            show_line(f"halfstep selftest: {words}, {time.monotonic() - began:.0f} s")

    def ticking() -> None:
        while not done.wait(_TICK):
            tick()

    thread = threading.Thread(target=ticking, daemon=True)
    thread.start()
    try:
        yield on_part
    finally:
        done.set()
        thread.join()


def show_list(parts: Mapping[str, str]) -> None:
    """Print the parts and what each checks."""
    console = screen()
    table = ruled_table(console)
    table.add_column("part", no_wrap=True)
    table.add_column("checks", overflow="fold")
    for name, what in parts.items():
        table.add_row(name, what)
    console.print(table)


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    console = screen()
    if "device" in report:
        heading(console, report["device"]["name"], _conditions(report))
    table = ruled_table(console)
    table.add_column("part", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("figure", overflow="fold")
    table.add_column("seconds", justify="right", no_wrap=True)
    for row in report["parts"]:
        words = row["error"] if row["result"] == FAILED else row["figure"]
        table.add_row(row["part"], Text(row["result"], style=_STYLE[row["result"]]), words, f"{row['seconds']:.1f}")
    console.print(table)


def _conditions(report: dict[str, Any]) -> str:
    device, versions = report["device"], report["versions"]
    driver = f", {device['driver']}" if device.get("driver") else ""
    return f"{', '.join(device['native'])}; torch {versions['torch']}{driver}, load {report['load']}"


def show_next(report: dict[str, Any], file: Path | None) -> None:
    """Print how it ended, and what to do next."""
    console = screen()
    counts = {result: [row["part"] for row in report["parts"] if row["result"] == result] for result in _STYLE}
    skipped = f", {len(counts[SKIPPED])} skipped" if counts[SKIPPED] else ""
    console.print()
    if report["interrupted"]:
        console.print(f"interrupted: {len(counts[PASSED])} passed, {len(counts[FAILED])} failed{skipped}")
    elif counts[FAILED]:
        console.print(Text(f"failed here: {', '.join(counts[FAILED])}", style="bold red"))
    else:
        console.print(f"{len(counts[PASSED])} passed{skipped}, in {report['seconds']:.0f} s")
    if file is not None:
        console.print(f"written: {file}")
    if counts[FAILED]:
        console.print(indented(Text(_advice(counts[FAILED], file))))
    if "HALFSTEP_CPUINFO" in report.get("settings", {}):
        console.print("HALFSTEP_CPUINFO is set: the CPU was described by a file, not by itself")


def _advice(failed: list[str], file: Path | None) -> str:
    again = f"halfstep selftest --only {failed[0]} --json selftest.json"
    attach = str(file) if file else "selftest.json"
    first = "" if file else f"do: {again}\n"
    return f"{first}do: attach {attach} to an issue (template: device); it has no host name, user name or path"
