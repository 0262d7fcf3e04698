"""What one step says about itself, and the one seam where others may look before the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

LOSS_NOT_FINITE = "loss_not_finite"
"""The loss itself is NaN or inf. The loss scale is held: lowering it could not have helped."""
GRADIENT_OVERFLOW = "gradient_overflow"
"""A scaled gradient is not finite, and the scale is above its floor: a lower scale may cure it."""
GRADIENT_NOT_FINITE = "gradient_not_finite"
"""A gradient is not finite, and no loss scale can be blamed for it."""
GUARD = "guard:"
"""Followed by the name of the guard that refused the update."""


class Part(NamedTuple):
    """One optimizer's share of a step."""

    loss: float
    grad_norm: float
    """Over the optimizer's parameters, unscaled, before clipping."""
    loss_scale: float
    """The scale that this step's backward ran with."""


class StepReport(NamedTuple):
    """One attempted update. Plain numbers: everything that had to be read from the device has been read."""

    step: int
    """Updates applied so far, this one included."""
    attempt: int
    """Updates attempted so far, this one included."""
    applied: bool
    reason: str | None
    """Why the step was skipped: one of the reasons above, or None."""
    finite: bool
    loss: float
    """Over all micro-batches and all processes; the sum of the losses where there are several."""
    grad_norm: float
    loss_scale: float
    parts: Mapping[str, Part]
    """The same by optimizer name."""

    def __str__(self) -> str:
        what = f"step {self.step} applied" if self.applied else f"skipped: {self.reason}"
        scale = "" if self.loss_scale == 1.0 else f", loss scale {self.loss_scale:g}"
        return f"attempt {self.attempt}: {what}, loss {self.loss:.6g}, gradient norm {self.grad_norm:.4g}{scale}"


class Guard(Protocol):
    """Looks at a step that would be applied, and may refuse it.

    It sees numbers that all processes agree on and must decide from them alone, so that all of them decide alike; the
    report is the one that applying would give.
    """

    name: str

    def passes(self, report: StepReport) -> bool: ...
