"""A shard is opened by its name, whatever is there now."""

from __future__ import annotations

from halfstep.data import shards

WHAT = "an open shard is not compared with its index"
ROWS = ("F51",)


def apply() -> None:
    shards.describe_file_change = lambda before, now, path: ""  # type: ignore[attr-defined]
