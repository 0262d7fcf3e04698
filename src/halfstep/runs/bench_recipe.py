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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from halfstep.checkpoint.paths import CHECKPOINTS
from halfstep.errors import ENDED_FROM_OUTSIDE, FolderTaken, WrongUse
from halfstep.files import read_json, write_json
from halfstep.journal.events import Event
from halfstep.journal.jsonl import read_events
from halfstep.json_data import convert_to_strict_json
from halfstep.measure.bench.bench import BASELINE, MemoryMeasurement, build_case_settings_error
from halfstep.measure.bench.comparison import (
    BenchMetric,
    CandidateConfig,
    RunFailed,
    RunResult,
    format_candidate_filename,
    list_usual_configs,
    smooth_loss_curve,
)
from halfstep.measure.conditions import collect_conditions
from halfstep.measure.subject import Subject
from halfstep.measure.worker_process import end_process
from halfstep.numbers import to_float
from halfstep.precision.names import parse_precision
from halfstep.recipe.names import PRECISION_WORDS, parse_typed_settings
from halfstep.recipe.sources import read_recipe
from halfstep.runs.registry import find_task_class, find_task_schema
from halfstep.runs.resolve import resolve_run_recipe

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


B = TypeVar("B")
_SAME = ("device", "place", "driver", "halfstep", "torch", "python", "threads", "cores")
"""Conditions that must be equal for a finished run to be reused."""
_OURS = ("train.seed", "run.dir")


def bench_recipe(
    subject: Subject, changes: Mapping[str, tuple[str, ...]], folder: Path, seeds: int, run: Callable[..., B]
) -> B:
    """Train the recipe of each candidate with each seed; `run` runs the bench of all of them."""
    recipes = {name: _resolve_candidate_recipe(subject, changed) for name, changed in changes.items()}
    configs = {
        name: CandidateConfig(recipe.precision, recipe.train.batch_size * recipe.train.microbatches, changes[name])
        for name, recipe in recipes.items()
    }
    task = find_task_class(recipes[BASELINE].task)(recipes[BASELINE])  # the metric may depend on the data
    now = collect_conditions()
    same = {key: value for key, value in now.items() if key in _SAME}
    time_limit = RunTimeLimit()
    runs, memories = {}, {}
    for name, changed in changes.items():
        words = (*subject.settings, *changed)
        identity = {"recipe": recipes[name].model_dump(mode="json"), **same}
        runs[name] = RecipeCandidate(subject.text, words, folder, name, identity, time_limit)
        memories[name] = MemoryMeasurement(Subject(subject.text, words), None, runs[name].beside("memory"), identity)
    _check_folder_results(runs.values(), range(1, seeds + 1), folder)
    metric = BenchMetric(task.metric, task.higher_is_better)
    return run(runs, metric=metric, conditions=now, memories=memories, configs=configs)


def list_usual_arms(subject: Subject, precision: str) -> dict[str, tuple[str, ...]]:
    """Return the usual configurations as `arms` of `bench`.

    They are mixed precision alone, with twice the recipe's batch, and compiled. Raises `WrongUse` for a case.
    """
    if subject.is_own_code:
        raise build_case_settings_error(subject.text)
    return list_usual_configs(_resolve_candidate_recipe(subject, ()).train.batch_size, parse_precision(precision).name)


def _check_folder_results(arms: Iterable[RecipeCandidate], seeds: Sequence[int], folder: Path) -> None:
    """Raise `FolderTaken` if the folder has results of another bench; they are not overwritten."""
    taken = next((found for candidate in arms if (found := candidate.others(seeds))), None)
    if taken is not None:
        raise FolderTaken(
            f"{folder}, which has runs of another recipe, setting, device or version ({taken.name})",
            allowed="a folder for each bench; the same command resumes in its own",
            do="--out NEW",
        )


def _resolve_candidate_recipe(subject: Subject, changed: tuple[str, ...]) -> Any:
    """Return the complete recipe of a candidate, except for what differs between seeds."""
    found = read_recipe(subject.text)
    schema = find_task_schema(str(found.raw.get("task")))
    for key, _ in parse_typed_settings(list(subject.settings), schema):
        if key in _OURS or key in PRECISION_WORDS or key == "precision":
            raise WrongUse(
                f"{key} among the settings of a bench",
                allowed="precisions by --precisions, seeds by --seeds, a folder by --out; any other setting as usual",
                do=f"leave out {key}",
            )
    # Fixed values, so that the identity of a run does not depend on its seed and folder.
    return resolve_run_recipe(found, [*subject.settings, *changed, "train.seed=0", "run.dir=bench"]).recipe
