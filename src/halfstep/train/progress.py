"""How far a run is, what was best, and whether to stop: all of it small enough to be saved with every checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Progress:
    """The place of a run in its data, and its best evaluation so far."""

    epoch: int = 0
    """Epochs completed."""
    in_epoch: int = 0
    """Windows of the current epoch that were attempted."""
    attempts: int = 0
    best: float | None = None
    best_epoch: int = 0
    stale: int = 0
    """Evaluations since the best one."""
    quarantined: list[int] = field(default_factory=list)
    """Training samples with numbers that are not finite; others stand in for them since this epoch began."""
    suspected: list[int] = field(default_factory=list)
    """Those found in this epoch. Workers read ahead, so only its end is the same place for all of them."""

    def begin_epoch(self) -> set[int]:
        """The samples that are left out from now on: all that were found."""
        self.quarantined, self.suspected = sorted({*self.quarantined, *self.suspected}), []
        return set(self.quarantined)

    def judge(self, value: float, epoch: int, *, higher: bool, margin: float) -> bool:
        """Whether an evaluation is the best so far. What is not a number never is."""
        gain = math.inf if self.best is None else (value - self.best if higher else self.best - value)
        better = math.isfinite(value) and gain > margin
        if better:
            self.best, self.best_epoch, self.stale = value, epoch, 0
        else:
            self.stale += 1
        return better
