"""Losses that are usual in any case are learned eight at a time: no judgment and no state may differ for it."""

from __future__ import annotations

import math
import random

import pytest

from halfstep.guard.alarms.spike import SpikeGuard
from halfstep.step.report import OptimizerReport, StepReport


class OneByOne(SpikeGuard):
    """The guard that learns each loss at once."""

    def passes(self, report: StepReport) -> bool:
        for watched in self._watched.values():
            watched.usual.surely_usual = -math.inf
        return super().passes(report)


def report(attempt: int, loss: float) -> StepReport:
    parts = {"default": OptimizerReport(loss, 1.0, 1.0)}
    return StepReport(attempt, attempt, True, None, True, loss, 1.0, 1.0, parts)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("refuses", [False, True])
def test_the_same_notices_and_the_same_state(seed: int, refuses: bool) -> None:
    chosen = random.Random(seed)
    guards = SpikeGuard(refuses=refuses), OneByOne(refuses=refuses)
    level, drift, saved = 1.0, chosen.choice([0.97, 1.0, 1.02, 1.05, 1.2]), 0
    together = 0
    for attempt in range(1, 600):
        level *= drift
        loss = level * math.exp(chosen.gauss(0.0, chosen.choice([0.1, 0.1, 0.8])))
        if chosen.random() < 0.02:
            loss *= chosen.choice([30.0, 1e4, -1.0, 0.0])
        one, other = (guard.passes(report(attempt, loss)) for guard in guards)
        assert one == other
        assert guards[0].notices == guards[1].notices
        assert (guards[0].open, guards[0].diverges) == (guards[1].open, guards[1].diverges)
        together += any(watched.usual._waiting for watched in guards[0]._watched.values())
        if chosen.random() < 0.02:
            saved += 1
            assert guards[0].state_dict() == guards[1].state_dict()
        if chosen.random() < 0.005:
            for guard in guards:
                guard.rewound()
    assert saved
    assert guards[0].state_dict() == guards[1].state_dict()
    if seed == 0 and not refuses:
        assert together > 50
