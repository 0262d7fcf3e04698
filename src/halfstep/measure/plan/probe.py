"""A short look at whether a setting trains as strict fp32 does: the losses of the very updates that were timed.

Every arm begins with the same weights and takes its updates on the same batch, so these losses cost no time. It is a
smoke test: it finds a format that overflows, stalls or drifts within some twenty updates. What only shows after
thousands of them, and accuracy on data that was not trained on, is for `halfstep bench` to prove.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

UPDATES = 20
FEWEST = 4
"""Updates below which nothing is said."""
MARGIN = 0.02
YARDSTICK = 3.0
"""Times as far apart as two fp32 runs may be: nobody can ask for more than fp32 gives itself."""
NUDGE = 1e-3
"""The share by which the weights of the second fp32 run begin elsewhere."""


@dataclass(frozen=True)
class Parity:
    """How the losses of a setting lie beside those of strict fp32."""

    verdict: Literal["holds", "fails", "not probed"]
    why: str
    updates: int = 0
    fp32: float | None = None
    """Mean loss over the last quarter of the updates."""
    chosen: float | None = None
    difference: float | None = None
    """As a share of fp32's."""
    margin: float = MARGIN
    spread: float | None = None
    """How far a second fp32 run lay from the first, as a share; None where it was not needed."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(fp32: Sequence[float], other: Sequence[float], spread: float | None = None) -> Parity:
    """Whether losses are finite, and at the end as far down as fp32's."""
    broken = next((number for number, loss in enumerate(other, 1) if not math.isfinite(loss)), None)
    if broken is not None:
        return Parity("fails", f"the loss of update {broken} is {other[broken - 1]}", len(other))
    updates = min(len(fp32), len(other), UPDATES)
    if updates < FEWEST:
        return Parity("not probed", f"{updates} updates were applied, and {FEWEST} are needed", updates)
    if not all(math.isfinite(loss) for loss in fp32[:updates]):
        return Parity("not probed", "the loss of strict fp32 itself is not finite", updates)
    ours, theirs = _end(fp32[:updates]), _end(other[:updates])
    difference = apart(fp32[:updates], other[:updates])
    margin = max(MARGIN, YARDSTICK * (spread or 0.0))
    holds = difference <= margin
    words = f"loss {theirs:.4g} against fp32's {ours:.4g} after {updates} updates, {difference:.2%} apart"
    why = f"{words}, {'within' if holds else 'more than'} {margin:.2%}"
    return Parity("holds" if holds else "fails", why, updates, ours, theirs, difference, margin, spread)


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """How far the ends of two runs differ, as a share of the first's."""
    updates = min(len(one), len(other))
    ours, theirs = _end(one[:updates]), _end(other[:updates])
    gap = abs(ours - theirs)
    return gap / abs(ours) if ours else (math.inf if gap else 0.0)


def _end(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 4) :])
