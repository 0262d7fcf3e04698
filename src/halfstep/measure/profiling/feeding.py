"""Steps on batches as training reads them: how long they wait, and whether more workers could help."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

import torch

from halfstep import world
from halfstep.errors import WrongUse
from halfstep.measure.arm import Arm
from halfstep.measure.batches import placed
from halfstep.measure.case import Data
from halfstep.measure.profiling.facts import Feeding, Warming
from halfstep.measure.profiling.warming import Compilations
from halfstep.step.window import Window

_MOST_STEPS, _FEWEST, _READS = 40, 3, 3
_BUFFERED = 2
"""Batches that a worker of torch's DataLoader reads ahead. The first steps eat those, and wait for nothing."""


class _Row(NamedTuple):
    """A step, and the wait before it."""

    wait: float
    step: float
    compiled: tuple[int, float, str]
    place: int
    """In its pass over the data, from 0."""


def fed(arm: Arm, data: Data, seconds: float) -> Feeding:
    """Steps until there are enough of them or the time is up; the ones that ate what was read ahead are left out."""
    read, read_cpu = _reading(data, seconds / 3)
    every = _steps(arm, data, seconds)
    rows = _in_full_run(every, data.workers)
    # Where each pass is over with its first step, all of the wait is for workers to start.
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
        cores=world.cores(),
        threads=threads,
        warming=Warming(times, counts, compiling, next((why for why in reversed(reasons) if why), "")),
        restarting=_restarting(every, wait) if data.workers else 0.0,
    )


def _in_full_run(rows: list[_Row], workers: int) -> list[_Row]:
    """Without those which waited for workers to start, or for nothing because the first batches were read ahead."""
    if not workers:
        return rows[min(1, len(rows) - _FEWEST) :]
    for begins in (1 + workers * _BUFFERED, 1):
        found = [row for row in rows if row.place >= begins]
        if len(found) >= _FEWEST:
            return found
    return rows


def _restarting(rows: list[_Row], wait: float) -> float:
    """Seconds for each step that the beginnings of all passes but the very first took longer than other steps."""
    again = rows[1:]
    late = [max(0.0, row.wait - wait) for row in again if row.place == 0]
    return sum(late) / len(again) if again else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _reading(data: Data, seconds: float) -> tuple[float, float]:
    """Seconds of a batch in this process, and of computing among them."""
    deadline = time.perf_counter() + seconds
    data.read_batch()  # files and caches are opened by the first
    walls, busy = [], []
    for _ in range(_READS):
        wall, cpu = time.perf_counter(), time.process_time()
        data.read_batch()
        walls.append(time.perf_counter() - wall)
        busy.append(time.process_time() - cpu)
        if time.perf_counter() >= deadline:
            break
    fastest = min(range(len(walls)), key=walls.__getitem__)
    return walls[fastest], min(busy[fastest], walls[fastest])


def _steps(arm: Arm, data: Data, seconds: float) -> list[_Row]:
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


def _next(batches: Iterator[tuple[bool, Any]], arm: Arm) -> tuple[list[Any], float, bool]:
    """The batches of a step, the seconds until they were there, and whether a pass over the data begins with them."""
    start = time.perf_counter()
    window = [batch for _, batch in zip(range(arm.setting.microbatches), batches, strict=False)]
    wait = time.perf_counter() - start
    if not window:
        raise WrongUse("the data gave no batch", allowed="a loader with at least one batch", do="look at its samplers")
    begins = any(first for first, _ in window)
    return [placed(batch, arm.device, arm.setting.channels_last) for _, batch in window], wait, begins


def _endless(data: Data) -> Any:
    """Pass after pass, each batch with whether it is the first of one; data without a batch ends at once."""
    while True:
        batches = data.batches()
        first = True
        for batch in batches:
            yield first, batch
            first = False
        with suppress(AttributeError):
            batches.close()  # type: ignore[attr-defined]
        if first:
            return
