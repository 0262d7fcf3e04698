"""A detector that learns from what it refused, and one that forgets what it learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.guard.alarms.spike import SpikeGuard
from halfstep.step.report import StepReport


@dataclass(frozen=True)
class Defect:
    WHAT: str
    apply: Callable[[], None]
    ROWS: tuple[str, ...] = ("F17",)


def _learns_from_spikes() -> None:
    passes = SpikeGuard.passes

    def learning(spike: SpikeGuard, report: StepReport) -> bool:
        passed = passes(spike, report)
        if not passed:
            for name, part in report.parts.items():
                spike._of(name).usual.add(part.loss)
        return passed

    SpikeGuard.passes = learning  # type: ignore[method-assign]


def _forgets() -> None:
    def forgetful(spike: SpikeGuard, state: Mapping[str, Any]) -> None:
        """Begins anew, whatever was saved."""

    SpikeGuard.load_state_dict = forgetful  # type: ignore[method-assign]


MUTANTS = {
    "M07": Defect("a rejected loss enters the statistics of normal losses", _learns_from_spikes),
    "M07-forgets": Defect("the statistics of normal losses are not restored", _forgets),
}
