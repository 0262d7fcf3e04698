"""What a timeline comes to: its peak, what was alive then, and the largest that each part ever was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from halfstep.formats import FP32
from halfstep.measure.memory.ledger import PARTS
from halfstep.measure.memory.timeline import Block, Moment, Timeline


@dataclass(frozen=True)
class Reading:
    """Bytes of a stretch of a timeline, by part."""

    at_peak: dict[str, int]
    wide: dict[str, int]
    """At the peak, in fp32."""
    whole: dict[str, int]
    moment: Moment


def read(timeline: Timeline, since: int) -> Reading:
    """From the operation after `since` to the last one. What is there throughout counts throughout."""
    last = timeline.now
    blocks = [block for block in timeline.blocks if block.died > since and block.born <= min(block.died, last)]
    by_part = {part: _levels([b for b in blocks if b.part == part], since, last) for part in PARTS}
    together = [sum(levels) for levels in zip(*by_part.values(), strict=True)]
    peak = max(range(len(together)), key=together.__getitem__)
    number = since + 1 + peak
    wide = [b for b in blocks if b.born <= number <= b.died and b.format == FP32.name]
    return Reading(
        at_peak={part: levels[peak] for part, levels in by_part.items()},
        wide=_added(wide, lambda block: block.part),
        whole={part: max(levels) for part, levels in by_part.items()},
        moment=timeline.moments[number],
    )


def by_format(blocks: Iterable[Block]) -> dict[str, int]:
    """Bytes of blocks, most first."""
    return _added(blocks, lambda block: block.format)


def by_module(blocks: Iterable[Block]) -> dict[str, int]:
    """Bytes of blocks, most first."""
    return _added(blocks, lambda block: block.module)


def _added(blocks: Iterable[Block], key: Callable[[Block], str]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for block in blocks:
        sums[key(block)] += block.bytes
    return dict(sums.most_common())


def _levels(blocks: Sequence[Block], since: int, last: int) -> list[int]:
    """Bytes during each operation after `since`."""
    changes = [0] * (last - since + 1)
    for block in blocks:
        changes[max(block.born - since - 1, 0)] += block.bytes
        changes[min(block.died, last) - since] -= block.bytes
    return list(accumulate(changes[:-1]))
