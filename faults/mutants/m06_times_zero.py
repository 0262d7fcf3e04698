"""A step that is to be skipped is applied with its gradients multiplied by 0: and 0 times NaN is NaN."""

from __future__ import annotations

from halfstep.step.objective import Objective
from halfstep.step.stepper import Stepper

WHAT = "a step is skipped by multiplying its gradients by 0"
ROWS = ("F06", "F15")


def apply() -> None:
    ready = Objective.ready

    def zeroed(self: Objective) -> None:
        if self.finite:
            ready(self)
            return
        for slot in self.slots:
            slot.multiplier = 0.0
            if slot.gradients.local:
                slot.gradients.multiply_(0.0)

    Objective.ready = zeroed  # type: ignore[method-assign]
    Objective.reason = lambda self: None  # type: ignore[method-assign]
    # Statistics that are not finite would skip the step as well.
    Stepper._has_bad_buffer = lambda self: False  # type: ignore[method-assign]
