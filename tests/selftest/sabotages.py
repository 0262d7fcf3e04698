"""Defects put into halfstep from outside, none into the self-test itself: each must make a part fail.

A sabotage gets a function that replaces an attribute: pytest's in this process, plain `setattr` in one of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Replace = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Sabotage:
    part: str
    """The part that must fail."""
    says: str
    """A piece of what it must say."""
    apply: Callable[[Replace], None]
    here: bool = True
    """Whether this process can run it; others need the part's own processes."""


def rollback_disabled(replace: Replace) -> None:
    from halfstep.step.rollback import Rollback

    replace(Rollback, "restore", lambda self: None)


def error_swallowed(replace: Replace) -> None:
    from halfstep.step.rollback import Rollback
    from halfstep.step.stepper import Stepper

    real, failing = Rollback.restore, []
    fail = Stepper._fail
    replace(Stepper, "_fail", lambda self, error: (failing.append(error), fail(self, error))[1])
    # After a skip it restores, after an error it does not.
    replace(Rollback, "restore", lambda self: None if failing else real(self))


def scale_left_in(replace: Replace) -> None:
    from halfstep.step.loss import LossSlot

    real = LossSlot.read

    def read(self: Any, *numbers: Any, **named: Any) -> None:
        real(self, *numbers, **named)
        self.factor *= 2.0

    replace(LossSlot, "read", read)


def scale_never_falls(replace: Replace) -> None:
    from halfstep.step.loss import DynamicScale

    replace(DynamicScale, "update", lambda self, *, overflow: None)


def driver_crashes(replace: Replace) -> None:
    from halfstep.step.loss import DynamicScale

    # As a driver does: no exception, no exit code of Python's.
    replace(DynamicScale, "update", lambda self, *, overflow: os.abort())


def autocast_off(replace: Replace) -> None:
    from halfstep.precision.precision import Precision

    replace(Precision, "autocast", lambda self, device: contextlib.nullcontext())


def autocast_off_unseen(replace: Replace) -> None:
    from halfstep.observe.flops import Observation

    autocast_off(replace)
    replace(Observation, "as_asked", True)
    replace(Observation, "share", 1.0)


def kernel_missing(replace: Replace) -> None:
    from halfstep.precision import probe

    real = probe._run_forward_backward

    def failing(operation: Any, values: Any, weight: Any, where: Any, precision: Any) -> Any:
        if precision.casts and weight.ndim == 4:
            raise RuntimeError("no kernel image is available for execution on the device")
        return real(operation, values, weight, where, precision)

    replace(probe, "_run_forward_backward", failing)


def estimate_doubled(replace: Replace) -> None:
    from halfstep.measure.memory.ledger import Ledger

    real = Ledger.peak.fget
    replace(Ledger, "peak", property(lambda self: 2 * real(self)))


def slow_step(replace: Replace) -> None:
    from halfstep.step.rollback import Rollback

    real = Rollback.remember

    def remember(self: Any) -> None:
        real(self)
        time.sleep(0.2)

    replace(Rollback, "remember", remember)


def another_blamed(replace: Replace) -> None:
    from halfstep.observe import nonfinite_origin

    # The last operation that had anything to do with it, as a print of the loss would blame.
    replace(nonfinite_origin, "_find_first_origin", lambda ends: max(ends, key=lambda made: made.order, default=None))


def weights_rounded(replace: Replace) -> None:
    from halfstep.step.optimizer_slot import OptimizerSlot

    real = OptimizerSlot.apply

    def apply(self: Any) -> None:
        real(self)
        with torch.no_grad():
            for parameter in self.gradients.parameters:
                # Of those in 16 bits alone: fp32 is what it is compared with.
                if getattr(parameter, "_narrow", False):
                    parameter.copy_(parameter.bfloat16().float())

    from halfstep.step.stepper import Stepper

    begin = Stepper.__init__

    def __init__(self: Any, model: Any, *given: Any, **named: Any) -> None:
        begin(self, model, *given, **named)
        for parameter in model.parameters():
            parameter._narrow = self.precision.casts

    replace(Stepper, "__init__", __init__)
    replace(OptimizerSlot, "apply", apply)


def slowest_chosen(replace: Replace) -> None:
    from halfstep.measure.plan import search

    def slowest(cells: Any, **_: Any) -> Any:
        return min(cells, key=lambda cell: cell.speed.speedup if cell.speed else math.inf)

    replace(search, "choose", slowest)


def stale_optimizer(replace: Replace) -> None:
    from halfstep.step.optimizer_slot import OptimizerSlot

    def load_state_dict(self: Any, state: Any) -> None:
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])

    replace(OptimizerSlot, "load_state_dict", load_state_dict)


def vote_ignored(replace: Replace) -> None:
    from halfstep.step.ranks import Ranks

    real = Ranks.agree

    def agree(self: Any, numbers: Any) -> Any:
        real(self, numbers)  # the collective takes place, and nobody listens
        return numbers.double() * self.size

    replace(Ranks, "agree", agree)


ALL = {
    "rollback disabled": Sabotage("transaction", "a skipped step moved Sequential", rollback_disabled),
    "nothing taken back after an error": Sabotage("transaction", "ended in an error moved", error_swallowed),
    "loss scale left in the update": Sabotage("scale", "differs from fp32's by", scale_left_in),
    "loss scale that never falls": Sabotage("scale", "instead of", scale_never_falls),
    "the driver crashes": Sabotage("scale", "the process of this part died", driver_crashes, here=False),
    "autocast silently fp32": Sabotage("observed", "bf16 was requested", autocast_off),
    "autocast silently fp32, unseen": Sabotage("observed", "output was torch.float32", autocast_off_unseen),
    "a format without a kernel": Sabotage("probe", "bf16 is native here, but conv2d failed", kernel_missing),
    "estimate off by two": Sabotage("memory", "more than a factor of 1.25 apart", estimate_doubled),
    "a slow step": Sabotage("overhead", "times as long as one written by hand", slow_step),
    "another operation blamed": Sabotage("replay", "aten.mul was planted in middle.planted", another_blamed),
    "weights rounded to 16 bits": Sabotage("parity", "worse", weights_rounded),
    "the slowest setting chosen": Sabotage("plan", "is not faster than fp32", slowest_chosen, here=False),
    "stale optimizer state": Sabotage("resume", "steps are not 16", stale_optimizer),
    "one rank's vote ignored": Sabotage("ranks", "window ended as", vote_ignored, here=False),
}
