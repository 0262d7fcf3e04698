"""The axis of a chart: its ends, its ticks and their labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.numbers import format_scientific

LOG_FROM = 50.0
"""The ratio of the largest to the smallest number from which a logarithmic axis is used."""
SMALLEST = 1e-300
"""Smaller numbers get no logarithmic axis: its low end would be zero."""
_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`; logarithmic where it has a base."""

    low: float
    high: float
    base: float | None = None
    step: float = 0.0
    """From one label to the next; 0 if it is chosen by their number."""

    @classmethod
    def fitting(cls, values: Sequence[float], scale: str = "linear") -> Axis:
        """Return the axis on which these finite numbers are distinguishable; `scale` as in `Curves`."""
        low, high = min(values), max(values)
        if low > SMALLEST and (scale == "log2" or (scale == "auto" and high / low > LOG_FROM)):
            return cls._logarithmic(low, high, 2.0 if scale == "log2" else 10.0)
        if scale in ("zero", "share"):
            low, high = min(low, 0.0), max(high, 1.0 if scale == "share" else 0.0)
        if low == high:
            around = abs(low) or 1.0
            low, high = low - around * 0.5, high + around * 0.5
        step = _round_up_step((high - low) / 4)
        return cls(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, None, step)

    @classmethod
    def _logarithmic(cls, low: float, high: float, base: float) -> Axis:
        first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
        if first == last:
            first, last = first - 1, last + 1
        return cls(base**first, base**last, base)

    def share(self, value: float) -> float:
        """Return the place of a number, 0 at the low end and 1 at the high one."""
        if self.base:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def ticks(self, most: int, *, whole: bool = False) -> list[float]:
        """Return up to about `most` numbers for labels; with `whole`, no fractions."""
        if self.base:
            low, high = (round(math.log(end, self.base)) for end in (self.low, self.high))
            return [self.base**power for power in range(low, high + 1, math.ceil((high - low + 1) / most))]
        step = self.step or _round_up_step((self.high - self.low) / (most - 1))
        step = max(math.ceil(step), 1.0) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def label(self, value: float) -> str:
        """Return a number with as many decimals as its neighbors need."""
        if self.base == 2.0:
            return f"2{str(round(math.log2(value))).translate(_RAISED)}"
        return format_tick(value, abs(self.high - self.low) if not self.base else None)


def _round_up_step(step: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999)


def format_tick(value: float, span: float | None = None) -> str:
    """Return a number of few characters: 0.25, 1.5k, 2e-4."""
    if value == 0 or (span is not None and abs(value) < span * 1e-9):
        return "0"
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= size < 1e12:
            return f"{value / unit:.3g}{letter}"
    if 1e-4 <= size < 1e3:
        return f"{value:.3g}" if span is None or span > size * 1e-2 else f"{value:.5g}"
    return format_scientific(value)
