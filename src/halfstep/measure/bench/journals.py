"""From a run's journal to the figures of a bench."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halfstep.measure.bench.figures import smoothed
from halfstep.measure.bench.results import RunFailed, RunResult
from halfstep.train.journal.jsonl import read_events
from halfstep.train.journal.numbers import real

_SMOOTH = 20
"""Steps over which a training loss is averaged where nothing is validated."""
_FACTS = ("device", "precision", "flags", "versions", "batch", "samples")


def result_of(journal: Path, seed: int, resident: int | None) -> RunResult:
    """`resident` is what the system says the process had at most; the journal has it now and then only."""
    events = read_events(journal)
    start, end = _last(events, "start"), _last(events, "end")
    epochs = [event for event in events if event["event"] == "epoch"]
    speed = _median([event["samples_per_second"] for event in epochs[1:] or epochs])
    in_epoch = start["steps_per_epoch"] * start["batch"]["total"]
    per_epoch = in_epoch / speed if speed else None
    watts = _median([(event.get("gpu") or {}).get("power_watts") for event in _all(events, "speed")])
    observed = [event["text"] for event in _all(events, "observed")]
    return RunResult(
        seed=seed,
        metric=real(end["metrics"].get(start["metric"]["name"])),
        seconds=end["seconds"],
        seconds_per_epoch=per_epoch,
        samples_per_second=speed,
        epochs=end["steps"] / start["steps_per_epoch"],
        curve=_curve(events),
        peak_bytes=_peak(events, resident),
        skipped=_skipped(epochs),
        joules_per_epoch=watts * per_epoch if watts and per_epoch else None,
        observed=observed[-1] if observed else "",
        conditions={name: start[name] for name in _FACTS},
    )


def _all(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def _last(events: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = _all(events, kind)
    if not found:
        raise RunFailed(f"its journal has no line of the kind {kind!r}")
    return found[-1]


def _median(values: Sequence[Any]) -> float | None:
    known = [number for value in values if math.isfinite(number := real(value))]
    return statistics.median(known) if known else None


def _curve(events: Sequence[dict[str, Any]]) -> tuple[tuple[float, float], ...]:
    """Losses of validation, or of training where there is no validation."""
    validated = [
        (float(event["time"]), real(event["val"]["loss"]))
        for event in _all(events, "epoch")
        if "loss" in (event["val"] or {})
    ]
    if validated:
        return tuple(validated)
    steps = [(float(event["time"]), real(event["loss"])) for event in _all(events, "step")]
    return smoothed(steps, max(1, min(_SMOOTH, len(steps) // 5)))


def _peak(events: Sequence[dict[str, Any]], resident: int | None) -> int | None:
    memories = [event.get("memory") or {} for event in _all(events, "speed")]
    device = [found["device_peak_bytes"] for found in memories if found.get("device_peak_bytes")]
    host = [found["host_bytes"] for found in memories if found.get("host_bytes")]
    return max(device, default=None) or resident or max(host, default=None)


def _skipped(epochs: Sequence[dict[str, Any]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for event in epochs:
        total.update(event["skipped"])
    return dict(total)
