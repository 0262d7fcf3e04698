"""SIGHUP of a terminal that closes, SIGUSR1 and SIGUSR2 of a scheduler: as SIGTERM, unless somebody else has them."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from faults import rig
from faults.job import saved_step
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.processes import end_all, family_of, lives
from faults.slowed import SlowSteps

ID = "F48"
WHAT = "SIGHUP, SIGUSR1 and SIGUSR2 save a run and end it and its workers with 75, unless the run handles them"
EACH = {False: 1, True: 5}
LATEST = 10.0
AFTER, STEPS = 6, 40
STOPPED = 75


def _session() -> None:
    os.setsid()


def _with_own() -> None:
    """As under nohup, in a program with handlers of its own: in Python, and in C."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    faulthandler.register(signal.SIGUSR2, file=open(os.devnull, "w"))  # noqa: SIM115


def run(full: bool) -> Outcome:
    trials, slowest = {}, 0.0
    with rig.scratch() as folder:
        for number in range(EACH[full]):
            for name in ("SIGHUP", "SIGUSR1", "SIGUSR2"):
                # Small: one with workers, one to the process alone.
                for workers in (0, 2) if full else ((2,) if name == "SIGHUP" else (0,)):
                    own = folder / f"{name}-{workers}-{number}"
                    trials[f"{name} {number}, {workers} workers"], seconds = _stopped(
                        own, [signal.Signals[name]], workers, _session, STOPPED
                    )
                    slowest = max(slowest, seconds)
            every = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
            trials[f"not its own {number}"], _ = _stopped(folder / f"own-{number}", every, 2, _with_own, 0)
    return outcome(trials, f"ended after {slowest:.2f}s")


def _stopped(
    folder: Path, numbers: list[signal.Signals], workers: int, before: Callable[[], None], expected: int
) -> tuple[str | None, float]:
    settings = {"train.steps": STEPS, "train.num_workers": workers}
    process = rig.start(folder, settings, task=SlowSteps, before=before)
    # Not at the end of an epoch, where the run itself ends its workers.
    ready = rig.wait_for(lambda: process.exitcode is not None or rig.last_step(folder) >= AFTER)
    step, family, began = rig.last_step(folder), family_of(process.pid or 0), time.monotonic()
    for number in numbers:
        os.killpg(process.pid or 0, number)
    code = rig.ended(process, LATEST if expected else rig.LONGEST)
    seconds, saved = time.monotonic() - began, saved_step(folder)
    wrong = first_wrong(
        ("it was time", lambda: ready),
        (f"exit code {code} after {seconds:.1f} s", lambda: code == expected),
        ("the step is saved", lambda: saved >= step),
        ("no process is left", lambda: rig.wait_for(lambda: not any(map(lives, family)), 2.0)),
        ("it goes on to the end", lambda: not expected or rig.run(folder, settings, task=SlowSteps) == 0),
    )
    end_all(family)
    return wrong, seconds
