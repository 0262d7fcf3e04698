"""What one training run came to, and what one update of it takes: the figures that a bench is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from halfstep.train.journal.jsonl import as_line


class RunFailed(Exception):
    """A run that came to no result: what it said last."""


@dataclass(frozen=True)
class Metric:
    """What decides whether an arm is as good as another."""

    name: str
    higher_is_better: bool


@dataclass(frozen=True)
class RunResult:
    """One run of one arm with one seed. What was not measured is None."""

    seed: int
    metric: float
    """At the end of the run; it may be no finite number."""
    seconds: float | None = None
    """Of the whole run, with its evaluations and saves."""
    seconds_per_epoch: float | None = None
    """Of training alone, in the epochs after the first where there are any: that one warms up."""
    samples_per_second: float | None = None
    epochs: float | None = None
    curve: tuple[tuple[float, float], ...] = ()
    """Seconds since the start, and the loss there."""
    peak_bytes: int | None = None
    """Of the whole run: the device's allocator where there is one, else the memory of the process."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    joules_per_epoch: float | None = None
    observed: str = ""
    """In which formats it really computed."""
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for strict JSON: numbers that it has no sign for are words, as in a journal."""
        return spoken(asdict(self))

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> RunResult:
        curve = tuple((float(time), float(loss)) for time, loss in kept["curve"])
        return cls(**{**kept, "metric": float(kept["metric"]), "curve": curve})


@dataclass(frozen=True)
class Memory:
    """What one update takes, in bytes of tensors."""

    measured: int | None = None
    """As the allocator counted it."""
    parts: Mapping[str, int] | None = None
    """Predicted without running, at the peak, by what it is taken for."""
    note: str = ""

    @property
    def predicted(self) -> int | None:
        return sum(self.parts.values()) if self.parts else None

    @property
    def peak(self) -> int | None:
        """What is compared: measured where it was, else predicted."""
        return self.measured if self.measured is not None else self.predicted

    def as_dict(self) -> dict[str, Any]:
        parts = dict(self.parts) if self.parts else None
        return {"measured": self.measured, "predicted": self.predicted, "parts": parts, "note": self.note}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Memory:
        return cls(kept["measured"], kept["parts"], kept["note"])


def spoken(content: dict[str, Any]) -> dict[str, Any]:
    """The same as strict JSON can hold it."""
    return dict(json.loads(as_line(content)))
