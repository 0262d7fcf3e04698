"""Compare one recipe, or the user's own case, in several precisions with the same seeds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from halfstep.errors import HalfstepError, WrongUse, format_error_reason
from halfstep.files import read_json, write_json
from halfstep.json_data import convert_to_json_data
from halfstep.measure.bench.case_runs import METRIC, CaseCandidate, race_case_candidates
from halfstep.measure.bench.comparison import (
    BenchMetric,
    BenchTimes,
    CandidateConfig,
    Gain,
    RunFailed,
    RunResult,
    UpdateMemory,
    build_bench_rows,
    check_distinct_files,
    format_candidate_filename,
)
from halfstep.measure.bench.page import Bench
from halfstep.measure.case import Case, LossFunction
from halfstep.measure.conditions import Conditions, collect_conditions
from halfstep.measure.local_candidate import create_candidate
from halfstep.measure.recipe_opener import find_recipe_opener
from halfstep.measure.setting import StepSetting
from halfstep.measure.subject import Measurable, Settings, Subject, resolve_subject
from halfstep.measure.worker_process import CandidateFailed, CandidateTooSlow
from halfstep.precision.names import parse_precision
from halfstep.random_state import preserve_random_state
from halfstep.status_line import OnProgress

OneRun = Callable[[int], RunResult]
"""Trains one candidate with a seed."""
Race = Callable[[Sequence[str]], BenchTimes]
"""Times the named candidates in turns."""


def run_bench_arms(
    arms: Mapping[str, OneRun],
    *,
    name: str,
    seeds: Sequence[int],
    metric: BenchMetric,
    conditions: Conditions,
    settings: Sequence[str] = (),
    memories: Mapping[str, Callable[[], UpdateMemory]] | None = None,
    race: Race | None = None,
    configs: Mapping[str, CandidateConfig] | None = None,
    price_per_hour: float | None = None,
    progress: OnProgress | None = None,
) -> Bench:
    """Run all candidates with all seeds and return the bench; the first candidate is the baseline.

    `configs` describes the candidates whose name is not their precision. A candidate that fails once is not run again.
    Each seed runs all candidates, starting with another one each time, so that changes of the machine affect all
    equally. Raises `WrongUse` without candidates.
    """
    if not arms:
        raise WrongUse("a bench without arms", allowed="a baseline first, then others", do="name at least one")
    work = _BenchRunner(arms, seeds, memories or {}, race, progress)
    try:
        work.do()
    except KeyboardInterrupt:
        work.interrupted = True
    return Bench(
        name=name,
        metric=metric,
        seeds=tuple(seeds),
        rows=build_bench_rows(work.runs, work.failed, metric, work.memories, work.gains, configs or {}),
        settings=tuple(settings),
        conditions=conditions,
        price_per_hour=price_per_hour,
        interrupted=work.interrupted,
        notes=tuple(work.notes),
        raced=bool(work.gains),
    )


class _BenchRunner:
    """The work of a bench and its results so far."""

    def __init__(
        self,
        arms: Mapping[str, OneRun],
        seeds: Sequence[int],
        measure: Mapping[str, Callable[[], UpdateMemory]],
        race: Race | None,
        progress: OnProgress | None,
    ) -> None:
        self._arms, self._seeds, self._measure, self._race = arms, seeds, measure, race
        self._tell = progress or (lambda done, of: None)
        self._done = 0
        self.runs: dict[str, list[RunResult]] = {name: [] for name in arms}
        self.failed: dict[str, str] = {}
        self.memories: dict[str, UpdateMemory] = {}
        self.gains: dict[str, Gain] = {}
        self.notes: list[str] = []
        self.interrupted = False

    def do(self) -> None:
        """Measure memory, run all seeds, then race the candidates that did not fail."""
        self._tell(0, self._jobs())
        # Memory first: a candidate that the device refuses fails here and is never trained.
        for name in self._measure:
            self._run_one(name, partial(self._remember, name))
        names = list(self._arms)
        for turn, seed in enumerate(self._seeds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                self._run_one(name, partial(self._run, name, seed))
        if self._race is not None:
            left = [name for name in names if name not in self.failed]
            # Without the baseline there is nothing to race against.
            if names[0] in left:
                self._time(left, self._race)
            self._advance()

    def _time(self, names: Sequence[str], race: Race) -> None:
        """Time the candidates. If the race fails, the results are kept and speed is that of the runs."""
        try:
            raced = race(names)
        except (HalfstepError, CandidateFailed, CandidateTooSlow) as error:
            self.notes.append(f"speed is from the runs, as the race failed: {format_error_reason(error)}")
            return
        self.gains.update({name: gain for name, gain in raced.gains.items() if name not in raced.failed})
        self.interrupted = raced.interrupted
        self.notes += [f"{name}: speed is from its runs, as it failed in the race: {why}"
                       for name, why in raced.failed.items()]  # fmt: skip

    def _remember(self, name: str) -> None:
        self.memories[name] = self._measure[name]()

    def _run(self, name: str, seed: int) -> None:
        self.runs[name].append(self._arms[name](seed))

    def _run_one(self, name: str, work: Callable[[], None]) -> None:
        if name not in self.failed:
            try:
                work()
            except (HalfstepError, RunFailed, CandidateFailed, CandidateTooSlow) as error:
                self.failed[name] = format_error_reason(error)
        self._advance()

    def _advance(self) -> None:
        self._done += 1
        self._tell(self._done, self._jobs())

    def _jobs(self) -> int:
        return len(self._measure) + len(self._arms) * len(self._seeds) + (self._race is not None)


@dataclass(frozen=True)
class MemoryMeasurement:
    """A memory measurement, made once for each candidate and saved in a file.

    It comes before the runs, so that a candidate that the device refuses is not trained at all.
    """

    subject: Subject | Case
    setting: StepSetting | None = None
    """None means the case's own setting."""
    saved: Path | None = None
    identity: Mapping[str, object] | None = None

    def __call__(self) -> UpdateMemory:
        found = read_json(self.saved) if self.saved else None
        if isinstance(found, dict) and found.get("identity") == self.identity:
            return UpdateMemory(*(found["memory"][key] for key in ("measured", "parts", "note")))
        setting = self.setting or self.subject.open().setting
        with create_candidate(self.subject, setting) as candidate:
            place = candidate.open()["conditions"]["place"]
            measured = candidate.memory()
        memory = _add_predicted_parts(measured, self.subject, setting, place)
        if self.saved:
            write_json(self.saved, {"identity": self.identity, "memory": convert_to_json_data(memory)})
        return memory


