"""Which failed steps are kept: a few, and of each cause the newest."""

from __future__ import annotations

import contextlib
from pathlib import Path

from halfstep.errors import HalfstepError
from halfstep.train.black_box.places import DRAFT, recorded_in
from halfstep.train.black_box.reading import read
from halfstep.train.checkpoint.commit import remove
from halfstep.train.checkpoint.disk import Disk


def retain(run: Path, keep: int, disk: Disk) -> None:
    """Remove the oldest of a cause that a newer one has too, until so many are left; one that is unreadable first."""
    found = [(path, _cause(path)) for path in recorded_in(run)]
    while len(found) > keep:
        causes = [cause for _, cause in found]
        repeated = (n for n, cause in enumerate(causes) if cause in causes[n + 1 :])
        number = causes.index(None) if None in causes else next(repeated, 0)
        path, _ = found.pop(number)
        with contextlib.suppress(OSError):
            # It loses its name first, so that nobody takes the half of it for it.
            gone = path.with_name(path.name + DRAFT)
            disk.rename(path, gone)
            remove(gone, disk)


def _cause(path: Path) -> str | None:
    try:
        return read(path).verdict.cause
    except HalfstepError:
        return None
