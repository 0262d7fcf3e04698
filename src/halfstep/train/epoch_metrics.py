"""Count how far a run is: its progress, its best evaluation, and the loss, skips and metrics of its epoch.

An epoch that is split by a resume gives the same sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

from torch import Tensor

from halfstep.errors import StateMismatch, advise_new_run, check_same_keys
from halfstep.step.report import StepReport
from halfstep.train.evaluation import compute_metric_values
from halfstep.train.metrics import Metric, Metrics


@dataclass
class RunProgress:
    """The position of a run in its data, and its best evaluation so far."""

    epoch: int = 0
    """Epochs completed."""
    step_in_epoch: int = 0
    """Windows attempted in the current epoch."""
    attempts: int = 0
    best: float | None = None
    best_epoch: int = 0
    evaluations_since_best: int = 0
    """Evaluations since the best one."""
    quarantined: list[int] = field(default_factory=list)
    """Training samples with non-finite values, replaced by others since this epoch began."""
    suspected: list[int] = field(default_factory=list)
    """Such samples found in this epoch. Workers prefetch, so only the end of an epoch is the same place for all."""
    overflows: int = 0
    """Steps in a row whose gradients overflowed."""
    unproved: int = 0
    """Steps that must be applied before the weights, after failed steps, are called good again."""

    def begin_epoch(self) -> set[int]:
        """Return the samples to leave out from now on: all that were found."""
        self.quarantined, self.suspected = sorted({*self.quarantined, *self.suspected}), []
        return set(self.quarantined)

    def judge(self, value: float, epoch: int, *, higher: bool, margin: float) -> bool:
        """Record an evaluation; return whether it is the best so far. A non-finite value never is."""
        gain = math.inf if self.best is None else (value - self.best if higher else self.best - value)
        better = math.isfinite(value) and gain > margin
        if better:
            self.best, self.best_epoch, self.evaluations_since_best = value, epoch, 0
        else:
            self.evaluations_since_best += 1
        return better


class EpochState(TypedDict):
    """The saved sums of an epoch."""

    loss_sum: float
    applied: int
    attempted: int
    skipped: dict[str, int]
    """Skipped steps by their reason."""
    compute_groups: list[list[str]] | None
    """Metrics of torchmetrics that share their state."""
    metrics: dict[str, dict[str, dict[str, Any]]]
    """The state of each metric, by the paths of its submetrics."""


class EpochMetrics:
    """The sums of the epoch so far."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics: Any = metrics
        """A `Metrics`, or a MetricCollection of torchmetrics."""
        self.counts = MetricSums(metrics)
        self.reset()

    def reset(self) -> None:
        """Start a new epoch."""
        self.loss_sum, self.applied, self.attempted = 0.0, 0, 0
        self.skipped: Counter[str] = Counter()
        self.metrics.reset()

    def add(self, report: StepReport) -> None:
        """Add the report of one step; only the loss of an applied step counts toward the mean."""
        self.attempted += 1
        if report.applied:
            self.loss_sum, self.applied = self.loss_sum + report.loss, self.applied + 1
        elif report.reason is not None:
            self.skipped[report.reason] += 1

    def values(self) -> dict[str, float]:
        """Return the mean loss of the applied steps, and the metrics."""
        loss = self.loss_sum / self.applied if self.applied else float("nan")
        return {"loss": loss, **self.metric_values()}

    def metric_values(self) -> dict[str, float]:
        """Return the metrics so far; empty before the first applied step, since some cannot compute without one."""
        return compute_metric_values(self.metrics) if self.applied else {}

    def state_dict(self) -> EpochState:
        """Return the sums so far, with the metrics by name."""
        return {
            "loss_sum": self.loss_sum,
            "applied": self.applied,
            "attempted": self.attempted,
            "skipped": dict(self.skipped),
            "compute_groups": self._compute_groups(),
            "metrics": {name: _collect_metric_state(metric) for name, metric in self._each()},
        }

    def check_state(self, state: EpochState) -> None:
        """Raise StateMismatch where `state` belongs to other metrics; change nothing."""
        check_same_keys("the epoch so far", self.state_dict(), state)
        check_same_keys("metrics", [name for name, _ in self._each()], state["metrics"])
        for name, metric in self._each():
            _check_metric_state(f"metric {name!r}", _collect_metric_state(metric), state["metrics"][name])

    def load_state_dict(self, state: EpochState) -> None:
        """Load a state that `check_state` accepted."""
        self.loss_sum, self.applied, self.attempted = state["loss_sum"], state["applied"], state["attempted"]
        self.skipped = Counter(state["skipped"])
        for name, metric in self._each():
            for path, part in _list_submetrics(metric):
                _load_metric(part, state["metrics"][name][path])
        if state["compute_groups"] is not None:
            # torchmetrics decides once, from the first update, which metrics share their state: a resume keeps that.
            self.metrics._groups = dict(enumerate([list(names) for names in state["compute_groups"]]))
            self.metrics._groups_checked = True

    def _compute_groups(self) -> list[list[str]] | None:
        if isinstance(self.metrics, Metrics) or not self.metrics._groups_checked:
            return None
        return [list(names) for names in self.metrics.compute_groups.values()]

    def _each(self) -> list[tuple[str, Any]]:
        if isinstance(self.metrics, Metrics):
            return list(self.metrics.items())
        # Metrics of one compute group share their state; access by name gives each its own copy again.
        return [(str(name), metric) for name, metric in self.metrics.items(keep_base=True)]


