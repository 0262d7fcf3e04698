"""Check briefly whether a setting trains as strict fp32 does, by the losses of the updates that were timed.

Every candidate starts with the same weights and repeats the same batch. All are compared after the same number of
updates, by the same rule, with the spread of strict fp32 runs that start with slightly different weights: differences
within that spread are chance. This is a smoke test: it finds a format that overflows, stalls or drifts within about
twenty updates. Effects after thousands of updates, and accuracy on unseen data, are for `halfstep bench`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

UPDATES, FEWEST = 20, 8
"""The number of updates after which losses are compared, and the smallest number for a verdict."""
MARGIN = 0.02
UNSTEADY = 0.05
"""The largest relative spread of fp32 for which so short a check gives a verdict."""
NUDGE = 1e-3
"""Relative perturbation of the initial weights of the other fp32 runs."""
FEWEST_RUNS, ENOUGH_RUNS = 2, 4
"""The fewest other fp32 runs for a verdict, and the number for which their spread is well known."""
YARDSTICK = {2: 10.0, 3: 5.0}
"""Multiples of the spread that make the margin, by number of runs: few runs may lie close together by chance."""
WELL_KNOWN = 3.0
"""The same multiple for more runs."""
SHARE_OF_TIME = 0.15
"""Share of a plan's time for the first of these runs."""

Verdict = Literal["holds", "fails", "can't tell"]


@dataclass(frozen=True)
class Noise:
    """The spread of strict fp32 runs."""

    runs: int
    """Number of runs after the first."""
    spread: float
    """Relative difference of the final losses of the two runs that are furthest apart."""

    @property
    def margin(self) -> float:
        """Return the relative difference from fp32 above which parity fails."""
        return max(MARGIN, YARDSTICK.get(self.runs, WELL_KNOWN) * self.spread)

    def is_too_little_for(self, difference: float | None) -> bool:
        """Return whether more runs might confirm that such a difference is not chance."""
        surely = max(MARGIN, WELL_KNOWN * self.spread)
        return self.runs < ENOUGH_RUNS and difference is not None and difference > surely


@dataclass(frozen=True)
class LossParity:
    """The losses of a setting compared with those of strict fp32."""

    verdict: Verdict
    why: str
    updates: int = 0
    fp32: float | None = None
    """Mean loss over the last quarter of the updates."""
    chosen: float | None = None
    difference: float | None = None
    """Difference relative to fp32's loss."""
    margin: float | None = None
    """The difference above which parity fails; None if unknown."""
    spread: float | None = None
    """Relative spread of the strict fp32 runs; None without other runs."""
    runs: int = 0
    """Number of other fp32 runs."""


def choose_update_count(seconds: float, opening: float, update: float) -> int:
    """Return after how many updates the candidates of a plan are compared; 0 if there is too little time."""
    # From the time alone, so that all candidates are compared after the same number of updates.
    for_each = SHARE_OF_TIME * seconds / FEWEST_RUNS - opening
    affordable = int(min(UPDATES, max(0.0, for_each) / max(update, 1e-9)))
    return affordable if affordable >= FEWEST else 0


def compute_fp32_noise(fp32: Sequence[float], others: Sequence[Sequence[float]], updates: int) -> Noise | None:
    """Return the spread of the fp32 runs, without incomplete ones; None with too few runs or a non-finite loss."""
    whole = [run[:updates] for run in others if len(run) >= updates]
    if len(fp32) < updates or not updates or not all(map(math.isfinite, [loss for run in whole for loss in run])):
        return None
    apart_by = [compute_loss_difference(one, other) for one, other in combinations([fp32[:updates], *whole], 2)]
    return Noise(len(whole), max(apart_by)) if len(whole) >= FEWEST_RUNS else None


def compare_losses(fp32: Sequence[float], other: Sequence[float], noise: Noise | None, updates: int) -> LossParity:
    """Return whether the losses are finite and, after `updates`, as low as fp32's."""
    certain = _decide_without_comparison(fp32, other, updates)
    if certain is not None:
        return certain
    ours, theirs = _average_final_losses(fp32[:updates]), _average_final_losses(other[:updates])
    difference = compute_loss_difference(fp32[:updates], other[:updates])
    words = f"loss {theirs:.4g} against fp32's {ours:.4g} after {updates} updates, {difference:.2%} apart"
    found = (updates, ours, theirs, difference)
    if noise is None:
        return LossParity("can't tell", f"{words}; the spread of fp32 itself was not measured", *found)
    verdict, why = _judge_difference(difference, noise)
    return LossParity(verdict, f"{words}{why}", *found, noise.margin, noise.spread, noise.runs)


def _decide_without_comparison(fp32: Sequence[float], other: Sequence[float], updates: int) -> LossParity | None:
    """Return a verdict that needs no comparison, or allows none; else None."""
    # First: a non-finite loss fails even if there was no time for anything else.
    broken = next((number for number, loss in enumerate(other, 1) if not math.isfinite(loss)), None)
    if broken is not None:
        return LossParity("fails", f"the loss of update {broken} is {other[broken - 1]}", len(other))
    if not other:
        return LossParity("fails", "no update was applied")
    if not updates:
        return LossParity("can't tell", f"there was no time for {FEWEST_RUNS} more fp32 runs of {FEWEST} updates")
    if not all(map(math.isfinite, fp32[:updates])):
        return LossParity("can't tell", "the loss of strict fp32 itself is not finite")
    seen = min(len(fp32), len(other))
    if seen < updates:
        return LossParity("can't tell", f"{seen} of {updates} updates were applied", seen)
    return None


def _judge_difference(difference: float, noise: Noise) -> tuple[Verdict, str]:
    itself = f"{noise.runs + 1} fp32 runs lie up to {noise.spread:.2%} apart"
    if difference > noise.margin:
        return "fails", f", more than {noise.margin:.2%}; {itself}"
    if noise.spread > UNSTEADY:
        return "can't tell", f"; but {itself} themselves"
    if difference <= max(MARGIN, noise.spread):
        return "holds", f", within {max(MARGIN, noise.spread):.2%}; {itself}"
    return "can't tell", f"; {itself}, and {noise.margin:.2%} would be too far"


def compute_loss_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the relative difference of the final losses of two runs."""
    updates = min(len(one), len(other))
    ours, theirs = _average_final_losses(one[:updates]), _average_final_losses(other[:updates])
    gap = abs(ours - theirs)
    # A loss of exactly 0 has no relative difference.
    return gap / abs(ours) if ours else (math.inf if gap else 0.0)


# The last quarter is averaged because single losses are noisy.
def _average_final_losses(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 4) :])
