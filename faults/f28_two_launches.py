"""Two launches in one folder; and locks whose holder is gone."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from pathlib import Path

from faults import rig
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.slowed import SlowSteps
from halfstep.journal.jsonl import read_events
from halfstep.train.run_folder import LOCK

ID = "F28"
WHAT = "of two launches in a folder, one runs, and the other names it; a lock ends with its process"
AT_ONCE, KILLED = {False: 3, True: 20}, {False: 2, True: 10}
SETTINGS = {"train.steps": 20, "train.num_workers": 0}
TAKEN = 73


def run(full: bool) -> Outcome:
    chance, trials, slowest = random.Random(28), {}, 0.0
    with rig.scratch() as folder:
        began = time.monotonic()
        assert rig.run(folder / "whole", SETTINGS, task=SlowSteps) == 0, rig.said(folder / "whole")
        alone, whole = time.monotonic() - began, rig.ending(folder / "whole")
        for number in range(AT_ONCE[full]):
            trials[f"at once {number}"], seconds = _at_once(folder / f"two-{number}", whole, alone)
            slowest = max(slowest, seconds)
        for number in range(KILLED[full]):
            workers = number % 2 * 2  # processes that read samples are forked from the holder, with its lock open
            name = f"killed-{number}"
            trials[name] = _killed(folder / name, workers, chance.uniform(0.0, 0.2), whole)
        trials["a stale lock"] = _stale(folder / "stale", whole)
    return outcome(trials, f"refused after {slowest:.2f}s")


def _at_once(folder: Path, whole: rig.Ending, alone: float) -> tuple[str | None, float]:
    """`alone`: the seconds of a whole run by itself, of which a refusal needs the start only."""
    began = time.monotonic()
    both = [rig.start(folder, SETTINGS, task=SlowSteps) for _ in range(2)]
    rig.wait_for(lambda: any(process.exitcode is not None for process in both))
    seconds = time.monotonic() - began
    first = next((process for process in both if process.exitcode is not None), both[0])
    other = next(process for process in both if process is not first)
    alive = other.exitcode is None
    codes = [rig.ended(process) for process in (first, other)]
    said = f"is in use by process {other.pid} on {socket.gethostname()}"
    wrong = first_wrong(
        ("one is refused", lambda: codes == [TAKEN, 0]),
        ("while the other runs", lambda: alive),
        ("it says who has the folder", lambda: said in rig.said(folder)),
        ("it does so soon", lambda: seconds <= alone),
        ("the other comes to its end as if alone", lambda: rig.ending(folder) == whole),
    )
    return wrong, seconds


def _killed(folder: Path, workers: int, after: float, whole: rig.Ending) -> str | None:
    settings = {**SETTINGS, "train.num_workers": workers}
    holder = rig.start(folder, settings, task=SlowSteps)
    begun = rig.wait_for(lambda: len(rig.committed(folder)) > 0)
    time.sleep(after)
    rig.kill(holder)
    return first_wrong(
        ("the holder had begun", lambda: begun and holder.exitcode == -9),
        ("the next one has the lock at once", lambda: rig.run(folder, SETTINGS, task=SlowSteps) == 0),
        ("and goes on", lambda: _resumed(folder)),
        ("it is the same run to the bit", lambda: rig.ending(folder).losses == whole.losses),
    )


def _stale(folder: Path, whole: rig.Ending) -> str | None:
    """A lock file with the words of a process that lives, and has not locked it: numbers of processes come again."""
    folder.mkdir()
    words = {"pid": os.getpid(), "host": socket.gethostname(), "since": "2020-01-01T00:00:00+00:00"}
    (folder / LOCK).write_text(json.dumps(words))
    return first_wrong(
        ("the run begins", lambda: rig.run(folder, SETTINGS, task=SlowSteps) == 0),
        ("and ends", lambda: rig.ending(folder) == whole),
    )


def _resumed(folder: Path) -> bool:
    starts = [event for event in read_events(folder / "journal.jsonl") if event["event"] == "start"]
    return bool(starts[-1]["resumed"]["checkpoint"])
