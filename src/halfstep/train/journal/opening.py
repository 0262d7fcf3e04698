"""A file of a run's folder that cannot be written: one error, whoever found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.errors import FolderTaken


@contextmanager
def to_write(path: Path) -> Iterator[None]:
    """Around whatever opens or changes `path`; its folder is there inside."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as failure:
        raise FolderTaken(
            f"cannot write {path}: {failure.strerror or failure}",
            allowed="a run folder that can be written to",
            do="choose another one with run.dir=FOLDER",
        ) from failure
