"""The rows of a bench: the runs of one candidate, and their comparison with fp32."""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from halfstep.errors import WrongUse
from halfstep.json_data import JsonResult
from halfstep.measure.parity import (
    Margin,
    ParityTest,
    compare_paired_metrics,
    compute_margin,
    compute_mean_interval,
    compute_smallest_margin,
)
from halfstep.measure.timing import Speed, Verdict


class RunFailed(Exception):
    """A run without a result; the message is its last output."""


@dataclass(frozen=True)
class BenchMetric:
    """The metric that decides whether a candidate is as good as the baseline."""

    name: str
    higher_is_better: bool


@dataclass(frozen=True)
class CandidateConfig:
    """The configuration of a candidate."""

    precision: str
    batch: int | None = None
    """Samples of an update on one device; None for a case, whose batch is fixed."""
    settings: tuple[str, ...] = ()
    """Settings of the recipe that define this candidate."""


@dataclass(frozen=True)
class RunResult(JsonResult):
    """One run of one candidate with one seed. Fields that were not measured are None."""

    seed: int
    metric: float
    """Metric at the end of the run; it may be non-finite."""
    seconds: float | None = None
    """Seconds of the whole run, including evaluation and saves."""
    seconds_per_epoch: float | None = None
    """Seconds of training alone, without the first epoch if there are others, because it includes warm-up."""
    samples_per_second: float | None = None
    epochs: float | None = None
    curve: tuple[tuple[float, float], ...] = ()
    """Pairs of seconds since the start and the loss."""
    peak_bytes: int | None = None
    """Peak of the whole run: of the device's allocator if there is one, else of the process."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    joules_per_epoch: float | None = None
    observed: str = ""
    """The formats in which it really computed."""
    conditions: Mapping[str, object] = field(default_factory=dict)
    """The `Conditions` of a case, or those in the journal of a recipe."""

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RunResult:
        """Return the result from its saved form; keys of other versions are ignored."""
        known = {key: value for key, value in saved.items() if key in cls.__dataclass_fields__}
        curve = tuple((float(time), float(loss)) for time, loss in saved.get("curve", ()))
        return cls(**{**known, "metric": float(saved["metric"]), "curve": curve})


@dataclass(frozen=True)
class UpdateMemory(JsonResult):
    """Memory of one update, in bytes of tensors."""

    measured: int | None = None
    """As counted by the allocator."""
    parts: Mapping[str, int] | None = None
    """Predicted bytes of each part at the peak."""
    note: str = ""
    json_keys = ("measured", "predicted", "parts", "note")

    @property
    def predicted(self) -> int | None:
        """Return the predicted total; None without a prediction."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def peak(self) -> int | None:
        """Return the figure to compare: measured if available, else predicted."""
        return self.measured if self.measured is not None else self.predicted


LARGE = 2
"""Factor of the batch: the usual use of the memory that 16 bits save."""


def list_usual_configs(batch_size: int, precision: str) -> dict[str, tuple[str, ...]]:
    """Return the usual configurations: mixed precision alone, with a larger batch, and compiled."""
    amp = f"precision={precision}"
    return {
        "AMP": (amp,),
        "AMP+Large": (amp, f"train.batch_size={LARGE * batch_size}"),
        "AMP+Compiled": (amp, "train.compile=true"),
    }


