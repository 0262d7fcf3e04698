"""Larger updates than the person's: how much faster samples pass, and what the optimizer would need for it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from halfstep.measure.plan.cell import INTERRUPTED
from halfstep.measure.plan.choice import wholly_above
from halfstep.measure.plan.search import Search
from halfstep.measure.setting import Setting
from halfstep.measure.timing import Speed

FACTORS = (2, 4, 8)
WARM_UP = 500
"""Updates of warm-up that a larger learning rate begins with, in a run that is long enough."""
WARM_UP_SHARE = 0.1
"""Of a run, at most."""
NOTE = "changes the optimisation: fewer and larger updates, so accuracy has to be looked at again"


@dataclass(frozen=True)
class Growth:
    """A larger batch that is faster, and how the learning rate would follow it."""

    factor: int
    setting: Setting
    speed: Speed
    """By samples, not by updates, against strict fp32 at the batch of now."""
    learning_rate: float
    rule: str
    warmup_steps: int
    note: str = NOTE

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speed": self.speed.as_dict(), "words": self.words}

    @property
    def words(self) -> str:
        """What it would change, for whoever reads only one line."""
        now = (self.setting.batch or 1) // self.factor
        return (
            f"changes the optimisation: batch {now} -> {self.setting.batch}, "
            f"learning rate {self.learning_rate:g}, {self.warmup_steps} updates of warm-up"
        )

    def within(self, updates: int) -> Growth:
        """The same for a run of so many updates, of which a warm-up is to be a small part."""
        return replace(self, warmup_steps=max(1, min(self.warmup_steps, int(WARM_UP_SHARE * updates))))


class Growing:
    """The search for a larger batch; what it has found stays when it is broken off."""

    def __init__(self) -> None:
        self.found: Growth | None = None
        self.ended = INTERRUPTED
        """Why no larger one was taken."""

    def run(self, search: Search, chosen: Setting, speed: Speed) -> None:
        """Double the batch as long as it fits and samples pass faster, beyond doubt."""
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
    """Linear for SGD, the square root for optimizers that divide by the size of gradients."""
    if optimizer.lower() == "sgd":
        return _rounded(rate * factor), f"linear scaling for SGD: {factor}x"
    return _rounded(rate * math.sqrt(factor)), f"square root scaling for {optimizer}: {math.sqrt(factor):.3g}x"


def _by_sample(speed: Speed, factor: int) -> Speed:
    return replace(speed, speedup=speed.speedup * factor, low=speed.low * factor, high=speed.high * factor)


def _rounded(rate: float) -> float:
    """To three digits: more would claim more than a rule of thumb knows."""
    return float(f"{rate:.3g}")
