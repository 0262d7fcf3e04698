"""Collect the numbers of curves from a run's events. Loads no matplotlib: a run collects long before it draws."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

BINS = 600
"""Bins of a curve that is thinned, each with up to two points: as many as a picture can show."""
Numbers = np.ndarray[Any, np.dtype[np.float64]]
_LARGEST = 1e300
"""Larger numbers are not drawn: an axis adds margins to its data, which must stay finite."""


class Series:
    """The numbers of all curves, in eight bytes each, for runs of any length."""

    def __init__(self) -> None:
        self.title, self.metric = "", ""
        self.attempt, self.loss, self.lr, self.loss_scale = (array("d") for _ in range(4))
        self.skipped_at = array("d")
        self.skipped: Counter[str] = Counter()
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
        self.loss.append(_real(event["loss"]))
        self.lr.append(_real(event["lr"]))
        self.loss_scale.append(_real(event.get("loss_scale")))
        if not event["applied"]:
            self.skipped_at.append(event["attempt"])
            self.skipped[str(event["reason"])] += 1

    def of_epochs(self, name: str) -> tuple[Numbers, Numbers]:
        """Return one number per epoch, from training and from validation; NaN where there is none."""
        train = [_real(train.get(name)) for train, _ in self.epochs]
        val = [_real(val.get(name)) for _, val in self.epochs]
        return np.array(train, dtype=float), np.array(val, dtype=float)


def series_of(events: Iterable[Mapping[str, Any]]) -> Series:
    """Return the series of a sequence of events."""
    series = Series()
    for event in events:
        series.add(event)
    return series


def _real(value: Any) -> float:
    """Return a number, or NaN where it is non-finite or too large for an axis."""
    number = float("nan") if value is None else float(value)
    return number if abs(number) < _LARGEST else float("nan")


def thinned(x: Numbers, y: Numbers, bins: int = BINS) -> tuple[Numbers, Numbers]:
    """Return at most two finite points per bin, its minimum and maximum in order, so that spikes survive."""
    # Steps with a non-finite loss are marked as skipped; a gap for each would hide the points between them.
    keep = np.isfinite(y)
    x, y = x[keep], y[keep]
    if len(x) <= 2 * bins:
        return x, y
    chosen: list[int] = []
    for begin, end in pairwise(np.linspace(0, len(x), bins + 1).astype(int).tolist()):
        part = y[begin:end]
        chosen += sorted({begin + int(part.argmin()), begin + int(part.argmax())})
    return x[chosen], y[chosen]
