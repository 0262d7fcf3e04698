"""Larger updates than the person's: how much faster samples pass, and what the optimizer would need for it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from halfstep.measure.plan.choice import wholly_above
from halfstep.measure.plan.search import Search
from halfstep.measure.setting import Setting
from halfstep.measure.timing import Speed

FACTORS = (2, 4, 8)
WARM_UP = 500
"""Updates of warm-up that a larger learning rate begins with."""
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
        return {**asdict(self), "speed": self.speed.as_dict()}


def grow(search: Search, chosen: Setting, speed: Speed) -> Growth | None:
    """Double the batch as long as it fits and samples pass faster, beyond doubt; None where it never does."""
    found, best = None, speed
    for factor in FACTORS:
        setting = replace(chosen, batch=(chosen.batch or 1) * factor)
        measured = search.measure_larger(setting).speed
        if measured is None or not wholly_above(by_sample := _by_sample(measured, factor), best):
            break
        rate, rule = scaled_rate(search.facts.optimizer, search.facts.learning_rate, factor)
        found, best = Growth(factor, setting, by_sample, rate, rule, WARM_UP), by_sample
    return found


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
