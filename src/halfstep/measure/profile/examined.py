"""The case of a profile: its step in the requested precision and in strict fp32, and the stages that measure it."""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from halfstep.clock import (
    FEWEST_FOR_INTERVAL,
    compute_median_interval,
    iterate_interleaved_times,
    read_clock_without_queue,
)
from halfstep.errors import PrecisionRefused, WrongUse
from halfstep.launch_variables import count_cores, count_cores_per_rank
from halfstep.measure.batches import count_samples, resize_batch
from halfstep.measure.batches import move_batch as placed_batch
from halfstep.measure.candidate import Candidate
from halfstep.measure.case import SEED, Case, CaseData
from halfstep.measure.conditions import Conditions, collect_conditions
from halfstep.measure.profile.facts import ANOMALY, THREADS, Feeding, ProfileFacts, SlowSwitch, StepTimes, Warming
from halfstep.measure.profile.operations import (
    StepLayers,
    group_misaligned_layers,
    measure_misaligned_layer,
    measure_step_kernels,
    record_step_layers,
)
from halfstep.measure.setting import StepSetting
from halfstep.measure.timing import STABLE, Stopwatch, race_candidates, warm_up_candidate
from halfstep.observe.reachable import find_generators
from halfstep.precision.flags import read_fp32_flags
from halfstep.precision.hardware import describe_device, find_format_support
from halfstep.precision.names import AMP, AUTO, parse_precision
from halfstep.precision.precision import resolve_precision_name
from halfstep.precision.select import choose_precision
from halfstep.random_state import use_seeded_generators
from halfstep.step.activation_checkpointing import checkpoint_activations
from halfstep.step.loss import Counted, split_loss_and_aux
from halfstep.step.report import GRADIENT_OVERFLOW, LOSS_NOT_FINITE, StepReport
from halfstep.step.to_device import move_model_to_device
from halfstep.step.window import Window

_MOST, _LEAST = 8, 3
_LONGEST_REASON = 160


class CompilationCounter:
    """The compilations by torch so far. Without any, asking is free: torch._dynamo is not imported."""

    def __init__(self) -> None:
        self._last = _select_last_record(_list_compilation_records())

    def since(self) -> tuple[int, float, str]:
        """Return the graphs compiled since the last call, their seconds, and the reason for the last recompile."""
        records = _list_compilation_records()
        # torch stores only the last few records, so an index means nothing; the record's identity does.
        known = [place for place, record in enumerate(records) if record is self._last]
        new = records[known[0] + 1 :] if known else records
        self._last = _select_last_record(records)
        reasons = [record.recompile_reason for record in new if record.recompile_reason]
        # The guard that failed, without the advice that torch appends.
        reason = reasons[-1].split("#")[0].split("(HINT")[0].strip()[:_LONGEST_REASON] if reasons else ""
        return len(new), sum(record.duration_us or 0 for record in new) / 1e6, reason


def measure_warm_up(step: Callable[[], object], stopwatch: Stopwatch, seconds: float) -> Warming:
    """Step until times agree and nothing is compiled any more, or until the time is up."""
    deadline = time.perf_counter() + seconds
    compilations = CompilationCounter()
    rows: list[tuple[float, int, float]] = []
    reason = ""
    while len(rows) < _MOST:
        took = stopwatch.seconds(step)
        count, compiling, why = compilations.since()
        rows.append((took, count, min(compiling, took)))
        reason = why or reason
        if len(rows) >= _LEAST and (_is_settled(rows[-_LEAST:]) or time.perf_counter() >= deadline):
            break
    times, counts, compiling_times = zip(*rows, strict=True)
    return Warming(times, counts, compiling_times, reason)


def _is_settled(rows: list[tuple[float, int, float]]) -> bool:
    times = [took for took, _, _ in rows]
    return not any(count for _, count, _ in rows) and max(times) - min(times) <= STABLE * max(times)


def _list_compilation_records() -> list[Any]:
    if "torch._dynamo" not in sys.modules:
        return []
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def _select_last_record(records: list[Any]) -> Any:
    return records[-1] if records else None


_MOST_STEPS, _FEWEST, _READS = 40, 3, 3
_BUFFERED = 2
"""torch's default prefetch_factor: batches that each worker reads ahead. The first steps use those without waiting."""


