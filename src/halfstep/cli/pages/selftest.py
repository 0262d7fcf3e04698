"""The pages of the self-test, and a line while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfstep.page import Block, Column, Heading, Page, Paragraph, Span, Style, Table
from halfstep.selftest.names import FAILED, PASSED, SKIPPED
from halfstep.status_line import show as show_line

_STYLE: dict[str, Style] = {PASSED: "good", FAILED: "bad", SKIPPED: "warn"}
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


def list_page(parts: Mapping[str, str]) -> Page:
    """Return the page of the parts and what each checks."""
    columns = (Column("part", wrap="never"), Column("checks", wrap="fold"))
    return Page("parts of the self-test", (Table(columns, tuple(parts.items())),))


def parts_page(report: dict[str, Any]) -> Page:
    """Return the page of the results, part by part."""
    columns = (Column("part", wrap="never"), Column("result", wrap="never"), Column("figure", wrap="fold"))
    rows = []
    for row in report["parts"]:
        result = Span(row["result"], _STYLE[row["result"]], strong=row["result"] == FAILED)
        words = row["error"] if row["result"] == FAILED else row["figure"]
        rows.append((row["part"], result, words, f"{row['seconds']:.1f}"))
    head = (Heading(report["device"]["name"], _conditions(report)),) if "device" in report else ()
    return Page("self-test", (*head, Table((*columns, Column("seconds", "right", "never")), tuple(rows))))


def _conditions(report: dict[str, Any]) -> str:
    device, versions = report["device"], report["versions"]
    driver = f", {device['driver']}" if device.get("driver") else ""
    return f"{', '.join(device['native'])}; torch {versions['torch']}{driver}, load {report['load']}"


def end_page(report: dict[str, Any], file: Path | None) -> Page:
    """Return how it ended, and what to do next."""
    counts = {result: [row["part"] for row in report["parts"] if row["result"] == result] for result in _STYLE}
    skipped = f", {len(counts[SKIPPED])} skipped" if counts[SKIPPED] else ""
    ended = Span(f"{len(counts[PASSED])} passed{skipped}, in {report['seconds']:.0f} s")
    if report["interrupted"]:
        ended = Span(f"interrupted: {len(counts[PASSED])} passed, {len(counts[FAILED])} failed{skipped}")
    elif counts[FAILED]:
        ended = Span(f"failed here: {', '.join(counts[FAILED])}", "bad", strong=True)
    blocks: list[Block] = [Paragraph(ended, gap=True)]
    if file is not None:
        blocks.append(Paragraph(f"written: {file}"))
    if counts[FAILED]:
        blocks.append(Paragraph(_advice(counts[FAILED], file), indent=True))
    if "HALFSTEP_CPUINFO" in report.get("settings", {}):
        blocks.append(Paragraph("HALFSTEP_CPUINFO is set: the CPU was described by a file, not by itself"))
    return Page("self-test", tuple(blocks))


def _advice(failed: list[str], file: Path | None) -> str:
    again = f"halfstep selftest --only {failed[0]} --json selftest.json"
    attach = str(file) if file else "selftest.json"
    first = "" if file else f"do: {again}\n"
    return f"{first}do: attach {attach} to an issue (template: device); it has no host name, user name or path"
