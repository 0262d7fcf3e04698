"""Write the numbers of a run for Prometheus, in the text format that node_exporter's textfile collector reads."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.files import renaming
from halfstep.journal.events import END, EPOCH, SAVED, SPEED, START, Event
from halfstep.journal.latest import CHECKPOINT, Latest
from halfstep.journal.numbers import to_float

METRICS = "metrics.prom"
"""The file in the run's folder, where the recipe names no other."""
_CHECKPOINTS = "checkpoints"


class Sample(NamedTuple):
    """A value of a metric, and the labels that tell it from the others of that metric."""

    value: Any
    labels: Mapping[str, str]


class Prometheus:
    """A listener that replaces one small file at every line of the log, after an epoch and at the end.

    All metrics are gauges: a resumed run goes back to its checkpoint, and a counter may never become smaller.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._latest, self._saved_at = path, Latest(), math.nan

    def restore_event(self, event: Event) -> None:
        """Record an event of an earlier launch without writing."""
        self._latest.on_event(event)

    def on_event(self, event: Event) -> None:
        """Record an event, and write where it is one of a few."""
        self._latest.on_event(event)
        kind = event["event"]
        if kind == START:
            self._saved_at = _saved_before(event)
        elif kind == SAVED and event["kind"] == CHECKPOINT:
            self._saved_at = time.time()
        elif kind in (SPEED, EPOCH, END):
            self._write(is_running=kind != END)

    def close(self) -> None:
        """Do nothing: the file stays, with the numbers of the end."""

    def _write(self, is_running: bool) -> None:
        metrics = _metrics(self._latest, is_running, self._saved_at)
        # Renamed: a collector that reads in between must not see half a file.
        with renaming(self._path) as draft:
            draft.write_text("".join(_lines(metrics, _labels(self._latest.start))), encoding="utf-8")


def _saved_before(start: Event) -> float:
    """Return when the checkpoint that a run resumes from was saved; NaN where there is none."""
    name = (start.get("resumed") or {}).get("checkpoint")
    try:
        return (Path(start["dir"]) / _CHECKPOINTS / name).stat().st_mtime if name else math.nan
    except OSError:
        return math.nan


# -- metrics ----------------------------------------------------------------------------------------------------------


HELP = {
    "halfstep_running": "1 while the run trains, 0 after its end",
    "halfstep_info": "What runs where; always 1",
    "halfstep_step": "Updates applied so far",
    "halfstep_attempts": "Updates attempted so far",
    "halfstep_planned_attempts": "Updates of the whole run",
    "halfstep_epoch": "The epoch of the last update",
    "halfstep_loss": "The loss of the last update",
    "halfstep_learning_rate": "The learning rate of the last update",
    "halfstep_loss_scale": "The loss scale of the last update",
    "halfstep_grad_norm": "The norm of the gradients of the last update",
    "halfstep_skipped_steps": "Updates that were not applied, by their reason",
    "halfstep_metric": "The last validation",
    "halfstep_samples_per_second": "Samples trained on in a second, over all ranks",
    "halfstep_wait_share": "The share of the time spent waiting for samples, 0 to 1",
    "halfstep_memory_bytes": "Memory in use by rank 0",
    "halfstep_seconds_left": "Seconds to the end of the run, as far as it is known",
    "halfstep_last_save_timestamp_seconds": "When the newest checkpoint was complete, in seconds since 1970",
    "halfstep_last_save_attempt": "The attempted update of the newest checkpoint",
}
"""Every metric, and its description."""
_OF_STEPS = {
    "halfstep_step": "step",
    "halfstep_attempts": "attempt",
    "halfstep_epoch": "epoch",
    "halfstep_loss": "loss",
    "halfstep_learning_rate": "lr",
    "halfstep_loss_scale": "loss_scale",
    "halfstep_grad_norm": "grad_norm",
}
_OF_SPEED = {name: name.removeprefix("halfstep_") for name in HELP if name.endswith(("_second", "_share", "_left"))}


def _metrics(latest: Latest, is_running: bool, saved_at: float) -> dict[str, list[Sample]]:
    """Return the samples of each metric; values that are not known are None."""
    start, memory = latest.start, latest.speed.get("memory") or {}
    found = {"halfstep_running": [Sample(int(is_running), {})], "halfstep_info": [Sample(1, _info(start))]}
    found["halfstep_planned_attempts"] = [Sample(start.get("steps"), {})]
    found |= {name: [Sample(latest.step.get(field), {})] for name, field in _OF_STEPS.items()}
    found |= {name: [Sample(latest.speed.get(field), {})] for name, field in _OF_SPEED.items()}
    found["halfstep_skipped_steps"] = [Sample(number, {"reason": why}) for why, number in latest.skipped.items()]
    validation = latest.epoch.get("val") or {}
    found["halfstep_metric"] = [Sample(value, {"name": name}) for name, value in validation.items()]
    places = ((place.removesuffix("_bytes"), size) for place, size in memory.items())
    found["halfstep_memory_bytes"] = [Sample(size, {"place": place}) for place, size in places]
    if latest.checkpoint is not None:
        found["halfstep_last_save_attempt"] = [Sample(latest.checkpoint.attempt, {})]
        known = saved_at if math.isfinite(saved_at) else None
        found["halfstep_last_save_timestamp_seconds"] = [Sample(known, {})]
    return found


def _labels(start: Event) -> dict[str, str]:
    """Return the labels of every sample: they tell runs apart that one collector reads."""
    return {"run": str(start.get("dir", "")), "job": str(start.get("job") or "")}


def _info(start: Event) -> dict[str, str]:
    precision, versions = start.get("precision") or {}, start.get("versions") or {}
    facts = {"label": start.get("label"), "host": start.get("host"), "precision": precision.get("chosen")}
    facts |= {"device": (start.get("device") or {}).get("name"), "version": versions.get("halfstep")}
    return {name: str(value or "") for name, value in facts.items()}


def _lines(metrics: Mapping[str, list[Sample]], shared: Mapping[str, str]) -> Iterator[str]:
    for name, about in HELP.items():
        samples = [sample for sample in metrics.get(name, ()) if sample.value is not None]
        if samples:
            yield f"# HELP {name} {about}\n# TYPE {name} gauge\n"
        for sample in samples:
            pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in {**shared, **sample.labels}.items())
            yield f"{name}{{{pairs}}} {_number(sample.value)}\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: Any) -> str:
    number = to_float(value)
    if math.isfinite(number):
        return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)
    return "NaN" if math.isnan(number) else ("+Inf" if number > 0 else "-Inf")