class _TimedStep(NamedTuple):
    """A step, and the wait before it."""

    wait: float
    step: float
    compiled: tuple[int, float, str]
    place: int
    """Index in its pass over the data."""


def measure_feeding(candidate: Candidate, data: CaseData, seconds: float) -> Feeding:
    """Step until there are enough steps or the time is up; steps on prefetched batches are left out."""
    read, read_cpu = _measure_reading(data, seconds / 3)
    every = _measure_fed_steps(candidate, data, seconds)
    rows = _drop_startup_rows(every, data.workers)
    # If each pass has a single step, all of its wait is for workers to start.
    wait = _compute_mean([row.wait for row in rows if row.place or not data.workers])
    # The extra seconds per step of the first batches of all passes but the first.
    again = every[1:]
    late = [max(0.0, row.wait - wait) for row in again if row.place == 0]
    each = candidate.setting.microbatches
    threads = torch.get_num_threads() if candidate.device.type == "cpu" else 0
    counts, compiling, reasons = zip(*(row.compiled for row in rows), strict=True)
    times = tuple(row.step for row in rows)
    return Feeding(
        step=_compute_mean(times) + wait,
        wait=wait,
        read=read * each,
        read_cpu=read_cpu * each,
        workers=data.workers,
        cores=count_cores(),
        threads=threads,
        warming=Warming(times, counts, compiling, next((why for why in reversed(reasons) if why), "")),
        restarting=sum(late) / len(again) if data.workers and again else 0.0,
    )


def _drop_startup_rows(rows: list[_TimedStep], workers: int) -> list[_TimedStep]:
    """Return the rows without those that waited for workers to start or used prefetched batches."""
    if not workers:
        return rows[min(1, len(rows) - _FEWEST) :]
    # Short passes may end before the prefetched batches are used up.
    for begins in (1 + workers * _BUFFERED, 1):
        found = [row for row in rows if row.place >= begins]
        if len(found) >= _FEWEST:
            return found
    return rows


def _compute_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _measure_reading(data: CaseData, seconds: float) -> tuple[float, float]:
    """Return the seconds to read a batch in this process, and the CPU seconds among them."""
    deadline = time.perf_counter() + seconds
    data.read_batch()  # the first read opens files and fills caches
    walls, busy = [], []
    for _ in range(_READS):
        # Time without a core is the machine's other work, which more workers cannot hide.
        wall, cpu = read_clock_without_queue(), time.process_time()
        data.read_batch()
        walls.append(max(0.0, read_clock_without_queue() - wall))
        busy.append(time.process_time() - cpu)
        if time.perf_counter() >= deadline:
            break
    # The fastest read is the least disturbed one.
    fastest = min(range(len(walls)), key=walls.__getitem__)
    # process_time counts all threads, and may exceed the wall time.
    return walls[fastest], min(busy[fastest], walls[fastest])


def _measure_fed_steps(candidate: Candidate, data: CaseData, seconds: float) -> list[_TimedStep]:
    deadline = time.perf_counter() + seconds
    most = _MOST_STEPS + 1 + data.workers * _BUFFERED
    compilations = CompilationCounter()
    rows: list[_TimedStep] = []
    place = -1
    with closing(_iterate_endless_batches(data)) as batches:
        while len(rows) < most:
            window, wait, begins = _fetch_step_batches(batches, candidate)
            place = 0 if begins else place + 1
            start = time.perf_counter()
            candidate.stepper.step(candidate.loss_fn, Window(window))
            if candidate.device.type != "cpu":
                torch.accelerator.synchronize(candidate.device)
            took = time.perf_counter() - start
            count, compiling, reason = compilations.since()
            rows.append(_TimedStep(wait, took, (count, min(compiling, took), reason), place))
            if time.perf_counter() >= deadline and len(rows) >= _FEWEST:
                break
    return rows


