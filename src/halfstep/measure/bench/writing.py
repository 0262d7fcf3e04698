"""The result of a bench as files: for programs, for people and for slides."""

from __future__ import annotations

from pathlib import Path

from halfstep.errors import MissingExtra
from halfstep.files import write_json, write_text
from halfstep.measure.bench.report import Bench


def write_report(bench: Bench, folder: Path) -> list[Path]:
    """bench.json, bench.md and, where matplotlib is installed, bench.png; gives those that were written."""
    files = {name: folder / f"bench.{name}" for name in ("json", "md", "png")}
    content = bench.as_dict()
    write_json(files["json"], content)
    write_text(files["md"], bench.markdown())
    try:
        from halfstep.draw.bars import draw_bars
    except MissingExtra:
        return [files["json"], files["md"]]
    draw_bars(content, files["png"])
    return list(files.values())
