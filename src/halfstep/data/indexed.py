"""Find the indexed samples that a source reads, without loading shards where there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfstep.data.dataset import Source
    from halfstep.data.shards import Shards


def find_shards(source: Source) -> Shards | None:
    """Return the indexed samples that a source reads; None for a source without an index."""
    if source.chosen is None:
        return None
    from halfstep.data.shards import Shards

    return base if isinstance(base := source.base, Shards) else None