def _fetch_step_batches(batches: Iterator[tuple[bool, Any]], candidate: Candidate) -> tuple[list[Any], float, bool]:
    """Return the batches of a step, the seconds until they arrived, and whether they start a pass.

    Raises `WrongUse` if the data has no batch.
    """
    start = read_clock_without_queue()
    window = [batch for _, batch in zip(range(candidate.setting.microbatches), batches, strict=False)]
    wait = max(0.0, read_clock_without_queue() - start)
    if not window:
        raise WrongUse("the data gave no batch", allowed="a loader with at least one batch", do="check its samplers")
    begins = any(first for first, _ in window)
    return [placed_batch(batch, candidate.device, candidate.setting.channels_last) for _, batch in window], wait, begins


def _iterate_endless_batches(data: CaseData) -> Any:
    """Yield batches pass after pass, each with whether it is the first of a pass; stop if a pass has none."""
    while True:
        batches = data.batches()
        first = True
        for batch in batches:
            yield first, batch
            first = False
        # A recipe's batches are a generator; a DataLoader's iterator has no close().
        with suppress(AttributeError):
            batches.close()  # type: ignore[attr-defined]
        if first:
            return


_STRICT = ("ieee", "none", "")
_PADDED_GROUPS = 4
_LONG_STEP = 1.0
_MOST_PAIRS, _PATIENCE = 60, 4
_LONGEST_FALL = 40
"""Steps in which a loss scale may halve before overflows are attributed to something else."""
_SWITCHES = {"cpu": ("mkldnn.matmul",), "cuda": ("cuda.matmul", "cudnn.conv")}


class PlainStep:
    """A step in fp32 as in the user's own loop: torch's flags are as the user's code has set them.

    Layout, compilation and batch are as in the other candidates.
    """

    def __init__(self, case: Case, device: torch.device, setting: StepSetting) -> None:
        self._model = move_model_to_device(copy.deepcopy(case.model), device, setting.channels_last)
        if setting.recompute:
            checkpoint_activations(self._model)
        if setting.compile:
            self._model.compile()
        self._optimizer = case.optimizer(self._model)
        batch = placed_batch(case.batch, device, setting.channels_last)
        self._batch = resize_batch(batch, setting.batch or count_samples(batch))
        self._loss_fn = case.loss_fn
        self._microbatches = setting.microbatches
        self._stopwatch = Stopwatch(device)

    def step(self) -> None:
        """Take one update."""
        for _ in range(self._microbatches):
            loss, _ = split_loss_and_aux(self._loss_fn(self._model, self._batch))
            (loss.sum / loss.count if isinstance(loss, Counted) else loss).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def seconds(self, steps: int = 1) -> float:
        """Return the seconds of one update, averaged over `steps`."""
        return self._stopwatch.seconds(self.step, steps)


@dataclass(frozen=True)
class MeasuredFacts:
    """The facts after a stage, and the conditions."""

    facts: ProfileFacts
    conditions: Conditions
    interrupted: bool = False
    """Whether Ctrl-C ended the stage early; its facts are valid."""


