"""An image is opened by its name, whatever is there now."""

from __future__ import annotations

from halfstep.data import recorded_files

WHAT = "an image is not compared with its state at the start of the run"
ROWS = ("F51",)


def apply() -> None:
    recorded_files.describe_file_change = lambda before, now, path: ""  # type: ignore[attr-defined]
