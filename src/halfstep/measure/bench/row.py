"""One arm of a bench: its runs, and how they compare with fp32's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from halfstep.measure.bench.figures import Average, Gain, TimeToLoss, average, gain_of, time_to_loss
from halfstep.measure.bench.results import Memory, Metric, RunResult, spoken
from halfstep.measure.parity import Margin, Parity, half_a_point, margin_of, parity

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Row:
    """What is known of one arm."""

    name: str
    runs: tuple[RunResult, ...]
    failed: str
    """Why there are no more runs of it; empty where it did not fail."""
    memory: Memory | None
    gain: Gain | None
    parity: Parity | None
    """None for the baseline, and where nothing can be paired."""
    time_to_loss: TimeToLoss | None
    less_memory: float | None
    """Than the baseline, as a share of it; below zero it is more."""

    @property
    def metric(self) -> Average | None:
        return average([run.metric for run in self.runs])

    @property
    def finite(self) -> int:
        """Runs whose metric is a number; the mean is of these."""
        return sum(isfinite(run.metric) for run in self.runs)

    @property
    def samples_per_second(self) -> Average | None:
        return average([run.samples_per_second for run in self.runs])

    @property
    def seconds_per_epoch(self) -> Average | None:
        return average([run.seconds_per_epoch for run in self.runs])

    @property
    def joules_per_epoch(self) -> Average | None:
        return average([run.joules_per_epoch for run in self.runs])

    @property
    def seconds(self) -> Average | None:
        return average([run.seconds for run in self.runs])

    @property
    def peak_bytes(self) -> int | None:
        """Of the whole run that took most."""
        return max((run.peak_bytes for run in self.runs if run.peak_bytes is not None), default=None)

    @property
    def skipped(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for run in self.runs:
            total.update(run.skipped)
        return dict(total)

    def cost(self, price_per_hour: float | None) -> float | None:
        """Of one run's training: the time per epoch, times its epochs."""
        epoch = self.seconds_per_epoch
        epochs = average([run.epochs for run in self.runs])
        if price_per_hour is None or epoch is None or epochs is None:
            return None
        return epoch.mean * epochs.mean * price_per_hour / SECONDS_PER_HOUR

    def as_dict(self, price_per_hour: float | None) -> dict[str, Any]:
        figures = ("metric", "samples_per_second", "seconds_per_epoch", "joules_per_epoch", "seconds")
        return {
            "name": self.name,
            "failed": self.failed,
            "seeds": [run.seed for run in self.runs],
            "finite": self.finite,
            **{name: asdict(found) if (found := getattr(self, name)) else None for name in figures},
            "gain": self.gain.as_dict() if self.gain else None,
            "parity": spoken(self.parity.as_dict()) if self.parity else None,
            "memory": self.memory.as_dict() if self.memory else None,
            "less_memory": self.less_memory,
            "peak_bytes": self.peak_bytes,
            "time_to_loss": asdict(self.time_to_loss) if self.time_to_loss else None,
            "skipped": self.skipped,
            "cost": self.cost(price_per_hour),
            "runs": [run.as_dict() for run in self.runs],
        }


def rows_of(
    runs: Mapping[str, Sequence[RunResult]],
    failed: Mapping[str, str],
    metric: Metric,
    memories: Mapping[str, Memory],
    gains: Mapping[str, Gain],
) -> tuple[Row, ...]:
    """A row for each arm; the first one is what the others are compared with."""
    baseline, *_ = runs
    base = runs[baseline]
    margin = margin_over(base, metric)
    return tuple(
        Row(
            name=name,
            runs=tuple(own),
            failed=failed.get(name, ""),
            memory=memories.get(name),
            gain=gains.get(name) or gain_of(base, own),
            parity=None if name == baseline else _parity(base, own, metric, margin),
            time_to_loss=time_to_loss(base, own),
            less_memory=_less(memories.get(baseline), memories.get(name)),
        )
        for name, own in runs.items()
    )


def margin_over(base: Sequence[RunResult], metric: Metric) -> Margin:
    """Of all runs of the baseline, whichever of them an arm has, too."""
    metrics = [run.metric for run in base]
    return margin_of(metrics, points=half_a_point(metrics, higher_is_better=metric.higher_is_better))


def _parity(base: Sequence[RunResult], arm: Sequence[RunResult], metric: Metric, margin: Margin) -> Parity | None:
    """Of the seeds that both have."""
    metrics = {run.seed: run.metric for run in base}
    pairs = [(metrics[run.seed], run.metric) for run in arm if run.seed in metrics]
    if not pairs:
        return None
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return parity(ours, theirs, margin, higher_is_better=metric.higher_is_better)


def _less(base: Memory | None, arm: Memory | None) -> float | None:
    """Measured beside measured, or predicted beside predicted."""
    if base is None or arm is None:
        return None
    for ours, theirs in ((base.measured, arm.measured), (base.predicted, arm.predicted)):
        if ours and theirs is not None:
            return 1.0 - theirs / ours
    return None
