"""The folder that predictions go to: one that can be written to, or words that say why it cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.errors import StorageFailed


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """What the system refuses inside is told as trouble with `place`."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"{place} cannot be written to: {error.strerror or error}",
            allowed="a folder that this user can write to, with room for what is predicted",
            do="give --out FOLDER, a place of your own",
        ) from None


def check_place(place: Path) -> None:
    """Refuse what is seen to be no place before anything is computed, which may take minutes; nothing is made yet."""
    with writing(place):
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        if not there.is_dir():
            raise OSError(errno.ENOTDIR, f"{there} is a file")
        if not os.access(there, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
