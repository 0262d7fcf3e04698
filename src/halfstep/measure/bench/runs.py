"""Train a recipe in its own process for each candidate and seed, with the command that a user would type."""

from __future__ import annotations

import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.checkpoint.paths import CHECKPOINTS
from halfstep.errors import ENDED_FROM_OUTSIDE, HalfstepError, format_error_reason
from halfstep.files import read_json, write_json
from halfstep.journal.events import Event
from halfstep.journal.jsonl import convert_to_strict_json, read_events
from halfstep.measure.bench.comparison import (
    BenchMetric,
    BenchTimes,
    RunFailed,
    RunResult,
    convert_speed_to_gain,
    smooth_loss_curve,
)
from halfstep.measure.case import Case
from halfstep.measure.conditions import Conditions
from halfstep.measure.local_candidate import LocalCandidate, create_candidate
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Subject
from halfstep.measure.timing import race_candidates, warm_up_candidate
from halfstep.measure.worker_process import (
    CandidateFailed,
    CandidateProcess,
    CandidateTooSlow,
    TimedUpdate,
    end_process,
)
from halfstep.numbers import to_float

_SMOOTH = 20
"""Steps over which the training loss is averaged if there is no validation."""
_FACTS = ("device", "precision", "flags", "versions", "batch", "samples")


def read_run_result(journal: Path, seed: int, resident: int | None) -> RunResult:
    """Return the result of a run.

    `resident` is the peak memory of the process as the system reports it; the journal only samples it. Raises
    `RunFailed` if the journal is incomplete.
    """
    events = read_events(journal)
    start, end = _select_last_event(events, "start"), _select_last_event(events, "end")
    epochs = [event for event in events if event["event"] == "epoch"]
    # The first epoch includes warm-up.
    speed = _compute_finite_median([event["samples_per_second"] for event in epochs[1:] or epochs])
    in_epoch = start["steps_per_epoch"] * start["batch"]["total"]
    per_epoch = in_epoch / speed if speed else None
    watts = _compute_finite_median(
        [(event.get("gpu") or {}).get("power_watts") for event in _select_events(events, "speed")]
    )
    observed = [event["text"] for event in _select_events(events, "precision_check")]
    memories = [event.get("memory") or {} for event in _select_events(events, "speed")]
    device = [found["device_peak_bytes"] for found in memories if found.get("device_peak_bytes")]
    host = [found["host_bytes"] for found in memories if found.get("host_bytes")]
    # The journal's samples come last, because the peak may lie between two of them.
    peak = max(device, default=None) or resident or max(host, default=None)
    total: Counter[str] = Counter()
    for event in epochs:
        total.update(event["skipped"])
    return RunResult(
        seed=seed,
        metric=to_float(end["metrics"].get(start["metric"]["name"])),
        seconds=end["seconds"],
        seconds_per_epoch=per_epoch,
        samples_per_second=speed,
        epochs=end["steps"] / start["steps_per_epoch"],
        curve=_collect_loss_curve(events),
        peak_bytes=peak,
        skipped=dict(total),
        joules_per_epoch=watts * per_epoch if watts and per_epoch else None,
        observed=observed[-1] if observed else "",
        conditions={name: start[name] for name in _FACTS},
    )


