"""Write the numbers of a run for Prometheus, in the text format that node_exporter's textfile collector reads."""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.errors import HalfstepError
from halfstep.files import replace_file_unflushed
from halfstep.journal.events import BAD_SAMPLE, END, EPOCH, FAILED_SAVES, NOTE, SAVED, SPEED, START, Event
from halfstep.journal.latest import CHECKPOINT, LatestEvents
from halfstep.numbers import to_float
from halfstep.status_files import RankStatusRecord, read_status

METRICS = "metrics.prom"
"""The file in the run's folder, where the recipe names no other."""
_CHECKPOINTS = "checkpoints"
PERIOD = 15.0
"""Seconds between two writes of the file while nothing else happens; more with many ranks."""
READS = 50.0
"""Status files of other ranks that rank 0 reads in a second at most."""
LAST_WRITE = 1.0
"""Seconds that the end of a run waits for the file."""


class MetricSample(NamedTuple):
    """A value of a metric, and the labels that tell it from the others of that metric."""

    value: Any
    labels: Mapping[str, str]


class Prometheus:
    """A listener that replaces one small file every 15 s, at every line of the log, after an epoch and at the end.

    The file is also written while a step or a save takes long: an old heartbeat in it is that of a process which is
    gone, or whose disk does not answer. All metrics are gauges: a resumed run goes back to its checkpoint, and a
    counter may never become smaller.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._latest, self._saved_at = path, LatestEvents(), math.nan
        self._starts = self._bad_samples = self._failed_saves = 0
        self._is_running = True
        self._code: int | None = None
        self._ranks = RankHeartbeats(path.parent, 1)
        self._told: dict[str, list[MetricSample]] = {}
        """The metrics of events, made by the thread that trains: the writing thread never sees them change."""
        self._writing, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="halfstep metrics", daemon=True)

    def restore_event(self, event: Event) -> None:
        """Record an event of an earlier launch without writing."""
        self._latest.on_event(event)
        kind = event["event"]
        self._starts += kind == START
        self._bad_samples += kind == BAD_SAMPLE

    def on_event(self, event: Event) -> None:
        """Record an event, and write where it is one of a few; raise OSError if it fails, but not on a full disk."""
        self._latest.on_event(event)
        kind = event["event"]
        if kind == NOTE and FAILED_SAVES in event:
            self._failed_saves = event[FAILED_SAVES]
            self._write_now()
        elif kind == BAD_SAMPLE:
            self._bad_samples += 1
        elif kind == SAVED and event["kind"] == CHECKPOINT:
            self._saved_at, self._failed_saves = time.time(), 0
        elif kind in (START, SPEED, EPOCH, END):
            if kind == START:
                self._begin(event)
            self._is_running = kind != END
            self._write_now()

    def ended(self, code: int) -> None:
        """Write the exit code of the run; from any thread, also after `close`. Only the first code counts."""
        if self._code is None and self._told:
            self._code, self._is_running = code, False
            # Not joined for long: the disk may be what ends the run.
            last = threading.Thread(target=self._try_to_write, name="halfstep metrics", daemon=True)
            last.start()
            last.join(LAST_WRITE)

    def close(self) -> None:
        """End the writing thread; the file stays, with the numbers of the end."""
        self._over.set()

    def _begin(self, start: Event) -> None:
        self._saved_at, self._code = _read_checkpoint_time(start), None
        self._ranks = RankHeartbeats(Path(start["dir"]), (start.get("batch") or {}).get("devices", 1))
        self._starts += 1
        if not self._thread.ident:
            self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(max(PERIOD, self._ranks.size / READS)):
            self._try_to_write()

    def _try_to_write(self) -> None:
        with contextlib.suppress(OSError, HalfstepError):  # an old heartbeat says so
            self._write()

    def _write_now(self) -> None:
        latest = self._latest
        counts = {"halfstep_bad_samples": self._bad_samples, "halfstep_failed_saves_in_a_row": self._failed_saves}
        # Launches that a cut journal forgot are counted by the scheduler, and those of a person by the journal.
        counts["halfstep_restarts"] = max(latest.start.get("restarts") or 0, self._starts - 1)
        self._told = _collect_metric_samples(latest, self._saved_at) | {
            name: [MetricSample(count, {})] for name, count in counts.items()
        }
        try:
            self._write()
        except OSError as failure:
            if failure.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _write(self) -> None:
        # With a limit: where the other thread waits for a disk, the training does not wait for metrics.
        if not self._writing.acquire(timeout=LAST_WRITE):
            return
        try:
            # Labels of every sample, for a collector that reads several runs.
            start = self._latest.start
            labels = {"run": str(start.get("dir", "")), "job": str(start.get("job") or "")}
            text = "".join(_iterate_metric_lines({**self._told, **self._live()}, labels))
            # Renamed: a collector that reads in between must not see half a file.
            with replace_file_unflushed(self._path) as draft:
                draft.write_text(text, encoding="utf-8")
        finally:
            self._writing.release()

    def _live(self) -> dict[str, list[MetricSample]]:
        """Return the metrics of this moment."""
        ranks = [MetricSample(seconds, {"rank": str(rank)}) for rank, seconds in self._ranks.behind().items()]
        now: dict[str, float | None] = {
            "halfstep_running": int(self._is_running),
            "halfstep_exit_code": self._code,
            "halfstep_heartbeat_timestamp_seconds": round(time.time(), 3),
            "halfstep_disk_free_bytes": _read_free_bytes(self._ranks.folder),
        }
        return {"halfstep_rank_behind": ranks, **{name: [MetricSample(value, {})] for name, value in now.items()}}


class RankHeartbeats:
    """How long ago rank 0 saw the status files of the other ranks change, by its own clock."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self._seen: dict[int, tuple[RankStatusRecord | None, float]] = {}

    def behind(self) -> dict[int, float]:
        """Read the files, and return the seconds since the last change of each rank but this one."""
        found = {}
        for rank in range(1, self.size):
            content, now = read_status(self.folder, rank), time.monotonic()
            last, at = self._seen.get(rank, (content, now))
            at = at if content == last else now
            self._seen[rank], found[rank] = (content, at), round(now - at, 1)
        return found


