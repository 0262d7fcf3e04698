"""The samples of a shard as columns, which every scanner gives and an index keeps. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PARQUET = ".parquet"
LARGEST_LABEL = 1_000_000
"""A larger label is a date or an id: the model would have an output for every number below it."""
NONE = -1
MASK_PERSON = b"halfstep mask"
Column = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ShardRows:
    """The samples of a shard in order, as columns; -1 for what a sample does not have."""

    size_of_shard: int
    image: Column
    image_size: Column
    label: Column
    place: Column
    """The position of each sample, a hash of its name: the upper half of `layout.place_of`."""
    digest: Column
    mask: Column
    mask_size: Column
    label_at: Column

    def __len__(self) -> int:
        return len(self.image)
