"""The learning rate moves on though the step was skipped."""

from __future__ import annotations

from typing import Any

from halfstep.step.report import StepReport
from halfstep.step.stepper import Stepper

WHAT = "the schedule advances with skipped updates"
ROWS = ("F13",)


def apply() -> None:
    step = Stepper.step

    def moving(self: Stepper, *given: Any, **more: Any) -> StepReport:
        report = step(self, *given, **more)
        if not report.applied:
            for slot in self._slots.values():
                if slot.schedule is not None:
                    slot.schedule.step()
        return report

    Stepper.step = moving  # type: ignore[method-assign]
