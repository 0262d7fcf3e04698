"""Make docs/devices.md from the JSON files of self-tests: `python -m halfstep.selftest.table docs/devices/*.json`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep.errors import BadData
from halfstep.files import read_json
from halfstep.printable import in_line
from halfstep.selftest.names import FAILED, FORM, PARTS, PASSED, SKIPPED, description

_MARKS = {PASSED: "passed", FAILED: "**failed**", SKIPPED: "skipped"}
_HEAD = """# Devices

What `halfstep selftest` found on devices that people have. This page is made from the files in
`docs/devices`: `python -m halfstep.selftest.table docs/devices/*.json > docs/devices.md`. To add a device, run
`halfstep selftest --json device.json` and attach the file to an issue (template: device); see [selftest](selftest.md).
"""


def page(reports: Mapping[str, Any]) -> str:
    """Return the page for reports by file name; raise BadData for one that is not a whole self-test."""
    for name, report in reports.items():
        _check(name, report)
    lines = [_HEAD, *_overview(reports)]
    for name in sorted(reports):
        lines += ["", f"## {_cell(_title(reports[name]))}", "", _conditions(reports[name]), *_parts(reports[name])]
    lines += ["", "## What each part checks", ""]
    lines += [f"- **{part}**: {description(part)}" for part in PARTS]
    return "\n".join(lines) + "\n"


def _check(name: str, report: Any) -> None:
    right = isinstance(report, dict) and report.get("form") == FORM
    if not right or [row["part"] for row in report["parts"]] != list(PARTS) or report["interrupted"]:
        raise BadData(
            f"{name} is not the whole self-test of a device",
            allowed=f"a JSON of form {FORM} with all {len(PARTS)} parts",
            do="halfstep selftest --json device.json",
        )


def _title(report: dict[str, Any]) -> str:
    count = report["device"]["count"]
    return f"{count} × {report['device']['name']}" if count > 1 else str(report["device"]["name"])


def _overview(reports: Mapping[str, Any]) -> list[str]:
    lines = ["| device | native | torch | driver | passed | skipped | failed | seconds |"]
    lines += ["|---|---|---|---|---:|---:|---|---:|"]
    for name in sorted(reports):
        report = reports[name]
        device, results = report["device"], [row["result"] for row in report["parts"]]
        failed = ", ".join(row["part"] for row in report["parts"] if row["result"] == FAILED) or "none"
        cells = [_title(report), ", ".join(device["native"]), report["versions"]["torch"], device.get("driver") or "–"]
        cells += [str(results.count(PASSED)), str(results.count(SKIPPED)), failed, f"{report['seconds']:.0f}"]
        lines.append(_row(cells))
    return lines


def _conditions(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(report["versions"].items()) if version)
    flags = ", ".join(f"{name} {value}" for name, value in sorted(report["flags"].items()))
    threads = f"{report['threads']} of {report['cores']} cores, load {report['load']}"
    return _cell(f"{versions}; {threads}; {flags}") + ".\n"


def _parts(report: dict[str, Any]) -> list[str]:
    lines = ["| part | result | figure | seconds |", "|---|---|---|---:|"]
    for row in report["parts"]:
        words = row["error"] if row["result"] == FAILED else row["figure"]
        lines.append(_row([row["part"], _MARKS[row["result"]], words, f"{row['seconds']:.1f}"]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: object) -> str:
    """Return foreign text as one cell: a file that somebody attached may hold anything."""
    escaped = in_line(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
    return escaped.replace("[", "\\[")


def main(files: Sequence[str]) -> None:
    """Print the page of these files."""
    sys.stdout.write(page({Path(file).name: read_json(Path(file)) for file in files}))


if __name__ == "__main__":
    main(sys.argv[1:])