class MetricSums:
    """The sums of the metrics as state that a Stepper rolls back: a skipped step must not count in them."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics if isinstance(metrics, Metrics) else _TorchmetricsSums(metrics)

    def state_dict(self) -> Any:
        """Return a snapshot; nothing is copied."""
        return self._metrics.snapshot()

    def load_state_dict(self, state: Any) -> None:
        """Roll the metrics back to a snapshot."""
        self._metrics.load_snapshot(state)


class _TorchmetricsSums:
    """A MetricCollection of torchmetrics, which updates its state in place."""

    def __init__(self, metrics: Any) -> None:
        # Not `metrics.items()`, which copies the state of metrics in one compute group.
        self._metrics = [part for module in metrics.children() for _, part in _list_submetrics(module)]

    def snapshot(self) -> list[dict[str, object]]:
        # Lists only grow, so their length suffices to roll back, however long they are.
        return [
            {
                "_update_count": metric._update_count,
                **{name: _replace_by_length(v) for name, v in metric.metric_state.items()},
            }
            for metric in self._metrics
        ]

    def load_snapshot(self, state: list[dict[str, object]]) -> None:
        for metric, saved in zip(self._metrics, state, strict=True):
            for name, value in saved.items():
                setattr(
                    metric, name, getattr(metric, name)[: value.length] if isinstance(value, _ListLength) else value
                )
            # torchmetrics caches the result of compute(); the cached value is of the state that was rolled back.
            metric._computed = None


class _ListLength(NamedTuple):
    length: int


def _replace_by_length(value: Any) -> Any:
    return _ListLength(len(value)) if isinstance(value, list) else value


def _list_submetrics(metric: Any) -> list[tuple[str, Any]]:
    """Return a metric and its submetrics, each with its path."""
    if isinstance(metric, Metric):
        return [("", metric)]
    return [(path, part) for path, part in metric.named_modules() if hasattr(part, "metric_state")]


def _collect_metric_state(metric: Any) -> dict[str, dict[str, Any]]:
    if isinstance(metric, Metric):
        return {"": metric.metric_state}
    return {path: {"update_count": part._update_count, **part.metric_state} for path, part in _list_submetrics(metric)}


def _check_metric_state(
    what: str, own: Mapping[str, Mapping[str, object]], saved: Mapping[str, Mapping[str, object]]
) -> None:
    check_same_keys(what, own, saved)
    for path, parts in own.items():
        check_same_keys(what, parts, saved[path])
        for name, value in parts.items():
            if not _fits_metric_state(value, saved[path][name]):
                raise StateMismatch(
                    f"{what}: {name} was {_describe_metric_value(saved[path][name])}",
                    allowed=f"{_describe_metric_value(value)}, as it is now",
                    do=f"use the run's original metrics, or {advise_new_run()}",
                )


def _fits_metric_state(own: Any, saved: Any) -> bool:
    if not isinstance(own, Tensor) or not isinstance(saved, Tensor):
        return type(own) is type(saved)
    # A scalar state may become a table with the first batch.
    return own.dtype == saved.dtype and (own.ndim == 0 or own.shape == saved.shape)


def _describe_metric_value(value: Any) -> str:
    return f"{tuple(value.shape)} in {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _load_metric(metric: Any, state: Mapping[str, Any]) -> None:
    if isinstance(metric, Metric):
        metric.load_state(state)
        return
    for name, value in state.items():
        if name != "update_count":
            # A copy: metrics update in place, and the loaded tensors belong to the caller.
            setattr(
                metric,
                name,
                [_copy_to_device(v, metric) for v in value]
                if isinstance(value, list)
                else _copy_to_device(value, metric),
            )
    metric._update_count, metric._computed = state["update_count"], None


def _copy_to_device(value: Tensor, metric: Any) -> Tensor:
    return value.to(metric.device, copy=True)
