"""Larger updates than the user's: their throughput, and the learning rate that they need."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from halfstep.measure.plan.choice import INTERRUPTED, wholly_above
from halfstep.measure.plan.search import Search
from halfstep.measure.setting import StepSetting
from halfstep.measure.timing import Speed

FACTORS = (2, 4, 8)
WARM_UP = 500
"""Warm-up updates before a larger learning rate, in a run that is long enough."""
WARM_UP_SHARE = 0.1
"""The largest share of a run that warm-up may take."""
NOTE = "changes the optimisation: fewer and larger updates, so accuracy has to be looked at again"


@dataclass(frozen=True)
class Growth:
    """A larger batch with higher throughput, and the learning rate for it."""

    factor: int
    setting: StepSetting
    speed: Speed
    """Throughput in samples, not updates, relative to strict fp32 at the current batch."""
    learning_rate: float
    rule: str
    warmup_steps: int
    note: str = NOTE

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speed": self.speed.as_dict(), "words": self.words}

    @property
    def words(self) -> str:
        """Return what it would change, in one line."""
        now = (self.setting.batch or 1) // self.factor
        return (
            f"changes the optimisation: batch {now} -> {self.setting.batch}, "
            f"learning rate {self.learning_rate:g}, {self.warmup_steps} updates of warm-up"
        )

    def within(self, updates: int) -> Growth:
        """Return the same for a run of `updates`, with the warm-up limited to a small part of it."""
        return replace(self, warmup_steps=max(1, min(self.warmup_steps, int(WARM_UP_SHARE * updates))))


class Growing:
    """The search for a larger batch; its result is kept if it is interrupted."""

    def __init__(self) -> None:
        self.found: Growth | None = None
        self.ended = INTERRUPTED
        """Why no larger batch was accepted."""

    def run(self, search: Search, chosen: StepSetting, speed: Speed) -> None:
        """Double the batch while it fits and the throughput rises beyond its interval."""
        best = speed
        for factor in FACTORS:
            setting = replace(chosen, batch=(chosen.batch or 1) * factor)
            cell = search.measure_larger(setting)
            if cell.speed is None or cell.cut:
                self.ended = f"{setting.batch} samples: {cell.cut}"
                return
            by_sample = _by_sample(cell.speed, factor)
            if not wholly_above(by_sample, best):
                self.ended = f"{setting.batch} samples gained nothing beyond doubt: {by_sample.speedup:.2f}x by samples"
                return
            rate, rule = scaled_rate(search.facts.optimizer, search.facts.learning_rate, factor)
            self.found, best = Growth(factor, setting, by_sample, rate, rule, WARM_UP), by_sample
        self.ended = f"larger ones than {FACTORS[-1]}x were not tried"


def scaled_rate(optimizer: str, rate: float, factor: int) -> tuple[float, str]:
    """Return the scaled learning rate and its rule: linear for SGD, square root for adaptive optimizers."""
    if optimizer.lower() == "sgd":
        return _rounded(rate * factor), f"linear scaling for SGD: {factor}x"
    return _rounded(rate * math.sqrt(factor)), f"square root scaling for {optimizer}: {math.sqrt(factor):.3g}x"


def _by_sample(speed: Speed, factor: int) -> Speed:
    return replace(speed, speedup=speed.speedup * factor, low=speed.low * factor, high=speed.high * factor)


def _rounded(rate: float) -> float:
    """Return the learning rate with three digits; more would suggest more accuracy than a rule of thumb has."""
    return float(f"{rate:.3g}")
