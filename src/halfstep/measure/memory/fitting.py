"""The largest batch that fits into a memory, found by ledgers: a line proposes, ledgers decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from halfstep.errors import HalfstepError
from halfstep.measure.case import Case
from halfstep.measure.memory.estimate import ledger_of
from halfstep.measure.memory.ledger import Ledger
from halfstep.measure.setting import Setting

MakeCase = Callable[[], Case]
MakeLedger = Callable[[MakeCase, Setting], Ledger]
MOST = 1 << 20
"""Nobody trains with more samples in a micro-batch; the search stops there."""
_FAR, _LINES = 64, 7
"""How many times as far a line is followed, and how often one is asked."""
PREFERRED = 8
"""Sizes of which matrix units like multiples."""


@dataclass(frozen=True)
class Fit:
    """What was found about a setting and a limit."""

    batch: int
    """The largest that fits; 0 where none does."""
    limit: int
    ledger: Ledger
    """Of that batch; of the smallest one that runs, where none fits."""
    searched: tuple[tuple[int, int], ...]
    """Every batch that a ledger was made for, with its peak, in order of size."""

    @property
    def preferred(self) -> int:
        """The largest multiple of 8 that fits; 0 where there is none."""
        return self.batch - self.batch % PREFERRED

    @property
    def missing(self) -> int:
        """Bytes by which even the smallest batch does not fit."""
        return max(0, self.ledger.peak - self.limit)

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "preferred": self.preferred,
            "at_least": self.batch >= MOST,
            "peak": self.ledger.peak,
            "missing": self.missing,
            "searched": [list(pair) for pair in self.searched],
        }


def largest_batch(make_case: MakeCase, setting: Setting, limit_bytes: int, ledger: MakeLedger = ledger_of) -> Fit:
    """The largest micro-batch whose ledger stays within the limit, the next size being over it."""
    search = _Search(make_case, setting, limit_bytes, ledger)
    start = setting.batch or search.least()
    if search.over(start):
        least = search.least()
        if search.over(least):
            return search.fit(0, least)
        low, high = least, start
    else:
        low, high = search.bracket(start)
    while high - low > 1:
        middle = search.proposed(low, high)
        low, high = (low, middle) if search.over(middle) else (middle, high)
    return search.fit(low, low)


def levers(fit: Fit, make_case: MakeCase, narrow: str, ledger: MakeLedger = ledger_of) -> list[Ledger]:
    """Where not even the smallest batch fits: what the same batch takes in another way, the gentlest way first."""
    setting = replace(fit.ledger.setting, batch=fit.ledger.samples)
    ways = [replace(setting, precision=narrow), replace(setting, recompute=True)]
    ways.append(replace(setting, precision=narrow, recompute=True))
    return [ledger(make_case, way) for way in dict.fromkeys(ways) if way != setting]


@dataclass
class _Search:
    make_case: MakeCase
    setting: Setting
    limit: int
    ledger: MakeLedger
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    lines: int = 0

    def peak(self, batch: int) -> int:
        if batch not in self.ledgers:
            self.ledgers[batch] = self.ledger(self.make_case, replace(self.setting, batch=batch))
        return self.ledgers[batch].peak

    def over(self, batch: int) -> bool:
        return self.peak(batch) > self.limit

    def least(self) -> int:
        """The smallest batch that runs: some normalisations take no single sample."""
        try:
            self.peak(1)
        except HalfstepError:
            raise
        except Exception:
            self.peak(2)
            return 2
        return 1

    def bracket(self, start: int) -> tuple[int, int]:
        """A batch that fits and a larger one that does not; or the largest that is tried, and the next."""
        low, nearby = start, min(MOST, 2 * start)
        while low < MOST:
            if self.over(nearby):
                return low, nearby
            # Small batches hide under the update, where a line would rise too slowly or not at all: never trust it far.
            proposed = min(self.line(low, nearby) + 1, _FAR * nearby) if self.trusted() else 2 * nearby
            low, nearby = nearby, min(MOST, max(nearby + 1, proposed))
        return low, low + 1

    def line(self, first: int, second: int) -> int:
        """The batch at which a line through two peaks reaches the limit."""
        slope = (self.peak(second) - self.peak(first)) / (second - first)
        return second + math.floor((self.limit - self.peak(second)) / slope) if slope > 0 else MOST

    def proposed(self, low: int, high: int) -> int:
        """Where the line crosses, or the one after it; the middle, once lines have been tried in vain."""
        crossing = self.line(low, high)
        return min(max(crossing, low + 1), high - 1) if self.trusted() else (low + high) // 2

    def trusted(self) -> bool:
        """Whether lines may still propose: a peak that is no line in the batch is halved in the end."""
        self.lines += 1
        return self.lines <= _LINES

    def fit(self, batch: int, shown: int) -> Fit:
        searched = tuple((size, ledger.peak) for size, ledger in sorted(self.ledgers.items()))
        return Fit(batch, self.limit, self.ledgers[shown], searched)
