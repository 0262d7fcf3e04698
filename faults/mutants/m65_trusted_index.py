"""The labels of an index are taken as they are."""

from __future__ import annotations

from halfstep.data.shard_index import ShardIndex
from halfstep.data.shards import Shards

WHAT = "labels come from the cached index, and are not compared with the shard"
ROWS = ("F50",)


def apply() -> None:
    ShardIndex._verify = lambda self, shard, page: None  # type: ignore[method-assign]
    Shards._check_label = lambda self, content, index: self.index.row(index).label  # type: ignore[method-assign]
