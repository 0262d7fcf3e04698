"""The pages of the self-test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfstep.page import Block, Column, Heading, Page, Paragraph, Span, Style, Table
from halfstep.selftest.names import FAILED, PARTS, PASSED, SKIPPED

_STYLE: dict[str, Style] = {PASSED: "good", FAILED: "bad", SKIPPED: "warn"}


def build_list_page() -> Page:
    """Return the page of the parts and what each checks."""
    columns = (Column("part", wrap="never"), Column("checks", wrap="fold"))
    return Page("parts of the self-test", (Table(columns, tuple(PARTS.items())),))


def build_results_page(report: dict[str, Any]) -> Page:
    """Return the page of the results, part by part."""
    columns = (Column("part", wrap="never"), Column("result", wrap="never"), Column("figure", wrap="fold"))
    rows = []
    for row in report["parts"]:
        result = Span(row["result"], _STYLE[row["result"]], strong=row["result"] == FAILED)
        words = row["error"] if row["result"] == FAILED else row["figure"]
        rows.append((row["part"], result, words, f"{row['seconds']:.1f}"))
    blocks: list[Block] = []
    if "device" in report:
        device, versions = report["device"], report["versions"]
        driver = f", {device['driver']}" if device.get("driver") else ""
        about = f"{', '.join(device['native'])}; torch {versions['torch']}{driver}, load {report['load']}"
        blocks.append(Heading(device["name"], about))
    blocks.append(Table((*columns, Column("seconds", "right", "never")), tuple(rows)))
    return Page("self-test", tuple(blocks))


def build_end_page(report: dict[str, Any], file: Path | None) -> Page:
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
        again = f"halfstep selftest --only {counts[FAILED][0]} --json selftest.json"
        first = "" if file else f"do: {again}\n"
        attach = str(file) if file else "selftest.json"
        advice = f"{first}do: attach {attach} to an issue (template: device); it has no host name, user name or path"
        blocks.append(Paragraph(advice, indent=True))
    if "HALFSTEP_CPUINFO" in report.get("settings", {}):
        blocks.append(Paragraph("HALFSTEP_CPUINFO is set: the CPU is described by a file, not measured"))
    return Page("self-test", tuple(blocks))
