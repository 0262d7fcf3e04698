"""The events of the guardian as plain data; the caller decides where they go."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from halfstep.guard.verdict import Verdict
from halfstep.step.report import StepReport
from halfstep.step.step_inputs import StepInputs

Kind = Literal["verdict", "remedy", "alarm", "probation"]
Level = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class GuardEvent:
    """One event: a cause was found, a remedy was placed or lifted, or an alarm was raised."""

    kind: Kind
    level: Level
    text: str
    """The message for users; the verdict comes first."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The same as data."""

    def as_dict(self) -> dict[str, Any]:
        """Return the event as plain data."""
        return asdict(self)


def warn(told: GuardEvent) -> None:
    """Emit an event as a Python warning, unless it is only information; used if there is no other listener."""
    if told.level != "info":
        warnings.warn(told.text, stacklevel=4)


# -- trouble ----------------------------------------------------------------------------------------------------------
# A failed step, with everything that is known about it and everything that is needed to run it again.


@dataclass(frozen=True)
class History:
    """The applied steps before a failed one, from numbers that all ranks share."""

    losses: tuple[float, ...] = ()
    """The losses of applied steps, the newest last."""
    grad_norms: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    """The learning rates of these steps."""


@dataclass(frozen=True)
class FailedStep:
    """The record of a failed step, for a replay."""

    attempt: StepInputs
    report: StepReport
    precision: str
    islands: tuple[str, ...]
    history: History
    verdict: Verdict