def _add_predicted_parts(measured: int, subject: Subject | Case, setting: StepSetting, place: str) -> UpdateMemory:
    from halfstep.measure.memory.estimate import estimate_ledger

    try:
        return UpdateMemory(measured, dict(estimate_ledger(subject.open, setting, place).at_peak))
    except (HalfstepError, RuntimeError, NotImplementedError, TypeError) as error:
        # A model that fake tensors cannot run is still measured.
        return UpdateMemory(measured, None, f"not predicted: {str(error).splitlines()[0] if str(error) else error!r}")


BASELINE = "fp32"
"""Strict fp32: nothing is computed in fewer bits."""


def bench(
    subject: Measurable,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    *,
    precisions: Sequence[str] = (BASELINE, "bf16"),
    seeds: int = 3,
    settings: Settings = (),
    arms: Mapping[str, Sequence[str]] | None = None,
    folder: Path | None = None,
    price_per_hour: float | None = None,
    progress: OnProgress | None = None,
) -> Bench:
    """Compare precisions with strict fp32: train a recipe with each seed, or time the step of a model.

    Plain fp32 is always the first candidate. Ctrl-C returns the results so far.

    Args:
        subject: A model, "module:callable", or a recipe by name or path.
        loss_fn: `loss_fn(model, batch)`, for a model.
        batch: A batch, for a model.
        precisions: The precisions to compare.
        seeds: The number of seeds.
        settings: Settings that change the recipe.
        arms: Settings by name, for candidates that differ in more than the precision.
        folder: The folder for the runs of a recipe; finished runs there are reused. Without it they are deleted.
        price_per_hour: The price of the machine, for the cost of each run.
        progress: A callback for the progress.

    Returns:
        The bench: accuracy, time and memory of each candidate.

    Raises:
        WrongUse: The arguments are invalid.
        FolderTaken: The folder has other runs.
    """
    given = resolve_subject(subject, loss_fn, batch, settings)
    changes = _resolve_arms(precisions, arms)
    if seeds < 1:
        raise WrongUse(f"{seeds} seeds", allowed="1 or more; 3 or more for a verdict on accuracy", do="--seeds 3")
    if price_per_hour is not None and not 0.0 <= price_per_hour < float("inf"):
        raise WrongUse(f"a price of {price_per_hour} an hour", allowed="0 or more", do="--price-per-hour 2.5")
    run = partial(
        run_bench_arms,
        name=given.text if isinstance(given, Subject) else given.name,
        settings=given.settings if isinstance(given, Subject) else (),
        seeds=range(1, seeds + 1),
        price_per_hour=price_per_hour,
        progress=progress,
    )
    if isinstance(given, Case) or given.is_own_code:
        # A model may be built again when it is copied.
        with preserve_random_state():
            return _bench_case(given, changes, arms, run)
    if folder is not None:
        return find_recipe_opener().bench(given.text, given.settings, changes, folder.absolute(), seeds, run)
    with tempfile.TemporaryDirectory(prefix="halfstep-bench-") as place:
        return find_recipe_opener().bench(given.text, given.settings, changes, Path(place), seeds, run)


def _resolve_arms(precisions: Sequence[str], arms: Mapping[str, Sequence[str]] | None) -> dict[str, tuple[str, ...]]:
    """Return settings by the name of the candidate, fp32 first."""
    found = {BASELINE: (f"precision={BASELINE}",)}
    if arms is not None:
        if BASELINE in arms:
            raise WrongUse(
                f"an arm named {BASELINE}", allowed="other names: the first arm has this one", do="rename the arm"
            )
        check_distinct_files({name: format_candidate_filename(name) for name in arms})
        return {**found, **{name: tuple(changed) for name, changed in arms.items()}}
    names = [parse_precision(word).name for word in precisions]
    return {**found, **{name: (f"precision={name}",) for name in names}}


def _bench_case(
    subject: Subject | Case,
    changes: Mapping[str, object],
    arms: Mapping[str, Sequence[str]] | None,
    run: Callable[..., Bench],
) -> Bench:
    if arms is not None:
        raise build_case_settings_error(subject.name)
    subject.open()  # invalid input is found before anything is measured
    found = {name: CaseCandidate(subject, StepSetting(name)) for name in changes}
    return run(
        found,
        metric=METRIC,
        conditions=collect_conditions(),
        memories={name: MemoryMeasurement(candidate.subject, candidate.setting) for name, candidate in found.items()},
        race=partial(race_case_candidates, found),
    )


def build_case_settings_error(name: str) -> WrongUse:
    """Return the error for arms with settings, of which a case has none."""
    return WrongUse(
        f"arms with settings for the case {name}",
        allowed="settings change a RECIPE; the arms of a case are precisions",
        do="give precisions alone, or a recipe",
    )
