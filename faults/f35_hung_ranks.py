"""A rank that does not move: stopped, holding the interpreter, or in a loop that never ends; and one that is slow."""

from __future__ import annotations

import time
from pathlib import Path

from faults import rig, under_torchrun
from faults.job import HALVED, Job, saved_step
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.trouble import Trouble
from halfstep.train.watchdog import STACKS

ID = "F35"
WHAT = "a hanging rank ends the run with 76 in time, with its number and its stacks; a slow rank does not"
KINDS = {"stop": {False: 1, True: 5}, "hold": {False: 0, True: 5}, "loop": {False: 0, True: 5}}
"""How a rank hangs, and how often."""
SLOW = {False: (1, 2), True: (4, 5)}
"""Runs with a straggler, and the steps of each that it is late in."""
TIMEOUT = 4.0
LATER = 5.0
"""Seconds after the timeout in which the run must have ended."""
GONE = 60.0
"""Seconds for a whole job under torchrun, which waits 30 s for a stopped rank before it kills it."""
SETTINGS = {**HALVED, "train.steps": 20, "world.timeout": TIMEOUT, "world.start_timeout": 60.0}
HUNG, STEP = 76, 7


def run(full: bool) -> Outcome:
    trials, slowest = {}, 0.0
    with rig.scratch() as folder:
        for kind, times in KINDS.items():
            for number in range(times[full]):
                trials[f"{kind} {number}"], seconds = _hung(folder / f"{kind}-{number}", kind)
                slowest = max(slowest, seconds)
        runs, late = SLOW[full]
        for number in range(runs):
            found = _slow(folder / f"slow-{number}", late)
            trials |= {f"straggler {number}, step {step}": found for step in range(late)}
        for kind in ("stop", "hold") if full else ():
            trials[f"{kind} under torchrun"] = _gone(folder / f"torchrun-{kind}", kind)
    return outcome(trials, f"ended {slowest:.1f}s after it hung, with a timeout of {TIMEOUT:g}s")


def _hung(folder: Path, kind: str) -> tuple[str | None, float]:
    mark = Path(f"{folder}.hung")
    job = Job(folder).start(SETTINGS, before=Trouble(kind, step=STEP, mark=str(mark)))
    begun = rig.wait_for(lambda: mark.exists() or job.ranks[0].exitcode is not None)
    code, seconds = job.ended(0, TIMEOUT + LATER)
    told, saved = job.statuses()[0], saved_step(folder)
    stacks = {path.name: path.read_text() for path in sorted((folder / STACKS).glob("rank-*"))}
    job.end()
    wrong = first_wrong(
        ("it hung", lambda: begun and mark.exists()),
        (f"exit code {code} after {seconds:.1f} s", lambda: code == HUNG),
        (f"a restart may help: {told}", lambda: told["code"] == HUNG and told["restartable"]),
        (f"the rank is named: {told.get('reason')}", lambda: told["reason"].startswith("rank 1 ")),
        ("rank 0 wrote where it waited", lambda: "halfstep/train/loop.py" in stacks["rank-00000.txt"]),
        # A process that is stopped, or whose interpreter is held, cannot write.
        ("and rank 1 where it hung", lambda: kind != "loop" or "faults/trouble.py" in stacks["rank-00001.txt"]),
        ("the last save is intact", lambda: saved >= 3),
        ("a restart comes to the end", lambda: Job(folder).run(SETTINGS) == [0, 0]),
    )
    return wrong, seconds


def _slow(folder: Path, late: int) -> str | None:
    settings = {**SETTINGS, "train.steps": STEP + late - 1}
    codes = Job(folder).run(settings, before=Trouble("", step=STEP, pause=TIMEOUT / 2))
    return first_wrong(
        (f"exit codes {codes}", lambda: codes == [0, 0]),
        ("nobody took it for a hang", lambda: not (folder / STACKS).exists()),
    )


def _gone(folder: Path, kind: str) -> str | None:
    mark = Path(f"{folder}.hung")
    ended = under_torchrun.launch(folder, SETTINGS, Trouble(kind, step=STEP, mark=str(mark)), restarts=0)
    seconds = time.time() - mark.stat().st_mtime
    return first_wrong(
        (f"torchrun ends: {ended}", lambda: ended.code != 0 and len(ended.starts) == 1),
        (f"after {seconds:.0f} s", lambda: seconds <= GONE),
        ("with the code in the status", lambda: Job(folder).statuses()[0]["code"] == HUNG),
    )
