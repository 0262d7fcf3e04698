"""A process that reads samples is killed, crashes, or gets stuck in a sample: nobody waits for it for ever."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from faults import rig
from faults.f33_sigterm import STEPS_PER_EPOCH
from faults.judged import Compared, first_wrong, outcome
from faults.outcome import Outcome
from faults.processes import end_all, family_of, lives
from faults.slowed import SlowSteps
from halfstep.journal.jsonl import read_events
from tests.support.tiny_task import Points

ID = "F09"
WHAT = "a dead worker ends the run with 76 without changing a bit; a hanging sample is named and replaced"
TIMES = {False: 1, True: 10}
SETTINGS: dict[str, Any] = {"train.steps": 30, "train.num_workers": 2}
DEATHS = (signal.SIGKILL, signal.SIGSEGV)
LOST, LATEST, ORPHANS = 76, 15.0, 5.0
TIMEOUT = 2.0
"""Seconds for a sample, as `data.timeout`."""


def run(full: bool) -> Outcome:
    chance, trials, compared, slowest = random.Random(9), {}, Compared(), 0.0
    with rig.scratch() as folder:
        assert rig.run(folder / "whole", SETTINGS, task=SlowSteps) == 0, rig.said(folder / "whole")
        whole = rig.ending(folder / "whole")
        for number in range(TIMES[full]):
            for death in DEATHS:
                name = f"{death.name} {number}"
                wrong, seconds = _died(folder / name.replace(" ", "-"), death, chance.randint(4, 24), whole, compared)
                trials[name], slowest = wrong, max(slowest, seconds)
            trials[f"stuck {number}"] = _stuck(folder / f"stuck-{number}", chance.randrange(80), compared)
    return outcome(trials, f"ended after {slowest:.1f}s, {compared}")


def _died(
    folder: Path, death: signal.Signals, after: int, whole: rig.Ending, compared: Compared
) -> tuple[str | None, float]:
    process = rig.start(folder, SETTINGS, task=SlowSteps)
    pid = process.pid or 0
    ready = rig.wait_for(lambda: process.exitcode is not None or (_within_an_epoch(folder, after) and _workers(pid)))
    family, began = family_of(pid), time.monotonic()
    for worker in _workers(pid)[:1]:
        os.kill(worker, death)
    code = rig.ended(process, LATEST)
    seconds = time.monotonic() - began
    wrong = first_wrong(
        ("it was time", lambda: ready),
        (f"exit code {code}", lambda: code == LOST),
        (f"it says which: {rig.said(folder)}", lambda: "reads samples" in rig.said(folder)),
        ("no process is left", lambda: rig.wait_for(lambda: not any(map(lives, family)), ORPHANS)),
        ("a restart comes to the end", lambda: rig.run(folder, SETTINGS, task=SlowSteps) == 0),
        ("it is the same run to the bit", lambda: compared.counted(rig.ending(folder) == whole)),
    )
    end_all(family)
    return wrong, seconds


def _within_an_epoch(folder: Path, steps: int) -> bool:
    """Not at its end, where the workers are ended by the run itself."""
    return rig.last_step(folder) >= steps and 1 <= rig.last_step(folder) % STEPS_PER_EPOCH <= 5


def _workers(pid: int) -> list[int]:
    try:
        return [process.pid for process in psutil.Process(pid).children()]
    except psutil.Error:
        return []


@dataclass
class Stuck:
    """One sample that no process gets done with."""

    number: int

    def __call__(self) -> None:
        read, trainer = Points.read, os.getpid()

        def stuck(points: Points, index: int) -> Any:
            if index == self.number and len(points) == 80 and os.getpid() != trainer:
                time.sleep(1e6)
            return read(points, index)

        Points.read = stuck  # type: ignore[method-assign]


def _stuck(folder: Path, number: int, compared: Compared) -> str | None:
    """Better than an end: the sample counts as unreadable, and the run is that of a set in which it is."""
    settings = {**SETTINGS, "data.timeout": TIMEOUT}
    code = rig.run(folder, settings, before=Stuck(number))
    without = folder.with_name(f"{folder.name}-without")
    assert rig.run(without, {**settings, "data.unreadable": [number]}) == 0, rig.said(without)
    told = [event for event in read_events(folder / "journal.jsonl") if event["event"] == "bad_sample"]
    return first_wrong(
        (f"exit code {code}: {rig.said(folder)}", lambda: code == 0),
        (f"it is named: {told}", lambda: f"point {number}" in str(told) and "data.timeout" in str(told)),
        ("it is the run without it", lambda: compared.counted(_losses(folder) == _losses(without))),
    )


def _losses(folder: Path) -> tuple[str, ...]:
    return rig.ending(folder).losses
