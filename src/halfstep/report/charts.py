"""Lay out line charts: places of curves, ticks, skips and hover texts, in units of one SVG of a fixed size.

The size suits a phone. On a wide screen charts stand side by side instead of growing, so that their text stays legible.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from halfstep.draw.series import Numbers, thinned
from halfstep.journal import numbers

WIDTH, HEIGHT = 360.0, 200.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 8.0, 10.0, 24.0
BINS = 150
"""Bins of a curve; each keeps its least and largest number."""
HOVERS = 60
"""Columns with a text of their own on hover."""
MARKS = 90
"""Skips that can be told apart."""
FEW = 40
"""Points up to which each gets a dot."""
LOG_FROM = 50.0
"""The ratio of the largest to the smallest number from which a logarithmic axis is used."""
SMALLEST = 1e-300
"""Smaller numbers get no logarithmic axis: its low end would be zero."""
_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
Form = Callable[[float], str]
Scale = Literal["auto", "linear", "zero", "log2"]


class Curve(NamedTuple):
    """A named curve to draw."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    color: int = 0
    """The place of its color in the palette."""


class Tick(NamedTuple):
    """A place on an axis, and its label."""

    at: float
    label: str


class DrawnCurve(NamedTuple):
    """A curve in its place."""

    name: str
    points: str
    """As SVG's `polyline` takes them."""
    dots: list[tuple[float, float]]
    dashed: bool
    color: int


class Mark(NamedTuple):
    """A skip, or several that fall on one place."""

    at: float
    title: str


class Hover(NamedTuple):
    """A column that shows its text on hover."""

    left: float
    width: float
    at: float
    title: str


@dataclass(frozen=True)
class Chart:
    """A chart whose every place is known."""

    title: str
    unit: str
    lines: list[DrawnCurve]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    marks: list[Mark] = field(default_factory=list)
    hovers: list[Hover] = field(default_factory=list)
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM
    width: float = WIDTH
    height: float = HEIGHT

    @property
    def described(self) -> str:
        """Return the chart in one line, for those who cannot see it."""
        lines = ", ".join(line.name for line in self.lines)
        skips = f", {len(self.marks)} marks of skipped steps" if self.marks else ""
        return f"{self.title}: {lines}{skips}"


def line_chart(
    title: str,
    curves: Iterable[Curve],
    *,
    unit: str = "",
    form: Form = numbers.value,
    skips: Sequence[tuple[float, str]] = (),
    scale: Scale = "auto",
    x_name: str = "step",
) -> Chart | None:
    """Return the chart of these curves over attempted steps; None where there is no finite number to draw.

    The axis is logarithmic by itself where a spike would flatten the rest; "zero" makes it begin at zero.
    """
    thin = [(curve, *thinned(np.array(curve.x, float), np.array(curve.y, float), BINS)) for curve in curves]
    thin = [found for found in thin if len(found[1])]
    if not thin:
        return None
    ys = np.concatenate([y for *_, y in thin])
    last = max([*(x[-1] for _, x, _ in thin), *(at for at, _ in skips), 1.0])
    axis = Axis.fitting(ys, scale)
    # From zero: a run begins there, also one whose first steps are not in the journal.
    across = Axis(0.0, float(last))
    lines = [_line(curve, x, y, across, axis) for curve, x, y in thin]
    return Chart(
        title,
        unit,
        lines,
        [Tick(_x(across.share(at)), tick_text(at)) for at in across.ticks(5, whole=True)],
        [Tick(_y(axis.share(at)), axis.label(at)) for at in axis.ticks(5)],
        _marks(skips, across),
        _hovers(thin, across, form, x_name),
    )


