"""A loss far above what is usual: one bad batch, or the first sign that weights were damaged.

What is usual comes from accepted steps alone, so that one that was refused does not raise the limit. Small batches
have heavy tails, and a run that has nearly learnt its data has the heaviest: so the limit also respects the largest
losses of the last few hundred steps, and no loss is refused that is small beside the first ones of the run.

New data or layers that are unfrozen give a new level: losses that are refused again and again, lie close together and
are not beyond what the run began with. Those are accepted; weights that were blown up have far larger losses.
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
PATIENCE = 4
"""Losses in a row that are refused before the next one may be a new level."""
TOGETHER, GROWS, BEYOND = 4.0, 1.5, 10.0
"""A level: so many times the smallest at most, the second half not so many times the first, and so many times the
first losses of the run at most."""
FORGETS = 0.5 ** (1 / 70)
"""The tallest loss is half forgotten after 70 steps."""


class Usual:
    """The accepted losses of one optimizer."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque()
        self._sorted: list[float] = []
        self._tallest = -math.inf
        self._beginning: list[float] = []
        """The first losses that are not exactly zero: nothing can be compared with nothing."""
        self._first: float | None = None
        self._refused: list[float] = []
        """Since the last accepted one, the newest few."""

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
        reference = abs(median) or self._first
        return median + max(MEDIANS * reference, SPREADS * spread, TALLEST * tallest, FIRST * self._first)

    def is_new_level(self, loss: float) -> bool:
        """Whether a loss above the limit, with those refused before it, is what will be usual from now on."""
        level = [*self._refused, loss]
        half = len(level) // 2
        return (
            len(self._refused) == PATIENCE
            and max(level) <= BEYOND * (self._first or 0.0)
            and 0.0 < max(level) <= TOGETHER * min(level)
            and sum(level[-half:]) <= GROWS * sum(level[:half])
        )

    def refuse(self, loss: float) -> None:
        self._refused = [*self._refused, loss][-PATIENCE:]

    def begin_anew(self) -> None:
        """From the losses that were refused: they are the usual now."""
        level, self._refused = self._refused, []
        self._losses, self._sorted, self._tallest = deque(), [], -math.inf
        for loss in level:
            self.add(loss)

    def add(self, loss: float) -> None:
        if self._refused:
            self._refused = []
        if len(self._losses) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._losses.popleft())]
        self._losses.append(loss)
        insort(self._sorted, loss)
        median = self.median
        if self._first is not None:
            self._tallest = median + (self._tallest - median) * FORGETS
        elif loss != 0.0:
            self._beginning.append(abs(loss))
            if len(self._beginning) == BEGIN:
                self._first, self._beginning = sorted(self._beginning)[BEGIN // 2], []
        if loss > self._tallest:
            self._tallest = loss

    def state_dict(self) -> dict[str, Any]:
        kept = {"beginning": list(self._beginning), "refused": list(self._refused)}
        return {"losses": list(self._losses), "tallest": self._tallest, "first": self._first, **kept}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Usual:
        usual = cls()
        usual._losses = deque(float(loss) for loss in plain["losses"])
        usual._sorted = sorted(usual._losses)
        usual._tallest = float(plain["tallest"])
        usual._beginning = [float(loss) for loss in plain["beginning"]]
        usual._refused = [float(loss) for loss in plain["refused"]]
        usual._first = None if plain["first"] is None else float(plain["first"])
        return usual


class Spike:
    """Refuses a finite loss that is far above those before it. Each optimizer's losses are looked at by themselves."""

    name = NAME

    def __init__(self) -> None:
        self._usual: dict[str, Usual] = {}
        self.new_level = ""
        """In words, where this step's loss was accepted because it is the new usual."""

    def passes(self, report: StepReport) -> bool:
        self.new_level = ""
        above = {name: part.loss for name, part in report.parts.items() if part.loss > self._of(name).limit}
        if above and not self._accepts(above, report):
            for name, loss in above.items():
                self._of(name).refuse(loss)
            return False
        for name, part in report.parts.items():
            self._of(name).add(part.loss)
        return True

    def _accepts(self, above: Mapping[str, float], report: StepReport) -> bool:
        if not all(self._of(name).is_new_level(loss) for name, loss in above.items()):
            return False
        self.new_level = self.words(report)
        for name in above:
            self._of(name).begin_anew()
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
