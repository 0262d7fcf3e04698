"""A loss scale that falls and falls: no scale can cure what overflows at every one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfstep.step.report import GRADIENT_NOT_FINITE, GRADIENT_OVERFLOW, StepReport


class ScaleCollapse:
    """Follows the overflows of one streak."""

    def __init__(self) -> None:
        self.overflows = 0
        """In a row, the scale falling with each."""
        self._scales: list[float] = []
        self.collapsed = False

    def applied(self) -> None:
        if self.overflows:
            self.overflows, self._scales, self.collapsed = 0, [], False

    def skipped(self, report: StepReport) -> bool:
        """Whether the skip is the scale on its way to where gradients fit, which is normal."""
        scales = [part.loss_scale for part in report.parts.values()]
        falling = report.reason == GRADIENT_OVERFLOW and scales != self._scales
        if falling:
            self.overflows += 1
            self._scales = scales
        # From the usual 65536 it takes sixteen skips to get to the floor of 1, and the seventeenth is this one.
        self.collapsed = report.reason == GRADIENT_NOT_FINITE and self.overflows >= 3
        return falling

    def alarm(self) -> str | None:
        if not self.collapsed:
            return None
        return f"the loss scale fell {self.overflows} times in a row and gradients still overflow"

    def state_dict(self) -> dict[str, Any]:
        return {"overflows": self.overflows, "scales": list(self._scales), "collapsed": self.collapsed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.overflows, self.collapsed = int(state["overflows"]), bool(state["collapsed"])
        self._scales = [float(scale) for scale in state["scales"]]