def parse_arms(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse `NAME: SETTING SETTING` texts; return settings by name.

    Raises `WrongUse` for a text without a name or settings, and for a repeated name.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, colon, rest = text.partition(":")
        try:
            settings = tuple(shlex.split(rest))
        except ValueError:  # an unclosed quotation mark
            settings = ()
        if not colon or not name.strip() or not settings:
            raise WrongUse(
                f"--arm {text!r}",
                allowed="a name, a colon, and settings of the recipe",
                do='--arm "large: precision=bf16 train.batch_size=32"',
            )
        if name.strip() in found:
            raise WrongUse(f"two arms named {name.strip()!r}", allowed="a name for each", do="rename one of them")
        found[name.strip()] = settings
    return found


def format_candidate_filename(name: str) -> str:
    """Return a candidate's name as used in file names."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def check_distinct_files(places: Mapping[str, str]) -> None:
    """Raise `WrongUse` for names that map to the same file, such as `a+b` and `a-b`."""
    seen: dict[str, str] = {}
    for name, place in places.items():
        if place in seen:
            raise WrongUse(
                f"arms named {seen[place]!r} and {name!r}",
                allowed="names that differ in letters or digits",
                do="rename one of them",
            )
        seen[place] = name


CONFIDENCE = 0.95


@dataclass(frozen=True)
class Gain(JsonResult):
    """Throughput relative to strict fp32, with the 95 % interval if there is one."""

    times: float
    low: float | None
    high: float | None
    pairs: int
    json_keys = ("times", "low", "high", "pairs", "verdict")

    @property
    def verdict(self) -> Verdict:
        """Return "can't tell" if the interval contains 1 or there is no interval."""
        if self.low is None or self.high is None or self.low <= 1.0 <= self.high:
            return "can't tell"
        return "faster" if self.low > 1.0 else "slower"


def compute_gain(base: Sequence[RunResult], candidate: Sequence[RunResult]) -> Gain | None:
    """Return the speed-up, paired by seed; None without pairs.

    The epochs of a run are not independent, so each run counts once, however many epochs it has.
    """
    fast = {run.seed: run.samples_per_second for run in base}
    logs = [
        # Logarithms, so that 2x and 0.5x average to 1x.
        math.log(run.samples_per_second / there)
        for run in candidate
        if run.samples_per_second and (there := fast.get(run.seed))
    ]
    if not logs:
        return None
    # A single pair has no interval, and so no verdict.
    low, high = _compute_seed_interval(logs)
    # math.exp overflows above 709; with two seeds an interval can be as wide as that.
    ends = [None if end is None else math.exp(min(end, 700.0)) for end in (low, high)]
    return Gain(math.exp(statistics.mean(logs)), ends[0], ends[1], len(logs))


def convert_speed_to_gain(speed: Speed) -> Gain:
    """Return the speed of a race as a gain."""
    return Gain(speed.speedup, speed.low, speed.high, speed.pairs)


@dataclass(frozen=True)
class BenchTimes:
    """The result of timing candidates in turns."""

    gains: Mapping[str, Gain]
    interrupted: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
    """Candidates that failed in the race, and why."""


@dataclass(frozen=True)
class Average:
    """A mean over seeds."""

    mean: float
    sd: float | None
    low: float | None
    high: float | None


def compute_finite_average(values: Sequence[float | None]) -> Average | None:
    """Return the mean of the finite values; None if there is none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    low, high = _compute_seed_interval(known)
    return Average(statistics.mean(known), statistics.stdev(known) if len(known) > 1 else None, low, high)


def _compute_seed_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    return compute_mean_interval(values, CONFIDENCE) if len(values) > 1 else (None, None)


@dataclass(frozen=True)
class TimeToLoss:
    """The time until a candidate first reached the final loss of fp32 with the same seed."""

    seconds: float | None
    """Median of the runs that reached it."""
    reached: int
    runs: int


def compute_time_to_loss(base: Sequence[RunResult], candidate: Sequence[RunResult]) -> TimeToLoss | None:
    """Return the time, paired by seed; None if no losses are known."""
    goals = {run.seed: run.curve[-1][1] for run in base if run.curve and math.isfinite(run.curve[-1][1])}
    found = [
        next((time for time, loss in run.curve if loss <= goals[run.seed]), None)
        for run in candidate
        if run.curve and run.seed in goals
    ]
    if not found:
        return None
    times = [time for time in found if time is not None]
    return TimeToLoss(statistics.median(times) if times else None, len(times), len(found))


def smooth_loss_curve(curve: Sequence[tuple[float, float]], over: int) -> tuple[tuple[float, float], ...]:
    """Return each loss as the mean of the last `over`, beginning when there are that many."""
    return tuple(
        (curve[end - 1][0], statistics.fmean(loss for _, loss in curve[end - over : end]))
        for end in range(over, len(curve) + 1)
    )


SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class BenchRow:
    """The results of one candidate."""

    name: str
    runs: tuple[RunResult, ...]
    failed: str
    """Why it has no more runs; empty if it did not fail."""
    memory: UpdateMemory | None
    gain: Gain | None
    parity: ParityTest | None
    """None for the baseline, and without pairs."""
    time_to_loss: TimeToLoss | None
    less_memory: float | None
    """Share of the baseline's memory that is saved; negative if it uses more."""
    config: CandidateConfig

    @property
    def metric(self) -> Average | None:
        """Return the mean of the final metric over seeds."""
        return compute_finite_average([run.metric for run in self.runs])

    @property
    def finite(self) -> int:
        """Return the number of runs with a finite metric; the mean is over these."""
        return sum(isfinite(run.metric) for run in self.runs)

    @property
    def samples_per_second(self) -> Average | None:
        """Return the mean throughput over seeds."""
        return compute_finite_average([run.samples_per_second for run in self.runs])

    @property
    def seconds_per_epoch(self) -> Average | None:
        """Return the mean training time of an epoch over seeds."""
        return compute_finite_average([run.seconds_per_epoch for run in self.runs])

    @property
    def joules_per_epoch(self) -> Average | None:
        """Return the mean energy of an epoch over seeds; None if it was not measured."""
        return compute_finite_average([run.joules_per_epoch for run in self.runs])

    @property
    def seconds(self) -> Average | None:
        """Return the mean duration of a run over seeds."""
        return compute_finite_average([run.seconds for run in self.runs])

    @property
    def peak_bytes(self) -> int | None:
        """Return the peak of the run that used most."""
        return max((run.peak_bytes for run in self.runs if run.peak_bytes is not None), default=None)

    @property
    def skipped(self) -> dict[str, int]:
        """Return the skipped updates of all runs, by reason."""
        total: Counter[str] = Counter()
        for run in self.runs:
            total.update(run.skipped)
        return dict(total)

    @property
    def converted(self) -> int:
        """Return the number of layers that its runs computed in fp8."""
        precision = self.runs[0].conditions.get("precision") if self.runs else None
        return len(precision.get("converted") or ()) if isinstance(precision, Mapping) else 0

    @property
    def is_proven(self) -> bool:
        """Return whether it is known to be faster than the baseline and as good."""
        found = (self.parity and self.parity.verdict, self.gain and self.gain.verdict)
        return found == ("same", "faster") and not self.failed

    def cost(self, price_per_hour: float | None) -> float | None:
        """Return the cost of training one run: the time per epoch times its epochs."""
        epoch = self.seconds_per_epoch
        epochs = compute_finite_average([run.epochs for run in self.runs])
        if price_per_hour is None or epoch is None or epochs is None:
            return None
        return epoch.mean * epochs.mean * price_per_hour / SECONDS_PER_HOUR

    def figures(self) -> dict[str, object]:
        """Return the figures by their key in JSON."""
        keys = (
            *("finite", "metric", "samples_per_second", "seconds_per_epoch", "joules_per_epoch", "seconds", "gain"),
            *("parity", "memory", "less_memory", "peak_bytes", "time_to_loss", "skipped"),
        )
        return {"seeds": [run.seed for run in self.runs], **{key: getattr(self, key) for key in keys}}


def build_bench_rows(
    runs: Mapping[str, Sequence[RunResult]],
    failed: Mapping[str, str],
    metric: BenchMetric,
    memories: Mapping[str, UpdateMemory],
    gains: Mapping[str, Gain],
    configs: Mapping[str, CandidateConfig],
    *,
    base_name: str = "fp32",
) -> tuple[BenchRow, ...]:
    """Return a row for each candidate; the others are compared with the first, which notes call `base_name`."""
    baseline, *_ = runs
    base = runs[baseline]
    margin = compute_baseline_margin(base, metric)
    return tuple(
        BenchRow(
            name=name,
            runs=tuple(own),
            failed=failed.get(name, ""),
            memory=memories.get(name),
            # A race takes precedence: its pairs are interleaved.
            gain=gains.get(name) or compute_gain(base, own),
            parity=None if name == baseline else _compare_seed_metrics(base, own, metric, margin, base_name),
            time_to_loss=compute_time_to_loss(base, own),
            less_memory=_compute_memory_saving(memories.get(baseline), memories.get(name)),
            config=configs.get(name) or CandidateConfig(name),
        )
        for name, own in runs.items()
    )


def compute_baseline_margin(base: Sequence[RunResult], metric: BenchMetric) -> Margin:
    """Return the margin from all runs of the baseline, also those with seeds that a candidate lacks."""
    metrics = [run.metric for run in base]
    return compute_margin(metrics, points=compute_smallest_margin(metrics, higher_is_better=metric.higher_is_better))


def _compare_seed_metrics(
    base: Sequence[RunResult], candidate: Sequence[RunResult], metric: BenchMetric, margin: Margin, base_name: str
) -> ParityTest | None:
    """Return the parity over the seeds that both have; None if there are none."""
    metrics = {run.seed: run.metric for run in base}
    pairs = [(metrics[run.seed], run.metric) for run in candidate if run.seed in metrics]
    if not pairs:
        return None
    ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return compare_paired_metrics(ours, theirs, margin, higher_is_better=metric.higher_is_better, base_name=base_name)


def _compute_memory_saving(base: UpdateMemory | None, candidate: UpdateMemory | None) -> float | None:
    """Return the share of memory saved: measured against measured, or predicted against predicted."""
    if base is None or candidate is None:
        return None
    for ours, theirs in ((base.measured, candidate.measured), (base.predicted, candidate.predicted)):
        if ours and theirs is not None:
            return 1.0 - theirs / ours
    return None
