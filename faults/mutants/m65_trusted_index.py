"""The labels of a cached index are taken as they are."""

from __future__ import annotations

from halfstep.data import shards

WHAT = "labels come from the cached index, and nothing compares them with the shard"
ROWS = ("F50",)


class AnyDigest(str):
    """A digest that is that of everything."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __ne__(self, other: object) -> bool:
        return False


def apply() -> None:
    shards._digest = lambda columns: AnyDigest()
    shards._checked_label = lambda content, row, name: row.label
