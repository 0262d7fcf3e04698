"""A loss scale that falls and falls: no scale can cure what overflows at every one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from halfstep.formats import FP32
from halfstep.step.report import GRADIENT_NOT_FINITE, GRADIENT_OVERFLOW, Part, StepReport

FALLS = 3
"""In a row, from which on it is worth a look whether a lower scale will help."""


class ScaleCollapse:
    """Follows the overflows of each optimizer since its last applied step."""

    def __init__(self) -> None:
        self._falls: dict[str, int] = {}
        """In a row, the scale lower after each, by optimizer."""
        self._collapsed = 0

    def applied(self, report: StepReport) -> None:
        if self._falls:
            self._falls = {name: falls for name, falls in self._falls.items() if name not in report.parts}
        self._collapsed = 0

    def skipped(self, report: StepReport, scales: Mapping[str, float]) -> bool:
        """Whether the skip is the scale on its way to where gradients fit, which is normal.

        `scales`: what they are after the step. One that stays where it is will overflow again.
        """
        spoilt = {name: part for name, part in report.parts.items() if _overflowed(part)}
        falling = {name for name, part in spoilt.items() if scales[name] < part.loss_scale}
        for name in falling:
            self._falls[name] = self._falls.get(name, 0) + 1
        # From the usual 65536 it takes sixteen skips to get to the floor of 1, and the seventeenth is this one.
        stuck = max((self._falls.get(name, 0) for name in spoilt.keys() - falling), default=0)
        self._collapsed = stuck if report.reason == GRADIENT_NOT_FINITE and stuck >= FALLS else 0
        return report.reason == GRADIENT_OVERFLOW and falling == spoilt.keys()

    def falls(self, report: StepReport) -> int:
        """How often in a row the scales of this step have fallen; the most of them."""
        return max((self._falls.get(name, 0) for name in report.parts), default=0)

    @property
    def collapsed(self) -> bool:
        return self._collapsed > 0

    def alarm(self) -> str | None:
        if not self.collapsed:
            return None
        return f"the loss scale fell {self._collapsed} times in a row and gradients still overflow"

    def state_dict(self) -> dict[str, Any]:
        return {"falls": dict(self._falls), "collapsed": self._collapsed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._falls = {str(name): int(falls) for name, falls in state["falls"].items()}
        self._collapsed = int(state["collapsed"])


def _overflowed(part: Part) -> bool:
    return math.isfinite(part.loss) and not part.grad_norm <= FP32.largest