def _select_events(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def _select_last_event(events: Sequence[Event], kind: str) -> Event:
    found = _select_events(events, kind)
    if not found:
        raise RunFailed(f"its journal has no line of the kind {kind!r}")
    return found[-1]


def _compute_finite_median(values: Sequence[Any]) -> float | None:
    known = [number for value in values if math.isfinite(number := to_float(value))]
    return statistics.median(known) if known else None


def _collect_loss_curve(events: Sequence[Event]) -> tuple[tuple[float, float], ...]:
    """Return the validation losses, or the training losses if there is no validation."""
    validated = [
        (float(event["time"]), to_float(event["val"]["loss"]))
        for event in _select_events(events, "epoch")
        if "loss" in (event["val"] or {})
    ]
    if validated:
        return tuple(validated)
    steps = [(float(event["time"]), to_float(event["loss"])) for event in _select_events(events, "step")]
    return smooth_loss_curve(steps, max(1, min(_SMOOTH, len(steps) // 5)))


_LAST_WORDS = 4000
_PR_SET_PDEATHSIG = 1
_LOOK_EVERY = 0.05
"""Seconds between polls; they do not affect the figures, which are from the run's journal."""


class RunTimeLimit:
    """The time limit of a run, from the durations of others: one that hangs would block the rest forever."""

    SHORTEST = 600.0
    TIMES = 10.0

    def __init__(self) -> None:
        self._slowest: float | None = None

    def learn(self, seconds: float | None) -> None:
        """Record the duration of a run."""
        self._slowest = max(self._slowest or 0.0, seconds or 0.0) or None

    @property
    def limit(self) -> float | None:
        """Return the limit in seconds; None before the first run has ended, because its duration is unknown."""
        return None if self._slowest is None else max(self.SHORTEST, self.TIMES * self._slowest)


@dataclass(frozen=True)
class RecipeCandidate:
    """One candidate of a recipe: its settings, and the location of its runs."""

    text: str
    settings: tuple[str, ...]
    """The settings as typed, and those that define this candidate."""
    folder: Path
    name: str
    identity: Mapping[str, object]
    """Everything that must be equal for a finished run to be reused."""
    time_limit: RunTimeLimit = field(default_factory=RunTimeLimit)
    """Shared by the candidates of a bench."""

    def __call__(self, seed: int) -> RunResult:
        """Return the saved result of an earlier bench in this folder, or that of a new run."""
        known = {**self.identity, "seed": seed}
        saved = self.beside(f"seed-{seed}")
        found = read_json(saved)
        if isinstance(found, dict) and found.get("identity") == known:
            result = RunResult.from_dict(found["result"])
            self.time_limit.learn(result.seconds)
            return result
        began = time.monotonic()
        result = self._train(seed)
        self.time_limit.learn(time.monotonic() - began)
        write_json(saved, {"identity": known, "result": convert_to_strict_json(result.as_dict())})
        return result

    def beside(self, what: str) -> Path:
        """Return the file for a saved result of this candidate."""
        return self.folder / "runs" / f"{format_candidate_filename(self.name)}-{what}.json"

    def others(self, seeds: Sequence[int]) -> Path | None:
        """Return the file of a result here with another recipe or conditions; it must not be overwritten."""
        for seed in seeds:
            found = read_json(self.beside(f"seed-{seed}"))
            if isinstance(found, dict) and found.get("identity") != {**self.identity, "seed": seed}:
                return self.beside(f"seed-{seed}")
        return None

    def _train(self, seed: int) -> RunResult:
        place = self.beside(f"seed-{seed}").with_suffix("")
        if (place / "recipe.yaml").exists():  # an unfinished run: a figure is only valid for a run in one piece
            shutil.rmtree(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "halfstep", "train", self.text, *self.settings]
        # strict: an unavailable precision fails instead of falling back to another.
        words += [f"train.seed={seed}", f"run.dir={place}", "train.strict=true", "--json"]
        code, resident = run_measured_process(words, place.with_suffix(".log"), self.time_limit.limit)
        if code != 0:
            raise RunFailed(_explain_run_failure(code, place.with_suffix(".log")))
        result = read_run_result(place / "journal.jsonl", seed, resident)
        shutil.rmtree(place / CHECKPOINTS, ignore_errors=True)  # a finished run is never resumed
        return result


def format_candidate_filename(name: str) -> str:
    """Return a candidate's name as used in file names."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def run_measured_process(words: Sequence[str], log: Path, limit: float | None = None) -> tuple[int, int | None]:
    """Return the exit code and the peak bytes of the process; it and its children end with this process.

    Raises `RunFailed` if it takes longer than `limit` seconds.
    """
    with log.open("wb") as output:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                                 preexec_fn=_create_parent_death_hook())  # fmt: skip
        try:
            return _wait_for_child(child, limit)
        except BaseException:
            end_process(child)
            raise


def _create_parent_death_hook() -> Callable[[], object] | None:
    """Return a hook by which, on Linux, the kernel kills the child when its parent ends for any reason."""
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl  # looked up here: little is safe between fork and exec
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_child(child: subprocess.Popen[bytes], limit: float | None) -> tuple[int, int | None]:
    if not hasattr(os, "wait4"):
        try:
            return child.wait(limit), None
        except subprocess.TimeoutExpired:
            raise _time_limit_error(limit) from None
    import resource

    deadline = time.monotonic() + (limit or float("inf"))
    ended = 0
    while not ended:
        # wait4 returns the usage of this child; RUSAGE_CHILDREN would be the maximum over all children.
        ended, status, usage = os.wait4(child.pid, os.WNOHANG)
        if not ended:
            if time.monotonic() > deadline:
                raise _time_limit_error(limit)
            time.sleep(_LOOK_EVERY)
    child.returncode = os.waitstatus_to_exitcode(status)
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    # A child starts as a fork of this process, whose size counts in its maximum: only a larger value is its own.
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return child.returncode, usage.ru_maxrss * unit if usage.ru_maxrss > ours else None


def _time_limit_error(limit: float | None) -> RunFailed:
    return RunFailed(
        f"it did not end within {limit:.0f} s, {RunTimeLimit.TIMES:.0f} times the slowest other run or more"
    )


def _explain_run_failure(code: int, log: Path) -> str:
    if code == -signal.SIGTERM or code == -9:
        return f"its process {ENDED_FROM_OUTSIDE}"
    lines = [line for line in log.read_text("utf-8", "replace")[-_LAST_WORDS:].splitlines() if line.strip()]
    if not lines:
        return f"its process ended with code {code}"
    # halfstep's errors indent all lines but the first; a traceback ends with the exception.
    return next((line for line in reversed(lines) if not line[0].isspace()), lines[-1]).strip()


METRIC = BenchMetric("loss", higher_is_better=False)
STEPS = 50
LAST = 5
"""Number of final losses that are averaged."""
NUDGE = 0.01
"""Relative perturbation of the weights by each seed: a different start, the same for every candidate."""
RACE_SECONDS = 120.0
LIMIT = 1800.0
"""Timeout of one answer in seconds: a candidate that hangs becomes a failed row."""


@dataclass(frozen=True)
class CaseCandidate:
    """One precision of a case."""

    subject: Subject | Case
    setting: StepSetting

    def __call__(self, seed: int) -> RunResult:
        """Take `STEPS` updates from the starting point of a seed; return the result."""
        with create_candidate(self.subject, self.setting) as run:
            opened = run.open(LIMIT)
            run.nudge(NUDGE, seed)
            updates = [run.update(LIMIT) for _ in range(STEPS)]
        return build_case_result(updates, seed, opened["samples"], opened["conditions"])


def build_case_result(updates: Sequence[TimedUpdate], seed: int, samples: int, conditions: Conditions) -> RunResult:
    """Return the result of updates.

    A skipped update takes time but its loss is not compared, unless the loss itself is non-finite.
    """
    taken, timed = 0.0, []
    for update in updates:
        taken += update.seconds
        # A skipped update leaves the weights as they are, so its loss would count twice.
        if update.reason is None or not math.isfinite(update.loss):
            timed.append((taken, float(update.loss)))
    losses = [loss for _, loss in timed[-LAST:]]
    return RunResult(
        seed=seed,
        metric=statistics.fmean(losses) if losses else math.nan,
        seconds=taken,
        samples_per_second=samples / statistics.median(update.seconds for update in updates),
        curve=smooth_loss_curve(timed, min(LAST, len(timed) or 1)),
        skipped=dict(Counter(update.reason for update in updates if update.reason is not None)),
        conditions=conditions,
    )


def race_case_candidates(candidates: Mapping[str, CaseCandidate], names: Sequence[str]) -> BenchTimes:
    """Open all candidates at once, warm them up and time them in turns; the first is the baseline.

    Raises its error if the baseline fails; other candidates that fail are reported.
    """
    failed: dict[str, str] = {}
    with ExitStack() as opened:
        running: dict[str, CandidateProcess | LocalCandidate] = {}
        for name in names:
            running[name] = create_candidate(candidates[name].subject, candidates[name].setting)
            opened.callback(running[name].close)
        for name in names:
            try:
                running[name].open(LIMIT)
                warm_up_candidate(running[name])
            except (HalfstepError, CandidateFailed, CandidateTooSlow) as error:
                if name == names[0]:
                    raise
                failed[name] = format_error_reason(error)
                running.pop(name)
        found = race_candidates(running, baseline=names[0], seconds=RACE_SECONDS)
    gains = {name: convert_speed_to_gain(speed) for name, speed in found.speeds.items()}
    return BenchTimes(gains, found.interrupted, {**failed, **{name: str(why) for name, why in found.failed.items()}})
