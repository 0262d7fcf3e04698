"""The number of ranks alone decides whether a resume is exact."""

from __future__ import annotations

from halfstep.train import resume

WHAT = "a resume with copies instead of shards is called exact"
ROWS = ("F54",)


def apply() -> None:
    resume._count_live_shards = lambda model: 1
    resume._count_saved_shards = lambda chunks: 1
