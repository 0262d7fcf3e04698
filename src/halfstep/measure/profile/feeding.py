"""Time steps on batches as training reads them: how long they wait, and whether more workers would help."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

import torch

from halfstep.errors import WrongUse
from halfstep.measure.batches import placed
from halfstep.measure.candidate import Candidate
from halfstep.measure.case import CaseData
from halfstep.measure.profile.facts import Feeding, Warming
from halfstep.measure.timing import STABLE, Stopwatch
from halfstep.step.window import Window
from halfstep.train.machine import cores

# -- warming ----------------------------------------------------------------------------------------------------------
# Time the first steps one by one, and check whether torch compiles again in each of them.


_MOST, _LEAST = 8, 3
_LONGEST_REASON = 160


class Compilations:
    """The compilations by torch so far. Without any, asking is free: torch._dynamo is not imported."""

    def __init__(self) -> None:
        self._last = _last(_records())

    def since(self) -> tuple[int, float, str]:
        """Return the graphs compiled since the last call, their seconds, and the reason for the last recompile."""
        records = _records()
        # torch stores only the last few records, so an index means nothing; the record's identity does.
        known = [place for place, record in enumerate(records) if record is self._last]
        new = records[known[0] + 1 :] if known else records
        self._last = _last(records)
        reasons = [record.recompile_reason for record in new if record.recompile_reason]
        return len(new), sum(record.duration_us or 0 for record in new) / 1e6, _short(reasons[-1]) if reasons else ""


def first_steps(step: Callable[[], object], stopwatch: Stopwatch, seconds: float) -> Warming:
    """Step until times agree and nothing is compiled any more, or until the time is up."""
    deadline = time.perf_counter() + seconds
    compilations = Compilations()
    rows: list[tuple[float, int, float]] = []
    reason = ""
    while len(rows) < _MOST:
        took = stopwatch.seconds(step)
        count, compiling, why = compilations.since()
        rows.append((took, count, min(compiling, took)))
        reason = why or reason
        if len(rows) >= _LEAST and (_settled(rows[-_LEAST:]) or time.perf_counter() >= deadline):
            break
    times, counts, compiling_times = zip(*rows, strict=True)
    return Warming(times, counts, compiling_times, reason)


def _settled(rows: list[tuple[float, int, float]]) -> bool:
    times = [took for took, _, _ in rows]
    return not any(count for _, count, _ in rows) and max(times) - min(times) <= STABLE * max(times)


def _records() -> list[Any]:
    if "torch._dynamo" not in sys.modules:
        return []
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def _last(records: list[Any]) -> Any:
    return records[-1] if records else None


def _short(reason: str) -> str:
    """Return the guard that failed, without the advice that torch appends."""
    return reason.split("#")[0].split("(HINT")[0].strip()[:_LONGEST_REASON]


# -- feeding ----------------------------------------------------------------------------------------------------------


_MOST_STEPS, _FEWEST, _READS = 40, 3, 3
_BUFFERED = 2
"""torch's default prefetch_factor: batches that each worker reads ahead. The first steps use those without waiting."""


class _Row(NamedTuple):
    """A step, and the wait before it."""

    wait: float
    step: float
    compiled: tuple[int, float, str]
    place: int
    """Index in its pass over the data."""


def fed(arm: Candidate, data: CaseData, seconds: float) -> Feeding:
    """Step until there are enough steps or the time is up; steps on prefetched batches are left out."""
    read, read_cpu = _reading(data, seconds / 3)
    every = _steps(arm, data, seconds)
    rows = _in_full_run(every, data.workers)
    # If each pass has a single step, all of its wait is for workers to start.
    wait = _mean([row.wait for row in rows if row.place or not data.workers])
    each = arm.setting.microbatches
    threads = torch.get_num_threads() if arm.device.type == "cpu" else 0
    counts, compiling, reasons = zip(*(row.compiled for row in rows), strict=True)
    times = tuple(row.step for row in rows)
    return Feeding(
        step=_mean(times) + wait,
        wait=wait,
        read=read * each,
        read_cpu=read_cpu * each,
        workers=data.workers,
        cores=cores(),
        threads=threads,
        warming=Warming(times, counts, compiling, next((why for why in reversed(reasons) if why), "")),
        restarting=_restarting(every, wait) if data.workers else 0.0,
    )


def _in_full_run(rows: list[_Row], workers: int) -> list[_Row]:
    """Return the rows without those that waited for workers to start or used prefetched batches."""
    if not workers:
        return rows[min(1, len(rows) - _FEWEST) :]
    # Short passes may end before the prefetched batches are used up.
    for begins in (1 + workers * _BUFFERED, 1):
        found = [row for row in rows if row.place >= begins]
        if len(found) >= _FEWEST:
            return found
    return rows


def _restarting(rows: list[_Row], wait: float) -> float:
    """Return the extra seconds per step of the first batches of all passes but the first."""
    again = rows[1:]
    late = [max(0.0, row.wait - wait) for row in again if row.place == 0]
    return sum(late) / len(again) if again else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _reading(data: CaseData, seconds: float) -> tuple[float, float]:
    """Return the seconds to read a batch in this process, and the CPU seconds among them."""
    deadline = time.perf_counter() + seconds
    data.read_batch()  # the first read opens files and fills caches
    walls, busy = [], []
    for _ in range(_READS):
        wall, cpu = time.perf_counter(), time.process_time()
        data.read_batch()
        walls.append(time.perf_counter() - wall)
        busy.append(time.process_time() - cpu)
        if time.perf_counter() >= deadline:
            break
    # The fastest read is the least disturbed one.
    fastest = min(range(len(walls)), key=walls.__getitem__)
    # process_time counts all threads, and may exceed the wall time.
    return walls[fastest], min(busy[fastest], walls[fastest])


def _steps(arm: Candidate, data: CaseData, seconds: float) -> list[_Row]:
    deadline = time.perf_counter() + seconds
    most = _MOST_STEPS + 1 + data.workers * _BUFFERED
    compilations = Compilations()
    rows: list[_Row] = []
    place = -1
    with closing(_endless(data)) as batches:
        while len(rows) < most:
            window, wait, begins = _next(batches, arm)
            place = 0 if begins else place + 1
            start = time.perf_counter()
            arm.stepper.step(arm.loss_fn, Window(window))
            if arm.device.type != "cpu":
                torch.accelerator.synchronize(arm.device)
            took = time.perf_counter() - start
            count, compiling, reason = compilations.since()
            rows.append(_Row(wait, took, (count, min(compiling, took), reason), place))
            if time.perf_counter() >= deadline and len(rows) >= _FEWEST:
                break
    return rows


def _next(batches: Iterator[tuple[bool, Any]], arm: Candidate) -> tuple[list[Any], float, bool]:
    """Return the batches of a step, the seconds until they arrived, and whether a pass begins with them.

    Raises `WrongUse` if the data has no batch.
    """
    start = time.perf_counter()
    window = [batch for _, batch in zip(range(arm.setting.microbatches), batches, strict=False)]
    wait = time.perf_counter() - start
    if not window:
        raise WrongUse("the data gave no batch", allowed="a loader with at least one batch", do="look at its samplers")
    begins = any(first for first, _ in window)
    return [placed(batch, arm.device, arm.setting.channels_last) for _, batch in window], wait, begins


def _endless(data: CaseData) -> Any:
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
