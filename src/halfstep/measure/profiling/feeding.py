"""Steps on batches as training reads them: how long they wait, and whether more workers could help."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import torch

from halfstep.errors import WrongUse
from halfstep.measure.arm import Arm
from halfstep.measure.batches import placed
from halfstep.measure.case import Data
from halfstep.measure.conditions import cores
from halfstep.measure.profiling.facts import Feeding, Warming
from halfstep.measure.profiling.warming import Compilations
from halfstep.step.window import Window

_MOST_STEPS, _FEWEST, _READS = 40, 3, 3
_BUFFERED = 2
"""Batches that a worker of torch's DataLoader reads ahead. The first steps eat those, and wait for nothing."""


def fed(arm: Arm, data: Data, seconds: float) -> Feeding:
    """Steps until there are enough of them or the time is up; the ones that ate what was read ahead are left out."""
    read, read_cpu = _reading(data, seconds / 3)
    waits, steps, compiled = _steps(arm, data, seconds)
    number = len(steps)
    each = arm.setting.microbatches
    threads = torch.get_num_threads() if arm.device.type == "cpu" else 0
    counts, compiling, reasons = zip(*compiled, strict=True)
    return Feeding(
        step=(sum(steps) + sum(waits)) / number,
        wait=sum(waits) / number,
        read=read * each,
        read_cpu=read_cpu * each,
        workers=data.workers,
        cores=cores(),
        threads=threads,
        warming=Warming(tuple(steps), counts, compiling, next((why for why in reversed(reasons) if why), "")),
    )


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


def _steps(arm: Arm, data: Data, seconds: float) -> tuple[list[float], list[float], list[tuple[int, float, str]]]:
    deadline = time.perf_counter() + seconds
    left_out = 1 + data.workers * _BUFFERED
    compilations = Compilations()
    waits: list[float] = []
    steps: list[float] = []
    compiled: list[tuple[int, float, str]] = []
    with closing(_endless(data)) as batches:
        while len(steps) < _MOST_STEPS + left_out:
            window, wait = _next(batches, arm)
            start = time.perf_counter()
            arm.stepper.step(arm.loss_fn, Window(window))
            if arm.device.type != "cpu":
                torch.accelerator.synchronize(arm.device)
            took = time.perf_counter() - start
            count, compiling, reason = compilations.since()
            waits.append(wait)
            steps.append(took)
            compiled.append((count, min(compiling, took), reason))
            if time.perf_counter() >= deadline and len(steps) >= _FEWEST:
                break
    cut = min(left_out, len(steps) - _FEWEST)
    return waits[cut:], steps[cut:], compiled[cut:]


def _next(batches: Iterator[Any], arm: Arm) -> tuple[list[Any], float]:
    """The batches of a step, and the seconds until they were there."""
    start = time.perf_counter()
    window = [batch for _, batch in zip(range(arm.setting.microbatches), batches, strict=False)]
    wait = time.perf_counter() - start
    if not window:
        raise WrongUse("the data gave no batch", allowed="a loader with at least one batch", do="look at its samplers")
    return [placed(batch, arm.device, arm.setting.channels_last) for batch in window], wait


def _endless(data: Data) -> Any:
    """Pass after pass; data without a batch ends at once."""
    while True:
        batches = data.batches()
        empty = True
        for batch in batches:
            empty = False
            yield batch
        with suppress(AttributeError):
            batches.close()  # type: ignore[attr-defined]
        if empty:
            return
