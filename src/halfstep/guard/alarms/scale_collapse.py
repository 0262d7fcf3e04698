"""Detect a loss scale that keeps falling: no scale helps if gradients overflow at every one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from halfstep.formats import FP32
from halfstep.step.report import GRADIENT_NOT_FINITE, GRADIENT_OVERFLOW, OptimizerReport, StepReport

FALLS = 3
"""The falls in a row after which it is worth checking whether a lower scale will help."""


class ScaleCollapse:
    """A counter of overflows of each optimizer since its last applied step."""

    def __init__(self) -> None:
        self._falls: dict[str, int] = {}
        """The falls in a row by optimizer; the scale was lower after each."""
        self._collapsed = 0

    def applied(self, report: StepReport) -> None:
        """Forget the falls of the optimizers that took this step."""
        if self._falls:
            self._falls = {name: falls for name, falls in self._falls.items() if name not in report.parts}
        self._collapsed = 0

    def skipped(self, report: StepReport, scales: Mapping[str, float]) -> bool:
        """Record a skip, and return whether the scale is on its way to a value at which gradients fit: normal.

        `scales` are the loss scales after the step. A scale that does not fall will overflow again.
        """
        spoilt = {name: part for name, part in report.parts.items() if _overflowed(part)}
        falling = {name for name, part in spoilt.items() if scales[name] < part.loss_scale}
        for name in falling:
            self._falls[name] = self._falls.get(name, 0) + 1
        # From the usual 65536 it takes sixteen skips to reach the floor of 1; the seventeenth is stuck there.
        stuck = max((self._falls.get(name, 0) for name in spoilt.keys() - falling), default=0)
        self._collapsed = stuck if report.reason == GRADIENT_NOT_FINITE and stuck >= FALLS else 0
        return report.reason == GRADIENT_OVERFLOW and falling == spoilt.keys()

    def falls(self, report: StepReport) -> int:
        """Return how often in a row the scales of this step have fallen; the maximum over its optimizers."""
        return max((self._falls.get(name, 0) for name in report.parts), default=0)

    @property
    def collapsed(self) -> bool:
        return self._collapsed > 0

    def alarm(self) -> str | None:
        """Return the alarm in words, or None."""
        if not self.collapsed:
            return None
        return f"the loss scale fell {self._collapsed} times in a row and gradients still overflow"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"falls": dict(self._falls), "collapsed": self._collapsed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict()`."""
        self._falls = {str(name): int(falls) for name, falls in state["falls"].items()}
        self._collapsed = int(state["collapsed"])


def _overflowed(part: OptimizerReport) -> bool:
    # `not <=` instead of `>`: a NaN norm is an overflow too.
    return math.isfinite(part.loss) and not part.grad_norm <= FP32.largest
