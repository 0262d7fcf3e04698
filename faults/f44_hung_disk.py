"""A disk that stops answering: calls that never return, of everything or of the status file alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.shortened import HungDisk, Shortened
from faults.slowed import SlowSteps

ID = "F44"
WHAT = "a hanging disk ends the run with 76 in time, and blocks neither the end of a run nor Ctrl-C"
EACH = {False: 1, True: 5}
TIMEOUT = 5.0
SHORT = {"train.watchdog.REPORT": 1.0, "train.status.WRITTEN_WITHIN": 1.0, "train.signals.LEAVING": 1.0}
LATER = {False: 30.0, True: 10.0}
"""Seconds after the deadlines in which the run has ended; the small form runs beside other tests."""
ALL = ("fsync", "replace", "rename", "mkdir")
AFTER = 4
"""The step after which the disk hangs."""


def _nothing(process: BaseProcess) -> None: ...


def _terminate(process: BaseProcess) -> None:
    os.kill(process.pid or 0, signal.SIGTERM)


def _interrupt_twice(process: BaseProcess) -> None:
    for _ in range(2):
        os.kill(process.pid or 0, signal.SIGINT)
        time.sleep(0.3)


@dataclass(frozen=True)
class Variant:
    code: int
    calls: tuple[str, ...] = ALL
    words: str = ""
    """What the paths have in common; empty for all of the run's folder."""
    send: Callable[[BaseProcess], None] = _nothing
    timeout: float = TIMEOUT
    steps: int = 600


STATUS = "status.rank"
VARIANTS = {
    "everything": Variant(76),
    "Ctrl-C twice while everything hangs": Variant(130, send=_interrupt_twice, timeout=300.0),
    "the flush of the status": Variant(0, ("fsync",), STATUS, steps=40),
    "SIGTERM, the flush of the status": Variant(75, ("fsync",), STATUS, _terminate),
    "the rename of the status": Variant(0, ("replace",), STATUS, steps=40),
    "SIGTERM while everything hangs": Variant(76, send=_terminate),
}
SMALL = ("everything", "Ctrl-C twice while everything hangs", "the flush of the status")


def run(full: bool) -> Outcome:
    trials, slowest = {}, 0.0
    with rig.scratch() as folder:
        for name in VARIANTS if full else SMALL:
            for number in range(EACH[full]):
                own = folder / f"{name.replace(' ', '-')}-{number}"
                trials[f"{name} {number}"], seconds = _hung(own, VARIANTS[name], LATER[full])
                slowest = max(slowest, seconds)
    return outcome(trials, f"ended after {slowest:.1f}s, with a timeout of {TIMEOUT:g}s")


def _hung(folder: Path, variant: Variant, later: float) -> tuple[str | None, float]:
    flag = Path(f"{folder}.flag")
    disk = HungDisk(variant.calls, variant.words or str(folder), str(flag))
    settings: dict[str, Any] = {"train.steps": variant.steps, "world.timeout": variant.timeout}
    process = rig.start(folder, settings, task=SlowSteps, before=Shortened(SHORT, disk))
    begun = rig.wait_for(lambda: process.exitcode is not None or rig.last_step(folder) >= AFTER)
    flag.touch()
    began = time.monotonic()
    time.sleep(0.5 if variant.send is not _nothing else 0.0)
    variant.send(process)
    code = rig.ended(process, TIMEOUT + later)
    seconds = time.monotonic() - began
    wrong = first_wrong(
        ("it began", lambda: begun),
        (f"exit code {code} after {seconds:.1f} s", lambda: code == variant.code),
        ("the same command goes on", lambda: code == 0 or rig.run(folder, settings) == 0),
    )
    return wrong, seconds
