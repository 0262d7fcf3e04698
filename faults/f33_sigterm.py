"""A run is asked to stop, as a cluster does that needs its machine: whenever, however often, and whomever it asks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from faults import on_two, rig
from faults.job import HALVED, Job, saved_step
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.processes import end_all, family_of, lives
from faults.slowed import SlowDisk, SlowEvaluation, SlowStart, SlowSteps, marker
from halfstep.checkpoint.paths import CHECKPOINTS, Disk, list_drafts
from tests.support.tiny_task import Tiny

ID = "F33"
WHAT = "SIGTERM at any time saves the run within a step, ends all of its processes with 75, and changes no bit"
EACH = {False: 1, True: 5}
SMALL = {1: ("group", "worker", "save", "startup"), 2: ("process", "evaluation")}
"""The variants of the small form, by the number of ranks: each sees defects that the others do not."""
SETTINGS = {1: {"train.steps": 30, "train.num_workers": 2}, 2: {**HALVED, "train.steps": 30, "train.num_workers": 2}}
STEPS_PER_EPOCH = 10
STOPPED, LATEST = 75, 10.0
"""The exit code, and the seconds until it."""


@dataclass(frozen=True)
class Variant:
    ready: Callable[[Path, int], bool]
    """Whether it is time, in the folder of a run that is to be stopped after so many steps."""
    send: Callable[[list[int]], None]
    """The signal, to the ranks of a run: one process each."""
    task: type[Tiny] = SlowSteps
    disk: Disk | None = None


def run(full: bool) -> Outcome:
    chance, trials, slowest = random.Random(33), {}, 0.0
    with rig.scratch() as folder:
        for ranks, settings in SETTINGS.items():
            whole = folder / f"whole-{ranks}"
            assert Job(whole, ranks).run(settings, task=SlowSteps) == [0] * ranks, rig.said(whole, 0)
            for name in VARIANTS if full else SMALL[ranks]:
                for number in range(EACH[full]):
                    job = Job(folder / f"{name}-{ranks}-{number}", ranks)
                    trial = f"{name} {number}, {_named(ranks)}"
                    trials[trial], seconds = _stopped(job, VARIANTS[name], chance.randint(1, 22), whole)
                    slowest = max(slowest, seconds)
    return outcome(trials, f"ended after {slowest:.2f}s")


def _named(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _stopped(job: Job, variant: Variant, after: int, whole: Path) -> tuple[str | None, float]:
    folder, settings = job.folder, SETTINGS[job.size]
    job.start(settings, task=variant.task, disks=dict.fromkeys(range(job.size), variant.disk), before=os.setsid)
    pids = [job.pid(rank) for rank in range(job.size)]
    ready = rig.wait_for(lambda: job.ranks[0].exitcode is not None or variant.ready(folder, after))
    step, family = rig.last_step(folder), [one for pid in pids for one in family_of(pid)]
    began = time.monotonic()
    with suppress(LookupError, OSError):
        variant.send(pids)
    codes = job.codes(LATEST)
    seconds, saved = time.monotonic() - began, saved_step(folder)
    wrong = first_wrong(
        ("it was time", lambda: ready),
        (f"exit codes {codes} after {seconds:.1f} s", lambda: codes == [STOPPED] * job.size and seconds <= LATEST),
        # Before the first step there is nothing to save.
        ("the step is saved", lambda: not step or saved >= step),
        ("its words name what is saved", lambda: not step or f"step-{saved:08d}" in job.said(0)),
        ("no process is left", lambda: rig.wait_for(lambda: not any(map(lives, family)), 1.0)),
        ("it goes on to the end", lambda: Job(folder, job.size).run(settings, task=SlowSteps) == [0] * job.size),
        ("it is the same run to the bit", lambda: on_two.same(folder, whole)),
    )
    end_all(family)
    return wrong, seconds


# -- when ------------------------------------------------------------------------------------------------------------


def _after(folder: Path, steps: int) -> bool:
    return rig.last_step(folder) >= steps


def _within_an_epoch(folder: Path, steps: int) -> bool:
    """At the end of each, workers are ended by the run itself: one that ends already passes no signal on."""
    return rig.last_step(folder) >= steps and 1 <= rig.last_step(folder) % STEPS_PER_EPOCH <= 6


def _saving(folder: Path, steps: int) -> bool:
    return rig.last_step(folder) >= steps and bool(list_drafts(folder / CHECKPOINTS))


def _begun(folder: Path, steps: int) -> bool:
    return marker(folder).exists()


# -- to whom ---------------------------------------------------------------------------------------------------------


def _to_process(pids: list[int]) -> None:
    """To the last rank alone; the others hear of it from that one."""
    os.kill(pids[-1], signal.SIGTERM)


def _to_group(pids: list[int]) -> None:
    for pid in pids:
        os.killpg(pid, signal.SIGTERM)


def _to_worker(pids: list[int]) -> None:
    os.kill(_workers(pids[-1])[0], signal.SIGTERM)


def _twice(pids: list[int]) -> None:
    for _ in range(2):
        os.kill(pids[-1], signal.SIGTERM)
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
