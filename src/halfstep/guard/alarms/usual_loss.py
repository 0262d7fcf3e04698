"""Learn the usual losses of one optimizer, and the limit above which a loss is a spike, in log space.

Losses live on a logarithmic scale: over a run they fall by decades, and the noise of small batches is multiplicative.
So distances are ratios if all losses are positive. If some are zero or negative (a critic, a likelihood, a hinge),
ratios do not exist, and the inverse hyperbolic sine replaces the logarithm: it is logarithmic for values much larger
than the usual losses, and linear for values much smaller.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from halfstep.errors import StateMismatch

WINDOW = 50
_TOGETHER = 8
"""The losses that are learned together, where each of them is usual in any case."""
BEGIN = 20
"""The number of losses before any is judged."""
RATIO, SIGNED_RATIO = math.log(10.0), math.log(30.0)
"""The minimum distance of a spike above the median, in log space; the second if ratios do not exist."""
SPREADS = 3.0
"""The minimum distance in multiples of the distance from the median to the 90th percentile."""
TALLEST = math.log(3.0)
"""The minimum distance above the tallest loss that is remembered."""
FORGETS = 0.5 ** (1 / 150)
"""The decay per step of the tallest loss: half of its height above the median is forgotten after 150 steps."""
FIRST = 3.0
"""The minimum height of a spike in medians of the first losses.

A run that has nearly learned its data has losses close to zero, and now and then a larger one of a hard sample.
"""
FAR = 1000.0
"""The ratio to the first losses above which a slow rise is reported."""


class RecentLosses:
    """The newest losses of one optimizer; `limit` is the largest that counts as usual."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque()
        # A sorted copy of the queue, so that the median and the percentile need no sort in every step.
        self._sorted: list[float] = []
        self._decayed_max = -math.inf
        self._first_losses: list[float] = []
        """The first losses that are not exactly zero: nothing can be compared with zero."""
        self.first = 0.0
        """The median of their absolute values; 0 until it is known."""
        self._highest_median = 0.0
        """The largest median that lasted for a whole window; the first losses until then."""
        self._waiting: list[float] = []
        self.surely_usual = -math.inf
        """The loss up to which the next ones are usual, and no rise to report, regardless of those that wait."""

    @property
    def median(self) -> float:
        return self._sorted[len(self._sorted) // 2]

    @property
    def limit(self) -> float:
        """Return the largest usual loss; infinity until enough losses are known."""
        if not self.first:
            return math.inf
        zero = self._zero()
        middle = _compute_log_height(self.median, zero)
        spread = _compute_log_height(self._sorted[len(self._sorted) * 9 // 10], zero) - middle
        least = SIGNED_RATIO if zero else RATIO
        height = max(least, SPREADS * spread, _compute_log_height(self._decayed_max, zero) - middle + TALLEST)
        return max(_invert_log(middle + height, zero), self.median + FIRST * self.first if zero else FIRST * self.first)

    def logs(self, losses: Iterable[float]) -> list[float]:
        """Return losses above the limit in log space, in which they are compared."""
        zero = self._zero()
        return [_compute_log_height(loss, zero) for loss in losses]

    def is_far(self, loss: float, times: float = FAR) -> bool:
        """Return whether a loss is more than `times` the highest level that this run has had."""
        return loss - self.median > times * self._highest_median

    @property
    def has_risen(self) -> bool:
        """Return whether the usual losses are far above the first ones, however slowly they rose."""
        return len(self._losses) == WINDOW and 0.0 < FAR * self.first < self.median

    def add(self, loss: float) -> None:
        """Learn a loss."""
        if len(self._losses) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._losses.popleft())]
        self._losses.append(loss)
        insort(self._sorted, loss)
        if not self.first:
            self._begin(loss)
        else:
            self._forget()
        if len(self._losses) == WINDOW:
            self._highest_median = max(self._highest_median, abs(self.median))
        self._decayed_max = max(self._decayed_max, loss)

    def add_later(self, loss: float) -> None:
        """Learn a positive loss of at most `surely_usual`, together with the next ones.

        Until `learn` is called, nothing else here knows of it.
        """
        self._waiting.append(loss)
        if len(self._waiting) == _TOGETHER:
            self.learn()

    def learn(self) -> None:
        """Learn the losses that wait."""
        waiting, self._waiting = self._waiting, []
        for loss in waiting:
            self.add(loss)
        self.surely_usual = self._find_surely_usual()

    def _find_surely_usual(self) -> float:
        # Each loss moves the median by at most one place. The limit is at least ten medians if all are positive.
        middle = WINDOW // 2
        if len(self._losses) < WINDOW or not self.first or not self._sorted[0] > 0.0:
            return -math.inf
        if self._sorted[middle + _TOGETHER] >= FAR * self.first:
            return -math.inf
        return 0.999 * math.exp(RATIO) * self._sorted[middle - _TOGETHER]

    def begin_anew(self, level: Sequence[float]) -> None:
        """Replace the usual losses with these."""
        self._losses, self._sorted, self._decayed_max = deque(), [], -math.inf
        for loss in level:
            self.add(loss)

    def _begin(self, loss: float) -> None:
        if loss == 0.0:
            return
        self._first_losses.append(abs(loss))
        if len(self._first_losses) == BEGIN:
            self.first = self._highest_median = sorted(self._first_losses)[BEGIN // 2]
            self._first_losses = []

    def _forget(self) -> None:
        if self._decayed_max <= self.median:
            return
        zero = self._zero()
        middle = _compute_log_height(self.median, zero)
        self._decayed_max = _invert_log(
            middle + (_compute_log_height(self._decayed_max, zero) - middle) * FORGETS, zero
        )

    def _zero(self) -> float:
        """Return the scale below which losses are compared linearly; 0 if all are positive."""
        if self._sorted[0] > 0.0:
            return 0.0
        sizes = sorted(abs(loss) for loss in self._sorted)
        return sizes[len(sizes) // 2] or self.first or sizes[-1] or 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        self.learn()
        kept = {"first_losses": list(self._first_losses), "first": self.first, "highest_median": self._highest_median}
        return {"losses": list(self._losses), "decayed_max": self._decayed_max, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; raise StateMismatch for a state of another version."""
        check_saved_keys(self.state_dict(), state)
        self._losses = deque(float(loss) for loss in state["losses"])
        self._sorted = sorted(self._losses)
        self._decayed_max, self._highest_median = float(state["decayed_max"]), float(state["highest_median"])
        self._first_losses = [float(loss) for loss in state["first_losses"]]
        self.first = float(state["first"])


def check_saved_keys(own: Collection[str], given: Collection[str]) -> None:
    """Raise StateMismatch if a saved state has other keys than this version's own."""
    if set(given) != set(own):
        raise StateMismatch(
            f"a spike guard's state with {', '.join(sorted(given)) or 'nothing'}: from another version",
            allowed=", ".join(own),
            do=f"continue without the guard's state: the usual losses are learned again in {BEGIN} steps",
        )


def _compute_log_height(loss: float, zero: float) -> float:
    if zero:
        return math.asinh(loss / zero)
    return math.log(loss) if loss > 0.0 else -math.inf


def _invert_log(height: float, zero: float) -> float:
    try:
        return zero * math.sinh(height) if zero else math.exp(height)
    except OverflowError:
        # sinh and exp overflow for a height above about 710; such a limit is never reached.
        return math.inf
