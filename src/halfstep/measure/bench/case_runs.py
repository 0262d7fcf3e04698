"""A person's own code as the arms of a bench: the loss after some updates from several beginnings, and a race."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate

from halfstep.measure.bench.figures import Gain, gain_of_race, smoothed
from halfstep.measure.bench.results import Metric, RunResult
from halfstep.measure.case import Subject
from halfstep.measure.process import ArmProcess
from halfstep.measure.setting import Setting
from halfstep.measure.timing import race, warm

METRIC = Metric("loss", higher_is_better=False)
STEPS = 50
LAST = 5
"""Of the losses, which are averaged."""
NUDGE = 0.01
"""Each seed moves every weight by about this share of itself: a beginning of its own, the same in every arm."""
RACE_SECONDS = 120.0


@dataclass(frozen=True)
class CaseArm:
    """One precision of a case."""

    subject: Subject
    setting: Setting

    def __call__(self, seed: int) -> RunResult:
        with ArmProcess(self.subject, self.setting) as arm:
            opened = arm.open()
            arm.nudge(NUDGE, seed)
            seconds = [arm.seconds() for _ in range(STEPS)]
            losses = arm.trail(STEPS)  # steps that were skipped have none
        taken = statistics.median(seconds)
        timed = list(zip(accumulate(seconds), losses, strict=False))
        return RunResult(
            seed=seed,
            metric=statistics.fmean(losses[-LAST:]) if losses else float("nan"),
            seconds=sum(seconds),
            samples_per_second=opened["samples"] / taken,
            curve=smoothed(timed, min(LAST, len(timed) or 1)),
            conditions=opened["conditions"],
        )


def race_of(arms: Mapping[str, CaseArm], names: Sequence[str]) -> Mapping[str, Gain]:
    """All of these arms open at once, warm, and timed in turns; the first one is the baseline."""
    with ExitStack() as opened:
        running = {name: opened.enter_context(ArmProcess(arms[name].subject, arms[name].setting)) for name in names}
        for arm in running.values():
            arm.open()
            warm(arm)
        found = race(running, baseline=names[0], seconds=RACE_SECONDS)
    return {name: gain_of_race(speed) for name, speed in found.items()}
