"""A run is asked to stop, as a cluster does that needs its machine: whenever, however often, and whomever it asks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.slowed import SlowDisk, SlowEvaluation, SlowStart, SlowSteps, marker
from halfstep.checkpoint.paths import CHECKPOINTS, Disk, leftovers
from halfstep.checkpoint.reading import newest_intact
from tests.support.tiny_task import Tiny

ID = "F33"
WHAT = "SIGTERM at any time saves the run within a step, ends all of its processes with 75, and costs no bit of it"
EACH = {False: 1, True: 5}
SMALL = ("group", "worker", "save", "startup")
"""The variants of the small form: each sees defects that the others do not."""
SETTINGS = {"train.steps": 30, "train.num_workers": 2}
STEPS_PER_EPOCH = 10
STOPPED, LATEST = 75, 10.0
"""The exit code, and the seconds until it."""


@dataclass(frozen=True)
class Variant:
    ready: Callable[[Path, int], bool]
    """Whether it is time, in the folder of a run that is to be stopped after so many steps."""
    send: Callable[[int], None]
    """The signal, to the process of a run."""
    task: type[Tiny] = SlowSteps
    disk: Disk | None = None


def run(full: bool) -> Outcome:
    chance, trials, slowest = random.Random(33), {}, 0.0
    with rig.scratch() as folder:
        assert rig.run(folder / "whole", SETTINGS, task=SlowSteps) == 0, rig.said(folder / "whole")
        whole = rig.ending(folder / "whole")
        for name, variant in VARIANTS.items() if full else [(name, VARIANTS[name]) for name in SMALL]:
            for number in range(EACH[full]):
                place = folder / f"{name.replace(' ', '-')}-{number}"
                trials[f"{name} {number}"], seconds = _stopped(place, variant, chance.randint(1, 22), whole)
                slowest = max(slowest, seconds)
    return outcome(trials, f"ended after {slowest:.2f}s")


def _stopped(folder: Path, variant: Variant, after: int, whole: rig.Ending) -> tuple[str | None, float]:
    process = rig.start(folder, SETTINGS, task=variant.task, disk=variant.disk, before=os.setsid)
    pid = process.pid or 0
    ready = rig.wait_for(lambda: process.exitcode is not None or variant.ready(folder, after))
    step, family = rig.last_step(folder), _family(pid)
    began = time.monotonic()
    with suppress(LookupError, OSError):
        variant.send(pid)
    code = rig.ended(process, LATEST)
    seconds = time.monotonic() - began
    wrong = first_wrong(
        ("it was time", lambda: ready),
        ("it ends with 75, in time", lambda: code == STOPPED and seconds <= LATEST),
        # Before the first step there is nothing to save.
        ("the step is saved", lambda: not step or _saved_step(folder) >= step),
        ("its words name what is saved", lambda: not step or f"step-{_saved_step(folder):08d}" in rig.said(folder)),
        ("no process is left", lambda: rig.wait_for(lambda: not any(map(_lives, family)), 1.0)),
        ("it goes on to the end", lambda: rig.run(folder, SETTINGS, task=SlowSteps) == 0),
        ("it is the same run to the bit", lambda: rig.ending(folder) == whole),
    )
    _end_all(process, family)
    return wrong, seconds


# -- when ------------------------------------------------------------------------------------------------------------


def _after(folder: Path, steps: int) -> bool:
    return rig.last_step(folder) >= steps


def _within_an_epoch(folder: Path, steps: int) -> bool:
    """At the end of each, workers are ended by the run itself: one that ends already passes no signal on."""
    return rig.last_step(folder) >= steps and 1 <= rig.last_step(folder) % STEPS_PER_EPOCH <= 6


def _saving(folder: Path, steps: int) -> bool:
    return rig.last_step(folder) >= steps and bool(leftovers(folder / CHECKPOINTS))


def _begun(folder: Path, steps: int) -> bool:
    return marker(folder).exists()


def _saved_step(folder: Path) -> int:
    verdict, _ = newest_intact(folder / CHECKPOINTS)
    return -1 if verdict is None else verdict.generation.attempt


# -- to whom ---------------------------------------------------------------------------------------------------------


def _to_process(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def _to_group(pid: int) -> None:
    os.killpg(pid, signal.SIGTERM)


def _to_worker(pid: int) -> None:
    os.kill(_workers(pid)[0], signal.SIGTERM)


def _twice(pid: int) -> None:
    for _ in range(2):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.01)


def _workers(pid: int) -> list[int]:
    return [process.pid for process in psutil.Process(pid).children()]


VARIANTS = {
    "process": Variant(_after, _to_process),
    "group": Variant(_after, _to_group),
    "worker": Variant(_within_an_epoch, _to_worker),
    "twice": Variant(_after, _twice),
    "save": Variant(_saving, _to_process, disk=SlowDisk(0.3)),
    "startup": Variant(_begun, _to_process, task=SlowStart),
    "evaluation": Variant(_begun, _to_group, task=SlowEvaluation),
}


# -- what is left ----------------------------------------------------------------------------------------------------


def _family(pid: int) -> list[Any]:
    with suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _end_all(process: BaseProcess, family: list[psutil.Process]) -> None:
    """Nothing of a trial that went wrong may disturb the next one."""
    rig.kill(process)
    for one in filter(_lives, family):
        with suppress(psutil.Error):
            one.kill()
