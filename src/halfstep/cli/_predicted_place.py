"""The folder that predictions go to: one that can be written to, or words that say why it cannot."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path

from halfstep.cli._storing import storing


def writing(place: Path) -> AbstractContextManager[None]:
    """What the system refuses inside is told as trouble with `place`."""
    return storing(
        f"{place} cannot be written to",
        allowed="a folder that this user can write to, with room for what is predicted",
        do="give --out FOLDER, a place of your own",
    )


def check_place(place: Path) -> None:
    """Refuse what is seen to be no place before anything is computed, which may take minutes; nothing is made yet."""
    with writing(place):
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        if not there.is_dir():
            raise OSError(errno.ENOTDIR, f"{there} is a file")
        if not os.access(there, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
