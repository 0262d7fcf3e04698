"""What ends a plan: strict fp32 that does not train, so that nothing can be compared with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfstep.errors import WrongUse
from halfstep.measure.process import ArmFailed


def fails_in_fp32(name: str, error: ArmFailed) -> WrongUse:
    return WrongUse(
        f"{name} does not train in strict fp32: {error}",
        allowed="a case or recipe whose step runs, again and again",
        do="mend it first: nothing can be compared with a step that fails",
    )


def no_step_in_time(name: str, seconds: float) -> WrongUse:
    return WrongUse(
        f"{name} took no step in strict fp32 within the {seconds:g} s of the plan",
        allowed="time for at least a few steps; opening the case counts, too",
        do=f"give --seconds {60 * math.ceil(seconds / 20):.0f}, or a smaller batch",
    )


def refuse_broken_fp32(name: str, trail: Sequence[float]) -> None:
    """Steps that are not a number, or that are never applied, have a speed that means nothing."""
    broken = next((number for number, loss in enumerate(trail, 1) if not math.isfinite(loss)), None)
    if broken is None and trail:
        return
    found = f"the loss is {trail[broken - 1]} at update {broken}" if broken else "no update was applied"
    raise WrongUse(
        f"{name} does not train in strict fp32: {found}",
        allowed="finite losses and gradients in strict fp32: speeds of other steps mean nothing",
        do="look at the data for values that are not finite, and at the learning rate, which may be too large",
    )
