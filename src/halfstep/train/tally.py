"""What adds up over an epoch: the mean loss, the skips, and the metrics. One that is cut in two adds up the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from halfstep.errors import StateMismatch, same_keys
from halfstep.step.report import StepReport
from halfstep.train.evaluation import values

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


class Tally:
    """The epoch so far."""

    def __init__(self, metrics: MetricCollection) -> None:
        self.metrics = metrics
        self.reset()

    def reset(self) -> None:
        self.total, self.applied, self.count = 0.0, 0, 0
        self.skipped: Counter[str] = Counter()
        self.metrics.reset()

    def add(self, report: StepReport) -> None:
        self.count += 1
        if report.applied:
            self.total, self.applied = self.total + report.loss, self.applied + 1
        elif report.reason is not None:
            self.skipped[report.reason] += 1

    def values(self) -> dict[str, float]:
        """The mean loss of the steps that were applied, and the metrics."""
        loss = self.total / self.applied if self.applied else float("nan")
        return {"loss": loss, **values(self.metrics)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "total": self.total,
            "applied": self.applied,
            "count": self.count,
            "skipped": dict(self.skipped),
            "groups": self._groups(),
            "metrics": {name: _state(metric) for name, metric in self._each()},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what is not of these metrics, and change nothing."""
        same_keys("the epoch so far", self.state_dict(), state)
        same_keys("metrics", [name for name, _ in self._each()], state["metrics"])
        for name, metric in self._each():
            _check(f"metric {name!r}", _state(metric), state["metrics"][name])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.applied, self.count = state["total"], state["applied"], state["count"]
        self.skipped = Counter(state["skipped"])
        for name, metric in self._each():
            for path, part in _parts(metric):
                _put(part, state["metrics"][name][path])
        if state["groups"] is not None:
            # Which metrics count alike is decided by what they have counted so far: decided once, and kept.
            self.metrics._groups = dict(enumerate([list(names) for names in state["groups"]]))
            self.metrics._groups_checked = True

    def _groups(self) -> list[list[str]] | None:
        decided = self.metrics._groups_checked
        return [list(names) for names in self.metrics.compute_groups.values()] if decided else None

    def _each(self) -> list[tuple[str, Metric]]:
        # Metrics that count alike share their numbers; asking for them by name gives each its own again.
        return [(str(name), metric) for name, metric in self.metrics.items(keep_base=True)]


def _parts(metric: Metric) -> list[tuple[str, Metric]]:
    """A metric, and those that it is made of."""
    from torchmetrics import Metric

    return [(path, part) for path, part in metric.named_modules() if isinstance(part, Metric)]


def _state(metric: Metric) -> dict[str, Any]:
    return {path: {"updates": part._update_count, **part.metric_state} for path, part in _parts(metric)}


def _check(what: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    same_keys(what, own, saved)
    for path, parts in own.items():
        same_keys(what, parts, saved[path])
        for name, value in parts.items():
            if not _fits(value, saved[path][name]):
                raise StateMismatch(
                    f"{what}: {name} was {_form(saved[path][name])}",
                    allowed=f"{_form(value)}, as it is now",
                    do="measure with the metrics that the run was begun with, or add --new for a run of its own",
                )


def _fits(own: Any, saved: Any) -> bool:
    if not isinstance(own, Tensor) or not isinstance(saved, Tensor):
        return type(own) is type(saved)
    # A single number may become a table when the first batch comes.
    return own.dtype == saved.dtype and (own.ndim == 0 or own.shape == saved.shape)


def _form(value: Any) -> str:
    return f"{tuple(value.shape)} in {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _put(metric: Metric, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if name != "updates":
            # A copy: metrics add in place, and what was loaded is not theirs.
            setattr(metric, name, [_own(v, metric) for v in value] if isinstance(value, list) else _own(value, metric))
    metric._update_count, metric._computed = state["updates"], None


def _own(value: Tensor, metric: Metric) -> Tensor:
    return value.to(metric.device, copy=True)
