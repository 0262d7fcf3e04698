"""Files are compared by their sizes alone."""

from __future__ import annotations

from pathlib import Path

from halfstep.checkpoint import reading
from halfstep.checkpoint.sealed import SealedFile

WHAT = "content has no digest: any file of the right size is accepted"
ROWS = ("F25",)


def apply() -> None:
    def by_size(folder: Path, sealed: SealedFile) -> str | None:
        try:
            size = (folder / sealed.name).stat().st_size
        except OSError as error:
            return str(error)
        return None if size == sealed.size else "another size"

    reading.find_file_defect = by_size  # type: ignore[attr-defined]
