"""A JPEG is decoded, however many scans it has."""

from __future__ import annotations

from halfstep.data import image_files

WHAT = "the scans of a JPEG are not counted"
ROWS = ("F52",)


def apply() -> None:
    image_files.MOST_SCANS = 10**9
