"""Collect the numbers of a run's curves from its events."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfstep.page import is_drawable

Points = tuple[Sequence[float], Sequence[float]]
"""The attempts of a curve, and its numbers."""


class RunSeries:
    """The numbers of all curves, in eight bytes each, for runs of any length."""

    def __init__(self) -> None:
        self.title, self.metric = "", ""
        self.attempt, self.loss, self.lr, self.loss_scale = (array("d") for _ in range(4))
        self.skips: list[tuple[float, str]] = []
        self.epoch_at = array("d")
        self.epochs: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the numbers of an event; events without any are ignored."""
        kind = event["event"]
        if kind == "step":
            self._add_step(event)
        elif kind == "epoch":
            # Epochs are placed at the last step before them, so that they share the axis of the steps.
            self.epoch_at.append(self.attempt[-1] if self.attempt else float(event["epoch"]))
            self.epochs.append((event.get("train") or {}, event.get("val") or {}))
        elif kind == "start":
            self.metric = str((event.get("metric") or {}).get("name") or "")
            chosen = (event.get("precision") or {}).get("chosen")
            self.title = str(event.get("label") or "") + (f", {chosen}" if chosen else "")

    def _add_step(self, event: Mapping[str, Any]) -> None:
        self.attempt.append(event["attempt"])
        self.loss.append(_to_finite(event["loss"]))
        self.lr.append(_to_finite(event["lr"]))
        self.loss_scale.append(_to_finite(event.get("loss_scale")))
        if not event["applied"]:
            self.skips.append((float(event["attempt"]), str(event["reason"])))

    def of_epochs(self, name: str) -> tuple[Points, Points]:
        """Return one number per epoch, from training and from validation; NaN if there is none."""
        train = [_to_finite(train.get(name)) for train, _ in self.epochs]
        val = [_to_finite(val.get(name)) for _, val in self.epochs]
        return (self.epoch_at, train), (self.epoch_at, val)


def collect_series(events: Iterable[Mapping[str, Any]]) -> RunSeries:
    """Return the series of a sequence of events."""
    series = RunSeries()
    for event in events:
        series.add(event)
    return series


def _to_finite(value: Any) -> float:
    """Return a number, or NaN where it is non-finite or too large for an axis."""
    number = math.nan if value is None else float(value)
    return number if is_drawable(number) else math.nan
