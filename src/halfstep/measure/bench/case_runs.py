"""Take updates of a case in several precisions: the runs of a bench, and the race between them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from halfstep.errors import HalfstepError, format_error_reason
from halfstep.measure.bench.comparison import (
    BenchMetric,
    BenchTimes,
    RunResult,
    convert_speed_to_gain,
    smooth_loss_curve,
)
from halfstep.measure.case import Case
from halfstep.measure.conditions import Conditions
from halfstep.measure.local_candidate import LocalCandidate, create_candidate
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.timing import race_candidates, warm_up_candidate
from halfstep.measure.worker_process import (
    CandidateFailed,
    CandidateProcess,
    CandidateTooSlow,
    TimedUpdate,
)

METRIC = BenchMetric("loss", higher_is_better=False)
STEPS = 50
LAST = 5
"""Number of final losses that are averaged."""
NUDGE = 0.01
"""Relative perturbation of the weights by each seed: a different start, the same for every candidate."""
RACE_SECONDS = 120.0
LIMIT = 1800.0
"""Timeout of one answer in seconds: a candidate that hangs becomes a failed row."""


@dataclass(frozen=True)
class CaseCandidate:
    """One precision of a case."""

    subject: Subject | Case
    setting: StepSetting

    def __call__(self, seed: int) -> RunResult:
        """Take `STEPS` updates from the starting point of a seed; return the result."""
        with create_candidate(self.subject, self.setting) as run:
            opened = run.open(LIMIT)
            run.nudge(NUDGE, seed)
            updates = [run.update(LIMIT) for _ in range(STEPS)]
        return build_case_result(updates, seed, opened["samples"], opened["conditions"])


def build_case_result(updates: Sequence[TimedUpdate], seed: int, samples: int, conditions: Conditions) -> RunResult:
    """Return the result of updates.

    A skipped update takes time but its loss is not compared, unless the loss itself is non-finite.
    """
    taken, timed = 0.0, []
    for update in updates:
        taken += update.seconds
        # A skipped update leaves the weights as they are, so its loss would count twice.
        if update.reason is None or not math.isfinite(update.loss):
            timed.append((taken, float(update.loss)))
    losses = [loss for _, loss in timed[-LAST:]]
    return RunResult(
        seed=seed,
        metric=statistics.fmean(losses) if losses else math.nan,
        seconds=taken,
        samples_per_second=samples / statistics.median(update.seconds for update in updates),
        curve=smooth_loss_curve(timed, min(LAST, len(timed) or 1)),
        skipped=dict(Counter(update.reason for update in updates if update.reason is not None)),
        conditions=conditions,
    )


def race_case_candidates(candidates: Mapping[str, CaseCandidate], names: Sequence[str]) -> BenchTimes:
    """Open all candidates at once, warm them up and time them in turns; the first is the baseline.

    Raises its error if the baseline fails; other candidates that fail are reported.
    """
    failed: dict[str, str] = {}
    with ExitStack() as opened:
        running: dict[str, CandidateProcess | LocalCandidate] = {}
        for name in names:
            running[name] = create_candidate(candidates[name].subject, candidates[name].setting)
            opened.callback(running[name].close)
        for name in names:
            try:
                running[name].open(LIMIT)
                warm_up_candidate(running[name])
            except (HalfstepError, CandidateFailed, CandidateTooSlow) as error:
                if name == names[0]:
                    raise
                failed[name] = format_error_reason(error)
                running.pop(name)
        found = race_candidates(running, baseline=names[0], seconds=RACE_SECONDS)
    gains = {name: convert_speed_to_gain(speed) for name, speed in found.speeds.items()}
    return BenchTimes(gains, found.interrupted, {**failed, **{name: str(why) for name, why in found.failed.items()}})
