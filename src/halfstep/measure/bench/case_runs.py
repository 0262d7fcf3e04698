"""A person's own code as the arms of a bench: the loss after some updates from several beginnings, and a race."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from halfstep.errors import HalfstepError, reason_in
from halfstep.measure.bench.figures import Raced, gain_of_race, smoothed
from halfstep.measure.bench.results import Metric, RunResult
from halfstep.measure.case import Subject
from halfstep.measure.process import ArmFailed, ArmProcess, ArmTooSlow
from halfstep.measure.setting import Setting
from halfstep.measure.timing import race, warm

METRIC = Metric("loss", higher_is_better=False)
STEPS = 50
LAST = 5
"""Of the losses, which are averaged."""
NUDGE = 0.01
"""Each seed moves every weight by about this share of itself: a beginning of its own, the same in every arm."""
RACE_SECONDS = 120.0
LIMIT = 1800.0
"""Seconds for one answer: an arm that hangs is a row that failed."""


@dataclass(frozen=True)
class CaseArm:
    """One precision of a case."""

    subject: Subject
    setting: Setting

    def __call__(self, seed: int) -> RunResult:
        with ArmProcess(self.subject, self.setting) as run:
            opened = run.open(LIMIT)
            run.nudge(NUDGE, seed)
            updates = [run.update(LIMIT) for _ in range(STEPS)]
        return result_of(updates, seed, opened["samples"], opened["conditions"])


def result_of(
    updates: Sequence[Mapping[str, Any]], seed: int, samples: int, conditions: Mapping[str, Any]
) -> RunResult:
    """Of updates with their `seconds`, their `loss`, and the `reason` where one was skipped.

    A skipped update takes time and has no loss to compare, but for a loss that is itself no finite number.
    """
    taken, timed = 0.0, []
    for update in updates:
        taken += update["seconds"]
        if update["reason"] is None or not math.isfinite(update["loss"]):
            timed.append((taken, float(update["loss"])))
    losses = [loss for _, loss in timed[-LAST:]]
    return RunResult(
        seed=seed,
        metric=statistics.fmean(losses) if losses else math.nan,
        seconds=taken,
        samples_per_second=samples / statistics.median(update["seconds"] for update in updates),
        curve=smoothed(timed, min(LAST, len(timed) or 1)),
        skipped=dict(Counter(update["reason"] for update in updates if update["reason"] is not None)),
        conditions=conditions,
    )


def race_of(arms: Mapping[str, CaseArm], names: Sequence[str]) -> Raced:
    """All of these arms open at once, warm, and timed in turns; the first one is the baseline."""
    failed: dict[str, str] = {}
    with ExitStack() as opened:
        running = {name: opened.enter_context(ArmProcess(arms[name].subject, arms[name].setting)) for name in names}
        for name in names:
            try:
                running[name].open(LIMIT)
                warm(running[name])
            except (HalfstepError, ArmFailed, ArmTooSlow) as error:
                if name == names[0]:
                    raise
                failed[name] = reason_in(error)
                running.pop(name)
        found = race(running, baseline=names[0], seconds=RACE_SECONDS)
    gains = {name: gain_of_race(speed) for name, speed in found.speeds.items()}
    return Raced(gains, found.interrupted, {**failed, **{name: str(why) for name, why in found.failed.items()}})