class ProfiledCase:
    """A case with its stages. It is built once; each stage returns the facts so far with its own."""

    def __init__(self, case: Case, asked: str | None = None, device: str | torch.device | None = None) -> None:
        self.case = case
        self.place = describe_device(device)
        self.device = torch.device(self.place.place)
        self.fp32_means = name_fp32_precision(self.device)
        self.precision = resolve_precision_name(_resolve_precision_name(case, asked, self.place.place))
        self._asked: Candidate | None = None
        self._strict: Candidate | None = None
        self._looked: StepLayers | None = None
        self.passed_over = False
        try:
            self._asked = self._candidate(self.precision.name)
        # Reported as a cause, not as an error.
        except PrecisionRefused:
            self.passed_over = True
        self.facts = self._describe_case()
        self._conditions = collect_conditions(self.device)
        self._interrupted = False

    def measure(self, stage: str, seconds: float) -> MeasuredFacts:
        """Run a stage, none if its name is empty; return all facts so far."""
        if stage:
            # The data set, its loader and the loss function may hold generators; steps and reads draw from all.
            held = find_generators(self.case.loss_fn, self.case.batch, self.case.data)
            with use_seeded_generators(SEED, self.device, held):
                self.facts = STAGES[stage].measure(self, seconds)
        return MeasuredFacts(self.facts, self._conditions, self._interrupted)

    def _describe_case(self) -> ProfileFacts:
        """Return the facts known before any timing."""
        can = find_format_support(self.place, self.precision.needs)
        formats = [name for name in ("bf16", "fp16") if find_format_support(self.place, name).native]
        others = [name for name in formats if name != self.precision.name]
        return ProfileFacts(
            asked=self.precision.name,
            format=self.precision.computes.name,
            kind=self.place.kind,
            native=can.native,
            why=can.reason,
            instead=(formats if can.native else others or ["fp32"])[0] if formats or not can.native else "fp32",
            fp32_means=self.fp32_means,
            passed_over=self.passed_over,
            compiles=self.case.setting.compile,
        )

    def warming(self, seconds: float) -> ProfileFacts:
        """Time the first steps; report compilations, and why a step does not train."""
        reports: list[StepReport] = []
        found = measure_warm_up(lambda: reports.append(self.asked.step()), Stopwatch(self.device), seconds)
        while reports[-1].reason == GRADIENT_OVERFLOW and len(reports) < _LONGEST_FALL:
            reports.append(self.asked.step())  # the loss scale has to settle first
        compiles = self.case.setting.compile or any(found.compiled)
        return replace(self.facts, warming=found, compiles=compiles, idle=_explain_idle_step(reports[-1]))

    def race(self, seconds: float) -> ProfileFacts:
        """Race the requested precision against strict fp32.

        There are always enough pairs for an interval, even if they take longer than `seconds`, up to a multiple of it.
        """
        candidates: dict[str, Any] = {"fp32": self.strict, "asked": self.asked}
        if self.fp32_means not in _STRICT:
            candidates["own fp32"] = PlainStep(self.case, self.device, self.case.setting)
        turn = sum(warm_up_candidate(candidate, seconds=seconds / 4) for candidate in candidates.values())
        pairs = min(_MOST_PAIRS, max(FEWEST_FOR_INTERVAL, int(seconds / 2 / max(turn, 1e-9))))
        raced = race_candidates(candidates, baseline="fp32", pairs=pairs, seconds=_PATIENCE * seconds)
        # Ctrl-C came before the first pair.
        if "asked" not in raced.speeds:
            raise KeyboardInterrupt
        own = raced.speeds["own fp32"].seconds if "own fp32" in raced.speeds else None
        won = raced.speeds["asked"]
        found = StepTimes(raced.speeds["fp32"].seconds, won.seconds, won.speedup, won.low, won.high, won.pairs, own)
        self._interrupted = raced.interrupted
        return replace(self.facts, race=found)

    def kernels(self, seconds: float) -> ProfileFacts:
        """Profile both steps; a long one only once."""
        found = []
        for candidate in (self.asked, self.strict):
            steps = 1 if candidate.seconds() > min(_LONG_STEP, seconds / 8) else 5
            found.append(measure_step_kernels(candidate.step, self.device, steps))
        return replace(self.facts, kernels=found[0], fp32_kernels=found[1])

    def switches(self, seconds: float) -> ProfileFacts:
        """Time the step without what the case's own code has left on: anomaly mode, or fewer threads than cores."""
        found: list[SlowSwitch] = []
        threads, most = torch.get_num_threads(), count_cores_per_rank()
        if torch.is_anomaly_enabled():
            found.append(self._race_without(ANOMALY, "on", lambda: torch.set_anomaly_enabled(False), seconds))
        if self.device.type == "cpu" and threads < most:
            found.append(self._race_without(THREADS, str(threads), lambda: torch.set_num_threads(most), seconds))
        return replace(self.facts, switches=tuple(found))

    def _race_without(self, name: str, value: str, change: Callable[[], object], seconds: float) -> SlowSwitch:
        """Race the step as it is against the step after a change, which is undone in between."""
        anomaly, threads = torch.is_anomaly_enabled(), torch.get_num_threads()

        def restore() -> None:
            torch.set_anomaly_enabled(anomaly)
            torch.set_num_threads(threads)

        def changed() -> float:
            change()
            try:
                return self.asked.seconds()
            finally:
                restore()

        pairs = min(_MOST_PAIRS, max(FEWEST_FOR_INTERVAL, int(seconds / 2 / max(2 * self.asked.seconds(), 1e-9))))
        turns = list(iterate_interleaved_times({"now": self.asked.seconds, "changed": changed}, pairs))
        low, high = compute_median_interval([turn["now"] / turn["changed"] for turn in turns])
        now, without = (statistics.median(turn[name] for turn in turns) for name in ("now", "changed"))
        return SlowSwitch(name, value, now, without, low, high)

    def work(self, _seconds: float) -> ProfileFacts:
        """Count the FLOPs of a step by module and format."""
        return replace(self.facts, work=self.looked.work)

    def padding(self, seconds: float) -> ProfileFacts:
        """Time layers with misaligned channels as they are and padded."""
        # A single layer is timed in the requested precision, so layers that ran in fp32 cannot be compared.
        narrow = self.precision.computes.name not in ("fp32", "tf32")
        groups = group_misaligned_layers(self.looked, without=self.looked.wide if narrow else ())[:_PADDED_GROUPS]
        each = seconds / max(1, len(groups))
        found = [measure_misaligned_layer(layers, share, self.precision, self.device, each) for layers, share in groups]
        return replace(self.facts, misaligned=tuple(found))

    def feeding(self, seconds: float) -> ProfileFacts:
        """Time steps on batches as training reads them; nothing if the case has only one batch."""
        if self.case.data is None:
            return self.facts
        return replace(self.facts, feeding=measure_feeding(self.asked, self.case.data(), seconds))

    @property
    def asked(self) -> Candidate:
        """Return the candidate in the requested precision."""
        assert self._asked is not None, "nothing is measured in a refused precision"
        return self._asked

    @property
    def strict(self) -> Candidate:
        """Return the candidate in strict fp32."""
        if self._strict is None:
            self._strict = self._asked if self.precision.name == "fp32" else self._candidate("fp32")
        assert self._strict is not None
        return self._strict

    @property
    def looked(self) -> StepLayers:
        """Return the layers and FLOPs of a step, measured on first use."""
        if self._looked is None:
            self._looked = record_step_layers(self.asked.model, self.asked.step)
        return self._looked

    def _candidate(self, precision: str) -> Candidate:
        # Not observed: work in another format than requested is to be found here and must not raise an error.
        return Candidate(self.case, replace(self.case.setting, precision=precision), self.device, observe=False)


