"""A step that went wrong, with all that is known about it and all that is needed to run it again."""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.guard.verdict import Verdict
from halfstep.step.attempt import Attempt
from halfstep.step.report import StepReport


@dataclass(frozen=True)
class History:
    """The run before it, from numbers that every process has alike."""

    losses: tuple[float, ...] = ()
    """Of applied steps, the newest last."""
    grad_norms: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    """Learning rates of these steps."""


@dataclass(frozen=True)
class Trouble:
    """What a black box keeps of a step."""

    attempt: Attempt
    report: StepReport
    precision: str
    islands: tuple[str, ...]
    history: History
    verdict: Verdict
