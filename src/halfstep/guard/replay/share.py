"""One optimizer's loss in a rerun: weighed as in the step, micro-batch by micro-batch."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from halfstep import world
from halfstep.precision.precision import widen
from halfstep.step.attempt import Factor


class Share:
    """What the micro-batches of one loss add up to."""

    def __init__(self, factor: Factor, microbatches: int, scale: float | None) -> None:
        self._microbatches, self._base = microbatches, factor.base
        self.scale = factor.scale if scale is None else scale
        self.totals: list[Tensor] = []
        self.count: float | None = None
        """Of a loss that is (sum, count)."""

    def weighed(self, given: Any) -> Tensor:
        """What backward runs on."""
        loss, count = given if isinstance(given, tuple) else (given, None)
        value = widen(loss)
        self.totals.append(value.detach())
        divide: float = self._microbatches
        if count is not None:
            self.count = (self.count or 0.0) + float(count)
            divide = self._divisor(float(count))
        ready = value if divide == 1 else value / divide
        return ready if self.scale == 1.0 else ready * self.scale

    def _divisor(self, count: float) -> float:
        """That of the step, or in the first step of a run what it found there; kept for all micro-batches."""
        if self._base is None:
            # The step asked the other processes. One of them may fail here, and must not leave us waiting.
            everywhere = count * self._microbatches * world.size()
            if not 0.0 < everywhere < math.inf:
                return 1.0
            self._base = everywhere
        return self._base

    @property
    def counts_nothing(self) -> bool:
        return self.count is not None and not self.count > 0.0

    @property
    def mean(self) -> float:
        """The loss as a report has it; of no element there is none."""
        if self.counts_nothing:
            return math.nan
        total = sum(float(total.item()) for total in self.totals)
        return total / (len(self.totals) if self.count is None else self.count)

    @property
    def unscale(self) -> float:
        """What makes gradients of the mean out of those that backward left."""
        if self.count is None or self.counts_nothing:
            return 1.0 / self.scale
        return (self._base or 1.0) / self.count / self.scale