def _read_free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _read_checkpoint_time(start: Event) -> float:
    """Return when the checkpoint that a run resumes from was saved; NaN if there is none."""
    name = (start.get("resumed") or {}).get("checkpoint")
    try:
        return (Path(start["dir"]) / _CHECKPOINTS / name).stat().st_mtime if name else math.nan
    except OSError:
        return math.nan


HELP = {
    "halfstep_running": "1 while the run trains, 0 after its end",
    "halfstep_exit_code": "The exit code of the run, after its end",
    "halfstep_heartbeat_timestamp_seconds": "When this file was written, in seconds since 1970",
    "halfstep_restarts": "Launches after the first one",
    "halfstep_rank_behind": "Seconds since rank 0 saw a heartbeat of this rank",
    "halfstep_disk_free_bytes": "Free bytes for the run's folder",
    "halfstep_failed_saves_in_a_row": "Checkpoints that could not be written since the last one that was",
    "halfstep_bad_samples": "Samples that could not be read, and were replaced",
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


def _collect_metric_samples(latest: LatestEvents, saved_at: float) -> dict[str, list[MetricSample]]:
    """Return the samples of each metric that events tell; values that are not known are None."""
    start, memory = latest.start, latest.speed.get("memory") or {}
    precision, versions = start.get("precision") or {}, start.get("versions") or {}
    facts = {"label": start.get("label"), "host": start.get("host"), "precision": precision.get("chosen")}
    facts |= {"device": (start.get("device") or {}).get("name"), "version": versions.get("halfstep")}
    found = {"halfstep_info": [MetricSample(1, {name: str(value or "") for name, value in facts.items()})]}
    found["halfstep_planned_attempts"] = [MetricSample(start.get("steps"), {})]
    found |= {name: [MetricSample(latest.step.get(field), {})] for name, field in _OF_STEPS.items()}
    found |= {name: [MetricSample(latest.speed.get(field), {})] for name, field in _OF_SPEED.items()}
    found["halfstep_skipped_steps"] = [MetricSample(number, {"reason": why}) for why, number in latest.skipped.items()]
    validation = latest.epoch.get("val") or {}
    found["halfstep_metric"] = [MetricSample(value, {"name": name}) for name, value in validation.items()]
    places = ((place.removesuffix("_bytes"), size) for place, size in memory.items())
    found["halfstep_memory_bytes"] = [MetricSample(size, {"place": place}) for place, size in places]
    if latest.checkpoint is not None:
        found["halfstep_last_save_attempt"] = [MetricSample(latest.checkpoint.attempt, {})]
        known = saved_at if math.isfinite(saved_at) else None
        found["halfstep_last_save_timestamp_seconds"] = [MetricSample(known, {})]
    return found


def _iterate_metric_lines(metrics: Mapping[str, list[MetricSample]], shared: Mapping[str, str]) -> Iterator[str]:
    for name, about in HELP.items():
        samples = [sample for sample in metrics.get(name, ()) if sample.value is not None]
        if samples:
            yield f"# HELP {name} {about}\n# TYPE {name} gauge\n"
        for sample in samples:
            pairs = ",".join(f'{key}="{_escape_label(value)}"' for key, value in {**shared, **sample.labels}.items())
            yield f"{name}{{{pairs}}} {_format_sample_value(sample.value)}\n"


def _escape_label(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _format_sample_value(value: Any) -> str:
    number = to_float(value)
    if math.isfinite(number):
        return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)
    return "NaN" if math.isnan(number) else ("+Inf" if number > 0 else "-Inf")
