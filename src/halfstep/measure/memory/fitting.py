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
_LINES = 7
"""How often a line is asked before sizes are halved."""
PREFERRED = 8
"""Sizes of which matrix units like multiples."""
_FIXED = ("weights", "buffers", "average", "optimizer")
"""What no batch changes, and what is there throughout."""


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
    next_is_over: bool = True
    """Whether a ledger says that one sample more does not fit."""

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
            "about": not self.next_is_over and 0 < self.batch < MOST,
            "peak": self.ledger.peak,
            "missing": self.missing,
            "searched": [list(pair) for pair in self.searched],
        }


def largest_batch(
    make_case: MakeCase, setting: Setting, limit_bytes: int, ledger: MakeLedger = ledger_of, *, tolerance: float = 0.0
) -> Fit:
    """The largest micro-batch whose ledger stays within the limit, the next size being over it.

    Where each ledger takes long, a `tolerance` ends the search at a batch that fits, as soon as no more than that share
    of it is expected to lie between it and the end.
    """
    search = _Search(make_case, setting, limit_bytes, ledger, tolerance)
    low, high = setting.batch or search.least(), MOST + 1
    if search.over(low):
        low, high = search.least(), low
        if search.over(low):
            return search.fit(0, low)
    while high - low > 1 and not search.near(low):
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
    tolerance: float
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
        except Exception as first:  # a person's code may raise anything
            try:
                self.peak(2)
            except Exception:
                raise first from None
            return 2
        return 1

    def near(self, low: int) -> bool:
        """Whether the end is expected so near to a batch that fits that it is not worth another ledger."""
        if not self.tolerance or len(self.ledgers) == 1:
            return False
        return self.crossing() - low <= self.tolerance * low

    def proposed(self, low: int, high: int) -> int:
        """Where a line reaches the limit; the middle, or twice as much, once lines have been tried in vain."""
        self.lines += 1
        if self.lines > _LINES:
            return min(2 * low, MOST) if high > MOST > low else (low + high) // 2
        crossing = self.crossing()
        if self.tolerance:
            crossing -= int(crossing * self.tolerance / 2)  # on the side that fits, where the search can end
        elif high > MOST and len(self.ledgers) > 1:
            crossing += 1  # to have an end, beyond which nothing is to be sought
        return min(max(crossing, low + 1), high - 1)

    def crossing(self) -> int:
        """The batch at which a line through what is known is expected to reach the limit."""
        near = sorted(self.ledgers, key=lambda size: abs(self.peak(size) - self.limit))
        if len(near) == 1:
            return self._by_activations(self.ledgers[near[0]])
        if len(near) == 2:  # the smaller may hide under the update, where nothing grows: from what is always there
            return _line(0, self._fixed, max(near), self.peak(max(near)), self.limit)
        first, second = near[:2]
        return _line(first, self.peak(first), second, self.peak(second), self.limit)

    def _by_activations(self, ledger: Ledger) -> int:
        """From one ledger, whose peak may be the update's: activations are what grows."""
        return _line(0, self._fixed, ledger.samples, self._fixed + ledger.whole["activations"], self.limit)

    @property
    def _fixed(self) -> int:
        ledger = next(iter(self.ledgers.values()))
        return sum(ledger.whole.get(part, 0) for part in _FIXED)

    def fit(self, batch: int, shown: int) -> Fit:
        searched = tuple((size, ledger.peak) for size, ledger in sorted(self.ledgers.items()))
        ended = batch + 1 in self.ledgers and self.over(batch + 1)
        return Fit(batch, self.limit, self.ledgers[shown], searched, ended)


def _line(first: int, low: int, second: int, high: int, limit: int) -> int:
    """Where a line through two peaks reaches the limit."""
    slope = (high - low) / (second - first)
    return min(MOST, second + math.floor((limit - high) / slope)) if slope > 0 else MOST
