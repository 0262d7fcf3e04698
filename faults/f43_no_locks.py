"""A file system without working locks: they are granted to everyone, on this host and on others."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.slowed import SlowSteps
from halfstep.train import run_folder

ID = "F43"
WHAT = "without working locks, a second launch of a live run ends with 73, by its process or by its heartbeat"
TAKEN, TIMES = 73, {False: 1, True: 5}
SETTINGS: dict[str, Any] = {"train.steps": 40, "world.timeout": 4.0, "world.start_timeout": 60.0}
"""With a heartbeat every two seconds."""
FAR = "another-host"
WATCHED = {False: 4.0, True: 15.0}


@dataclass(frozen=True)
class NoLocks:
    """Makes the locks of a process exclude nobody; called in it before the run. `host` is the name that it has."""

    host: str = ""
    watched: float = 15.0

    def __call__(self) -> None:
        fcntl.flock = lambda descriptor, how: None  # type: ignore[assignment]
        run_folder.WATCHED = self.watched
        if self.host:
            name = self.host
            socket.gethostname = lambda: name  # type: ignore[assignment]


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    kinds: dict[str, Callable[[Path, rig.Ending, float], str | None]] = {
        "two at once": _at_once,
        "a live process": _alive_here,
        "a heartbeat on another host": _alive_there,
        "a stopped process on another host": _stopped_there,
        "a dead process on another host": _dead_there,
    }
    with rig.scratch() as folder:
        assert rig.run(folder / "whole", SETTINGS) == 0, rig.said(folder / "whole")
        whole = rig.ending(folder / "whole")
        for number in range(TIMES[full]):
            for kind, trial in kinds.items():
                if not full and trial not in SMALL:
                    continue
                name = f"{kind} {number}"
                trials[name] = trial(folder / name.replace(" ", "-"), whole, WATCHED[full])
    return outcome(trials, "0 runs with steps of two launches")


def _at_once(folder: Path, whole: rig.Ending, watched: float) -> str | None:
    both = [rig.start(folder, SETTINGS, task=SlowSteps, before=NoLocks()) for _ in range(2)]
    codes = sorted(rig.ended(process) for process in both)
    return first_wrong(
        (f"one trains, and one is refused: {codes}", lambda: codes == [0, TAKEN]),
        ("it comes to the bits of a run alone", lambda: rig.ending(folder) == whole),
    )


def _alive_here(folder: Path, whole: rig.Ending, watched: float) -> str | None:
    first, begun = _begun(folder, NoLocks())
    code, said = rig.run(folder, SETTINGS, task=SlowSteps, before=NoLocks()), rig.said(folder)
    return first_wrong(
        ("the first had begun", lambda: begun),
        (f"the second is refused: {code}", lambda: code == TAKEN),
        ("it says who has the folder", lambda: f"is in use by process {first.pid} on {socket.gethostname()}" in said),
        ("the first comes to its end", lambda: rig.ended(first) == 0 and rig.ending(folder) == whole),
    )


def _alive_there(folder: Path, whole: rig.Ending, watched: float) -> str | None:
    first, begun = _begun(folder, NoLocks(FAR), steps=3000)
    began = time.monotonic()
    code, said = rig.run(folder, _long(3000), task=SlowSteps, before=NoLocks(watched=watched)), rig.said(folder)
    seconds, alive = time.monotonic() - began, first.is_alive()
    rig.kill(first)
    return first_wrong(
        ("the first had begun", lambda: begun),
        (f"the second is refused: {code}", lambda: code == TAKEN),
        ("it says who has the folder", lambda: f"is in use by process {first.pid} on {FAR}" in said),
        (f"while it is watched: {seconds:.1f} s", lambda: seconds <= watched + 10.0),
        ("the first goes on", lambda: alive),
    )


def _stopped_there(folder: Path, whole: rig.Ending, watched: float) -> str | None:
    """What is stopped sends no heartbeat: its folder is taken, and it finds that out before it writes."""
    first, begun = _begun(folder, NoLocks(FAR))
    os.kill(first.pid or 0, signal.SIGSTOP)
    second = rig.start(folder, SETTINGS, task=SlowSteps, before=NoLocks(watched=watched))
    taken = rig.wait_for(lambda: rig.last_step(folder) >= 30)
    os.kill(first.pid or 0, signal.SIGCONT)
    codes = [rig.ended(first), rig.ended(second)]
    return first_wrong(
        ("the first had begun, and the second went on", lambda: begun and taken),
        (f"the first ends with {TAKEN}, the second finishes: {codes}", lambda: codes == [TAKEN, 0]),
    )


def _dead_there(folder: Path, whole: rig.Ending, watched: float) -> str | None:
    first, begun = _begun(folder, NoLocks(FAR))
    rig.kill(first)
    began = time.monotonic()
    code = rig.run(folder, SETTINGS, task=SlowSteps, before=NoLocks(watched=watched))
    seconds = time.monotonic() - began
    return first_wrong(
        ("the first had begun", lambda: begun),
        (f"the second goes on: {code}", lambda: code == 0),
        (f"after it has watched: {seconds:.1f} s", lambda: watched <= seconds <= watched + 15.0),
        ("it comes to the same bits", lambda: rig.ending(folder) == whole),
    )


def _begun(folder: Path, before: NoLocks, steps: int = 40) -> tuple[Any, bool]:
    process = rig.start(folder, _long(steps), task=SlowSteps, before=before)
    return process, rig.wait_for(lambda: len(rig.committed(folder)) > 1)


def _long(steps: int) -> dict[str, Any]:
    return {**SETTINGS, "train.steps": steps}


SMALL = (_at_once, _alive_there)
"""The others wait until a run has been watched."""
