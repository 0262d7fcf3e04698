"""Patterns of shards, such as `train-{000..003}.tar`. Imports no torch."""

from __future__ import annotations

import math
import re
from itertools import product

from halfstep.errors import BadData

MOST_SHARDS = 100_000
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def is_shard_pattern(path: str) -> bool:
    """Return whether a path stands for several."""
    return _RANGE.search(path) is not None


def expand_shard_pattern(pattern: str) -> list[str]:
    """Return the paths that a pattern stands for; raise BadData for none or too many."""
    parts = _RANGE.split(pattern)
    between, ranges = parts[::3], list(zip(parts[1::3], parts[2::3], strict=True))
    # 0 if a range is empty; infinity, without parsing, where a number is absurdly long.
    is_absurd = max(len(number) for both in ranges for number in both) > 18
    count = math.inf if is_absurd else math.prod(max(0, int(last) - int(first) + 1) for first, last in ranges)
    if not 1 <= count <= MOST_SHARDS:
        raise BadData(
            f"the pattern {pattern} counts {', '.join(f'from {first} to {last}' for first, last in ranges)}",
            allowed=f"upwards, at most {MOST_SHARDS:,} shards in all",
            do="correct data.path",
        )
    # The first number's width decides the padding, as in the shell.
    numbers = [[str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)] for first, last in ranges]
    return [
        between[0] + "".join(number + after for number, after in zip(chosen, between[1:], strict=True))
        for chosen in product(*numbers)
    ]
