"""Where a recipe's data lies."""

from __future__ import annotations

from pathlib import Path

from halfstep.errors import BadData
from halfstep.files import cache_folder

PREFIX = "cache:"


def data_place(path: str) -> Path:
    """The path; `cache:NAME` is the folder that `scripts/data NAME` makes."""
    if not path.startswith(PREFIX):
        return Path(path).expanduser()
    name, _, below = path.removeprefix(PREFIX).partition("/")
    parts = [name, *Path(below).parts]
    if not name or ".." in parts or name.startswith(("/", "\\", ".")) or Path(below).is_absolute():
        raise BadData(f"the path {path!r}", allowed="cache:NAME or cache:NAME/FOLDER", do="write cache:cifar10")
    folder = cache_folder() / "data" / name
    if not folder.is_dir():
        raise BadData(
            f"the data set {name!r} is not in {folder.parent}",
            allowed="a data set that was made before",
            do=f"run scripts/data {name}",
        )
    return folder.joinpath(below)
