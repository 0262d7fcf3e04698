"""The result of a bench as files: for programs, for people and for slides."""

from __future__ import annotations

import os
from pathlib import Path

from halfstep.errors import FolderTaken, MissingExtra
from halfstep.files import read_json, write_json, write_text
from halfstep.measure.bench.report import Bench


def check_folder(folder: Path, name: str) -> None:
    """Refuse, before anything runs, where a report could not be written or would replace that of another subject."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "which may not be written" if nearest.is_dir() else "which is a file"
        raise FolderTaken(f"{nearest}, {what}", allowed="a folder, or a place for a new one", do="--out NEW")
    earlier = read_json(folder / "bench.json")
    if isinstance(earlier, dict) and earlier.get("name", name) != name:
        raise FolderTaken(
            f"{folder}, which has a bench of {earlier['name']}", allowed="a folder for each bench", do="--out NEW"
        )


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