def _line(curve: Curve, x: Numbers, y: Numbers, across: Axis, axis: Axis) -> DrawnCurve:
    places = [(_x(across.share(a)), _y(axis.share(b))) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    return DrawnCurve(curve.name, points, places if len(places) <= FEW else [], curve.dashed, curve.color)


def _x(share: float) -> float:
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _y(share: float) -> float:
    return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


# -- axis -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`; logarithmic where it has a base."""

    low: float
    high: float
    base: float | None = None
    step: float = 0.0
    """From one label to the next; 0 where it is chosen by their number."""

    @classmethod
    def fitting(cls, values: Numbers, scale: Scale) -> Axis:
        """Return the axis on which these finite numbers can be told apart."""
        low, high = float(values.min()), float(values.max())
        if low > SMALLEST and (scale == "log2" or (scale == "auto" and high / low > LOG_FROM)):
            return cls._logarithmic(low, high, 2.0 if scale == "log2" else 10.0)
        if scale == "zero":
            low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            around = abs(low) or 1.0
            low, high = low - around * 0.5, high + around * 0.5
        step = _nice((high - low) / 4)
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
        step = self.step or _nice((self.high - self.low) / (most - 1))
        step = max(step, 1.0) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def label(self, value: float) -> str:
        """Return a number with as many decimals as its neighbors need."""
        if self.base == 2.0:
            return f"2{str(round(math.log2(value))).translate(_RAISED)}"
        return tick_text(value, abs(self.high - self.low) if not self.base else None)


def _nice(step: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999)


def tick_text(value: float, span: float | None = None) -> str:
    """Return a number of few characters: 0.25, 1.5k, 2e-4."""
    if value == 0 or (span is not None and abs(value) < span * 1e-9):
        return "0"
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= size < 1e12:
            return f"{value / unit:.3g}{letter}"
    if 1e-4 <= size < 1e3:
        return f"{value:.3g}" if span is None or span > size * 1e-2 else f"{value:.5g}"
    digits, power = f"{value:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


# -- marks and hover --------------------------------------------------------------------------------------------------


def _marks(skips: Sequence[tuple[float, str]], across: Axis) -> list[Mark]:
    """Return a mark for every place of the axis with skips, with their steps and reasons."""
    places: dict[int, list[tuple[float, str]]] = {}
    for at, reason in skips:
        places.setdefault(int(across.share(at) * MARKS), []).append((at, reason))
    return [Mark(_x(across.share(found[0][0])), _skips_said(found)) for found in places.values()]


def _skips_said(found: list[tuple[float, str]]) -> str:
    reasons = Counter(reason.replace("_", " ") for _, reason in found)
    words = ", ".join(reason if count == 1 else f"{count:,} × {reason}" for reason, count in reasons.most_common(4))
    first, last = found[0][0], found[-1][0]
    return f"step {first:,.0f} skipped: {words}" if first == last else f"steps {first:,.0f} to {last:,.0f}: {words}"


def _hovers(thin: list[tuple[Curve, Numbers, Numbers]], across: Axis, form: Form, x_name: str) -> list[Hover]:
    """Return columns over the whole chart, each with the numbers of all curves there."""
    xs = np.unique(np.concatenate([x for _, x, _ in thin]))
    chosen = xs if len(xs) <= HOVERS else xs[np.linspace(0, len(xs) - 1, HOVERS).astype(int)]
    places = [_x(across.share(at)) for at in chosen.tolist()]
    edges = [LEFT, *((a + b) / 2 for a, b in itertools.pairwise(places)), WIDTH - RIGHT]
    hovers = []
    for n, at in enumerate(chosen.tolist()):
        words = "; ".join(f"{curve.name} {form(_at(x, y, at))}" for curve, x, y in thin if x[0] <= at)
        left, right = round(edges[n], 1), round(edges[n + 1], 1)
        hovers.append(Hover(left, round(right - left, 1), places[n], f"{x_name} {at:,.0f}: {words}"))
    return hovers


def _at(x: Numbers, y: Numbers, at: float) -> float:
    """Return the last number of a curve up to `at`."""
    return float(y[max(int(np.searchsorted(x, at, side="right")) - 1, 0)])
