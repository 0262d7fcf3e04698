"""Parts of the documentation that are made from data: `python -m tests.docs.made` writes them, a test compares them.

A page marks such a part by `<!-- made: NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfstep.cli._known import build_format_rows, build_gpu_rows
from halfstep.draw.markdown import escape_markdown, render_markdown
from halfstep.selftest.names import FAILED, PASSED, SKIPPED
from halfstep.selftest.names import PARTS as SELFTEST_PARTS
from halfstep.selftest.page import build_results_page
from tests.docs.pictures import pictures
from zoo import Pain, pains

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PICTURES = DOCS / "concepts" / "pictures"
_PART = re.compile(r"(<!-- made: (?P<name>\w+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def made() -> dict[Path, str]:
    """Return every file that has a made part, with what it should contain."""
    found = {PICTURES / name: drawn for name, drawn in pictures().items()}
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if _PART.search(text):
            found[page] = _PART.sub(lambda part: f"{part[1]}\n{PARTS[part['name']]()}\n{part[3]}", text)
    return found


def old() -> list[Path]:
    """Return the files that differ from what their data say."""
    return [path for path, text in made().items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def _gpus() -> str:
    rows = [
        [
            row.name,
            f"`{row.id}`",
            f"{row.gib:.0f} GiB",
            ", ".join(row.native) or "-",
            row.precision,
            row.why,
        ]
        for row in build_gpu_rows()
    ]
    return _table(["GPU", "`--device`", "memory", "native", "`auto` picks", "because"], rows)


def _formats() -> str:
    rows = [
        [
            row.name,
            str(row.bits),
            f"{row.sign} + {row.exponent} + {row.fraction}",
            f"{row.largest:.5g}",
            f"{row.smallest:.1g}",
            str(row.digits or "<1"),
            f"{row.counts_to:,}",
        ]
        for row in build_format_rows()
    ]
    titles = [
        "format",
        "bits",
        "s + e + f",
        "largest",
        "smallest above zero",
        "decimal digits",
        "counts to",
    ]
    return _table(titles, rows)


def _devices() -> str:
    """The self-tests of devices: an overview, the page of each, and what the parts check."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((DOCS / "devices").glob("*.json"))]
    overview: list[list[str]] = []
    for report in reports:
        device, results = report["device"], [row["result"] for row in report["parts"]]
        name = f"{device['count']} × {device['name']}" if device["count"] > 1 else device["name"]
        counts = [str(results.count(result)) for result in (PASSED, SKIPPED, FAILED)]
        cells = [name, ", ".join(device["native"]), report["versions"]["torch"], device.get("driver") or "-"]
        overview.append([escape_markdown(cell) for cell in (*cells, *counts, f"{report['seconds']:.0f}")])
    titles = ["device", "native", "torch", "driver", "passed", "skipped", "failed", "seconds"]
    pages = [render_markdown(build_results_page(report)).rstrip() for report in reports]
    parts = "\n".join(f"- **{part}**: {what}" for part, what in SELFTEST_PARTS.items())
    return "\n\n".join([_table(titles, overview), *pages, "## What each part checks", parts])


def _zoo() -> str:
    return "\n\n".join(_pain(pain) for pain in pains())


def _pain(pain: Pain) -> str:
    """One card of the gallery: what one sees, what halfstep does, and the code of both."""
    files = [f"[`{arm}.py`](../zoo/{pain.folder}/{arm}.py)" for arm in ("plain", "held")]
    seen, done = pain.sentence("**You see**"), pain.sentence("**halfstep**")
    return (
        f"### {pain.title}\n\n*You see* {seen}\n\n*halfstep* {done[0].lower()}{done[1:]}\n\n"
        f"{files[0]}, {files[1]}, [why]({f'../zoo/{pain.folder}/README.md'})"
    )


def _faults() -> str:
    rows = [[row["id"], row["what"], f"{row['pass']} of {row['n']}", _plain(row["worst"])] for row in _record()["rows"]]
    return _table(["row", "requirement", "held", "worst"], rows)


def _mutants() -> str:
    rows = [
        [row["mutant"], row["what"], ", ".join(row["by"]) if row["killed"] else "none"] for row in _record()["mutants"]
    ]
    return _table(["id", "defect", "detected by"], rows)


def _break_test() -> str:
    rows = json.loads((ROOT / "benchmarks" / "break_test.json").read_text(encoding="utf-8"))["rows"]
    cells = [[f"`{row['name']}`", row["what"], f"{row['held']} of {row['tried']}", row["fixed"] or "-"] for row in rows]
    notes = [f"- `{row['name']}`: {row['note']}" for row in rows if row["note"]]
    return _table(["row", "tried", "held", "found and fixed"], cells) + "\n\n" + "\n".join(notes)


def _diff(example: str) -> str:
    """Return what differs between the two files of an example; their first lines, which describe them, are left out."""
    before, after = (_code(ROOT / "examples" / example / f"{name}.py") for name in ("before", "after"))
    lines = [line for line in difflib.unified_diff(before, after, n=2, lineterm="") if line[:3] not in ("---", "+++")]
    body = "\n".join("..." if line.startswith("@@") else line for line in lines)
    return f"<!-- run: no: a difference of two files, not code -->\n```diff\n{body}\n```"


def _code(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").partition("from __future__ import annotations\n")[2].splitlines()


def _plain(worst: str) -> str:
    return re.sub(r",(?! |\d{3})", ", ", worst).replace("|", "\\|")


def _record() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DOCS / "faults.json").read_text(encoding="utf-8"))
    return read


def _table(titles: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [titles, ["---"] * len(titles), *rows])


PARTS: dict[str, Callable[[], str]] = {
    "devices": _devices,
    "gpus": _gpus,
    "formats": _formats,
    "zoo": _zoo,
    "faults": _faults,
    "mutants": _mutants,
    "break_test": _break_test,
    **{f"diff_{name}": functools.partial(_diff, name) for name in ("accelerate", "lightning", "transformers", "timm")},
}


if __name__ == "__main__":
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path in old():
        text = made()[path]
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