class ProfileStage(NamedTuple):
    """A stage of the profile, and its share of the time."""

    measure: Callable[[ProfiledCase, float], ProfileFacts]
    share: float


# "warming" comes first: it finds a case that does not run, or whose updates are skipped.
STAGES: dict[str, ProfileStage] = {
    "warming": ProfileStage(ProfiledCase.warming, 0.15),
    "feeding": ProfileStage(ProfiledCase.feeding, 0.15),
    "race": ProfileStage(ProfiledCase.race, 0.3),
    "kernels": ProfileStage(ProfiledCase.kernels, 0.1),
    "work": ProfileStage(ProfiledCase.work, 0.05),
    "switches": ProfileStage(ProfiledCase.switches, 0.1),
    "padding": ProfileStage(ProfiledCase.padding, 0.15),
}


def _explain_idle_step(report: StepReport) -> str:
    """Return why a step did not train; empty if it did."""
    if report.applied:
        return ""
    what = (
        "the loss is not finite" if report.reason == LOSS_NOT_FINITE else f"updates are not applied ({report.reason})"
    )
    return f"{what}: the times of skipped steps mean nothing"


def name_fp32_precision(device: torch.device) -> str:
    """Return how fp32 is multiplied at present: `ieee`, or the faster format that torch's flags allow."""
    now = read_fp32_flags()
    found = [now[name] for name in _SWITCHES.get(device.type, ())]
    if device.type == "cpu":
        # Not among the flags that `read_fp32_flags` reports.
        found.append(torch.backends.mkldnn.conv.fp32_precision)  # type: ignore[attr-defined]
    return next((word for word in found if word not in _STRICT), "ieee")


def _resolve_precision_name(case: Case, asked: str | None, place: str) -> str:
    """Return the precision's name. A case without one gets `auto`: there is no reason to profile fp32."""
    named = parse_precision(asked or case.requested_precision)
    if named.name not in (AUTO, AMP):
        return named.name
    return choose_precision(named.name, device=place, fallback=True).precision.name
