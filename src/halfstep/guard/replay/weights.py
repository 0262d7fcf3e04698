"""What the weights and the numbers of the steps before say about a run that leaves its path."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from torch import nn

from halfstep.guard.replay.deed import number
from halfstep.guard.replay.trials import Outcome
from halfstep.guard.trouble import History
from halfstep.observe.finite import all_finite, largest_finite
from halfstep.observe.recorder import as_written

FAR = 1e3
"""A loss or a norm is far from those before where it is this many times their median."""
LEARNT = 1e-4
"""A loss below this is as good as 0: a task that is nearly learnt may jump from there by any factor."""


def strayed(fp32: Outcome, history: History) -> str:
    """How far even fp32 is from the steps before; empty where it is not."""
    # One loss is enough to be a thousand times smaller. Norms of the first steps may be small for good reasons.
    for what, now, before, enough, learnt in (
        ("loss", fp32.loss, history.losses, 1, LEARNT),
        ("gradient norm", fp32.grad_norm, history.grad_norms, 5, math.sqrt(LEARNT)),
    ):
        usual = _median(before, enough)
        if usual is not None and abs(now) > FAR * max(usual, _first(before), learnt):
            return f"fp32 is finite, but its {what} is {number(now)}, where the median before is {number(usual)}"
    return ""


def weight_evidence(model: nn.Module) -> str:
    """The first weight that is not finite, or else the largest number of all weights."""
    largest, name = 0.0, ""
    for path, weight in model.named_parameters():
        if not all_finite(weight):
            return f"weight {as_written(path)} is not finite"
        if (size := largest_finite(weight)) > largest:
            largest, name = size, as_written(path)
    return f"the largest weight is {number(largest)}, in {name}" if name else "all weights are 0"


def rate_evidence(history: History) -> tuple[str, ...]:
    found = []
    if history.rates:
        found.append(f"the learning rate is {history.rates[-1]:.3g}")
    if len(history.losses) > 1:
        first, last = number(history.losses[0]), number(history.losses[-1])
        found.append(f"the loss went from {first} to {last} in {len(history.losses)} steps")
    return tuple(found)


def _median(values: Sequence[float], enough: int) -> float | None:
    usable = [abs(value) for value in values if math.isfinite(value)]
    usual = statistics.median(usable) if len(usable) >= enough else 0.0
    return usual or None


def _first(values: Sequence[float]) -> float:
    return next((abs(value) for value in values if math.isfinite(value)), 0.0)
