"""Which image files a folder holds: sorted, and none of them outside of it."""

from __future__ import annotations

import os
from pathlib import Path

from halfstep.errors import BadData, Unsafe
from halfstep.train.data.reading import SUFFIXES

DEEPEST = 8
"""Folders within folders; more is a loop, or not a data set."""


def existing(root: str | Path, what: str) -> Path:
    """The folder, or BadData naming it."""
    folder = Path(root)
    if not folder.is_dir():
        raise BadData(
            f"{what} {folder} is {'a file' if folder.exists() else 'not there'}",
            allowed="a folder",
            do="give data.path the folder that holds your images",
        )
    return folder


def image_files(root: Path, under: str = "") -> list[str]:
    """Paths below `root` of the images in its folder `under`."""
    return files(root, SUFFIXES, under)


def files(root: Path, suffixes: tuple[str, ...], under: str = "") -> list[str]:
    """Paths below `root` of such files in its folder `under`, in sorted order; hidden ones are left out."""
    return sorted(path for path in _walk(root, under, os.path.realpath(root), 0) if path.lower().endswith(suffixes))


def folders(root: Path) -> list[str]:
    """Names of the folders in `root`, sorted; hidden ones are left out."""
    boundary = os.path.realpath(root)
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if not e.name.startswith(".") and _inside(e, boundary) and e.is_dir())


def _walk(root: Path, under: str, boundary: str, depth: int) -> list[str]:
    if depth > DEEPEST:
        raise BadData(f"{root / under} lies {depth} folders deep", allowed=f"at most {DEEPEST}", do="check for loops")
    found = []
    with os.scandir(root / under) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not _inside(entry, boundary):
                continue
            path = os.path.join(under, entry.name)
            if entry.is_dir():
                found += _walk(root, path, boundary, depth + 1)
            else:
                found.append(path)
    return found


def _inside(entry: os.DirEntry[str], boundary: str) -> bool:
    """True, or Unsafe for a link that leads out of the folder. Only links cost a look at the disk."""
    if entry.is_symlink():
        target = os.path.realpath(entry.path)
        if not (target + os.sep).startswith(boundary + os.sep):
            raise Unsafe(
                f"{entry.path} is a link to {target}",
                allowed=f"files in {boundary}",
                do="copy the file there, or move the data and its links under one folder",
            )
    return True
