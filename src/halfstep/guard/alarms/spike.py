"""A loss far above what is usual: one bad batch, or the first sign that weights were damaged.

What is usual comes from accepted steps alone, so that what was refused can never raise the limit. Small batches have
heavy tails, and a run that has nearly learnt its data has the heaviest: so the limit also respects the largest losses
of the last few hundred steps, and no loss is refused that is small beside the first ones of the run.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from typing import Any

from halfstep.step.report import GUARD, Part, StepReport

NAME = "spike"
REFUSED = GUARD + NAME
WINDOW = 50
BEGIN = 20
"""Accepted losses before any is refused."""
MEDIANS, SPREADS, TALLEST, FIRST = 8.0, 6.0, 4.0, 0.3
"""How far above the median a loss must be: in medians, in spreads (from the median to the ninth tenth), in heights of
the tallest loss that is remembered, and in medians of the first losses; each of them."""
FORGETS = 0.5 ** (1 / 70)
"""The tallest loss is half forgotten after 70 steps."""


class Usual:
    """The accepted losses of one optimizer."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque()
        self._sorted: list[float] = []
        self._tallest = -math.inf
        self._first: float | None = None

    @property
    def median(self) -> float:
        return self._sorted[len(self._sorted) // 2]

    @property
    def limit(self) -> float:
        """The largest loss that is accepted."""
        if self._first is None:
            return math.inf
        ordered = self._sorted
        median = ordered[len(ordered) // 2]
        spread = ordered[len(ordered) * 9 // 10] - median
        tallest = self._tallest - median
        return median + max(MEDIANS * abs(median), SPREADS * spread, TALLEST * tallest, FIRST * self._first)

    def add(self, loss: float) -> None:
        if len(self._losses) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._losses.popleft())]
        self._losses.append(loss)
        insort(self._sorted, loss)
        median = self.median
        if self._first is not None:
            self._tallest = median + (self._tallest - median) * FORGETS
        elif len(self._losses) == BEGIN:
            self._first = abs(median)
        if loss > self._tallest:
            self._tallest = loss

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "tallest": self._tallest, "first": self._first}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Usual:
        usual = cls()
        usual._losses = deque(float(loss) for loss in plain["losses"])
        usual._sorted = sorted(usual._losses)
        usual._tallest = float(plain["tallest"])
        usual._first = None if plain["first"] is None else float(plain["first"])
        return usual


class Spike:
    """Refuses a finite loss that is far above those before it. Each optimizer's losses are looked at by themselves."""

    name = NAME

    def __init__(self) -> None:
        self._usual: dict[str, Usual] = {}

    def passes(self, report: StepReport) -> bool:
        if any(part.loss > self._of(name).limit for name, part in report.parts.items()):
            return False
        for name, part in report.parts.items():
            self._of(name).add(part.loss)
        return True

    def words(self, report: StepReport) -> str:
        """How far above the usual a refused loss was."""
        name, part = max(report.parts.items(), key=self._excess)
        median = self._of(name).median
        of = "" if len(self._usual) == 1 else f" of {name}"
        times = f"{part.loss / median:,.0f} times " if median > 0 else "far above "
        return f"the loss{of} is {part.loss:.4g}, {times}the median of the steps before ({median:.4g})"

    def _of(self, name: str) -> Usual:
        usual = self._usual.get(name)
        if usual is None:
            usual = self._usual[name] = Usual()
        return usual

    def _excess(self, item: tuple[str, Part]) -> float:
        return item[1].loss - self._of(item[0]).limit

    def state_dict(self) -> dict[str, Any]:
        return {name: usual.state_dict() for name, usual in self._usual.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._usual = {name: Usual.from_dict(plain) for name, plain in state.items()}
