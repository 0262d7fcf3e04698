"""Find the largest batch that fits: linear interpolation proposes sizes, ledgers decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from halfstep.errors import HalfstepError
from halfstep.json_data import JsonResult
from halfstep.measure.memory.estimate import estimate_ledger
from halfstep.measure.memory.fake_tensors import MakeCase
from halfstep.measure.memory.ledger import Ledger
from halfstep.measure.setting import StepSetting

MakeLedger = Callable[[MakeCase, StepSetting], Ledger]
MOST = 1 << 20
"""Upper limit of the search; larger micro-batches are not used in training."""
_LINES = 7
"""Number of linear proposals before the search falls back to bisection."""
PREFERRED = 8
"""Matrix units are fastest with multiples of this size."""
_FIXED = ("weights", "buffers", "average", "optimizer")
"""Parts that no batch size changes and that exist throughout."""


@dataclass(frozen=True)
class Lever:
    """Another way to run the smallest batch."""

    precision: str
    recompute: bool
    peak: int
    fits: bool


@dataclass(frozen=True)
class BatchFit(JsonResult):
    """The result of a search for one setting and limit."""

    json_keys: ClassVar[tuple[str, ...]] = (
        *("precision", "recompute", "batch", "preferred", "at_least", "about", "ledger.peak", "missing", "searched"),
        *("smallest", "levers"),
    )
    batch: int
    """The largest batch that fits; 0 if none does."""
    limit: int
    ledger: Ledger
    """The ledger of that batch; of the smallest batch that runs, if none fits."""
    searched: tuple[tuple[int, int], ...]
    """Every batch for which a ledger was made, with its peak, in order of size."""
    next_is_over: bool = True
    """Whether a ledger shows that one more sample does not fit."""
    levers: tuple[Lever, ...] = ()
    """Ways to run the smallest batch, where no batch fits."""

    @property
    def precision(self) -> str:
        return self.ledger.setting.precision

    @property
    def recompute(self) -> bool:
        return self.ledger.setting.recompute

    @property
    def at_least(self) -> bool:
        """Return whether the search ended at its upper limit."""
        return self.batch >= MOST

    @property
    def about(self) -> bool:
        """Return whether a larger batch may fit."""
        return not self.next_is_over and 0 < self.batch < MOST

    @property
    def smallest(self) -> int:
        """Return the smallest batch that runs, where none fits."""
        return self.ledger.samples

    @property
    def preferred(self) -> int:
        """Return the largest multiple of 8 that fits; 0 if there is none."""
        return self.batch - self.batch % PREFERRED

    @property
    def missing(self) -> int:
        """Return the bytes by which the smallest batch exceeds the limit."""
        return max(0, self.ledger.peak - self.limit)


def find_largest_batch(
    make_case: MakeCase,
    setting: StepSetting,
    limit_bytes: int,
    ledger: MakeLedger = estimate_ledger,
    *,
    tolerance: float = 0.0,
) -> BatchFit:
    """Return the largest micro-batch whose ledger is within the limit while the next size exceeds it.

    For slow ledgers, `tolerance` ends the search at a batch that fits once the limit is expected within that share of
    it.
    """
    search = _BatchSearch(make_case, setting, limit_bytes, ledger, tolerance)
    low, high = setting.batch or search.least(), MOST + 1
    if search.over(low):
        low, high = search.least(), low
        if search.over(low):
            return search.fit(0, low)
    while high - low > 1 and not search.is_near_limit(low):
        middle = search.proposed(low, high)
        low, high = (low, middle) if search.over(middle) else (middle, high)
    return search.fit(low, low)


def estimate_lever_ledgers(
    fit: BatchFit, make_case: MakeCase, narrow: str, ledger: MakeLedger = estimate_ledger
) -> list[Ledger]:
    """Return ledgers of the smallest batch in a narrower precision, with recomputing, and with both."""
    setting = replace(fit.ledger.setting, batch=fit.ledger.samples)
    ways = [replace(setting, precision=narrow), replace(setting, recompute=True)]
    ways.append(replace(setting, precision=narrow, recompute=True))
    return [ledger(make_case, way) for way in dict.fromkeys(ways) if way != setting]


@dataclass
class _BatchSearch:
    make_case: MakeCase
    setting: StepSetting
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
        """Return the smallest batch that runs: some normalizations reject a single sample."""
        try:
            self.peak(1)
        except HalfstepError:
            raise
        except Exception as first:  # the user's code may raise anything
            try:
                self.peak(2)
            except Exception:
                # Two samples fail as well, so the size is not the cause: the first error is shown.
                raise first from None
            return 2
        return 1

    def is_near_limit(self, low: int) -> bool:
        """Return whether the limit is expected so close to a batch that fits that another ledger is not worthwhile."""
        if not self.tolerance or len(self.ledgers) == 1:
            return False
        return self.crossing() - low <= self.tolerance * low

    def proposed(self, low: int, high: int) -> int:
        """Return where a line reaches the limit; after `_LINES` proposals, the middle or twice the size."""
        self.lines += 1
        if self.lines > _LINES:
            return min(2 * low, MOST) if high > MOST > low else (low + high) // 2
        crossing = self.crossing()
        if self.tolerance:
            crossing -= int(crossing * self.tolerance / 2)  # below the crossing, where the search can end
        elif high > MOST and len(self.ledgers) > 1:
            crossing += 1  # overshoot once, to get an upper bound
        return min(max(crossing, low + 1), high - 1)

    def crossing(self) -> int:
        """Return the batch at which a line through the known peaks is expected to reach the limit."""
        near = sorted(self.ledgers, key=lambda size: abs(self.peak(size) - self.limit))
        if len(near) == 1:
            return self._extrapolate_activations(self.ledgers[near[0]])
        if len(near) == 2:  # the smaller peak may be the update's, which does not grow: use the fixed parts
            return _extrapolate_batch(0, self._fixed, max(near), self.peak(max(near)), self.limit)
        first, second = near[:2]
        return _extrapolate_batch(first, self.peak(first), second, self.peak(second), self.limit)

    def _extrapolate_activations(self, ledger: Ledger) -> int:
        """Extrapolate from one ledger by its activations, because its peak may be that of the update."""
        return _extrapolate_batch(0, self._fixed, ledger.samples, self._fixed + ledger.whole["activations"], self.limit)

    @property
    def _fixed(self) -> int:
        ledger = next(iter(self.ledgers.values()))
        return sum(ledger.whole.get(part, 0) for part in _FIXED)

    def fit(self, batch: int, shown: int) -> BatchFit:
        searched = tuple((size, ledger.peak) for size, ledger in sorted(self.ledgers.items()))
        ended = batch + 1 in self.ledgers and self.over(batch + 1)
        return BatchFit(batch, self.limit, self.ledgers[shown], searched, ended)


def _extrapolate_batch(first: int, low: int, second: int, high: int, limit: int) -> int:
    """Return where a line through two peaks reaches the limit."""
    slope = (high - low) / (second - first)
    return min(MOST, second + math.floor((limit - high) / slope)) if slope > 0 else MOST
