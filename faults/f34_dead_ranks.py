"""A rank that dies, in any way and in any part of a step: the others do not wait for it, and a restart goes on."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from faults import on_two, rig, under_torchrun
from faults.job import HALVED, Job
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.trouble import POINTS, Trouble

ID = "F34"
WHAT = "a dead rank ends the others with 76 and its number within 15 s; a restart reaches the same bits"
KINDS = {"kill": -9, "segfault": -11, "leave": 1, "fail": 70}
"""How a rank dies, and its own exit code."""
SMALL = (("kill", "backward"), ("fail", "barrier"))
SETTINGS = {**HALVED, "train.steps": 20, "world.timeout": 10.0}
LOST = 76
LATEST = {False: 45.0, True: 15.0}
"""Seconds; the small form runs beside other tests, on cores that are busy."""
RECOVERED = 60.0
"""Seconds until torchrun has restarted the ranks."""


def run(full: bool) -> Outcome:
    trials, slowest, recovered = {}, 0.0, 0.0
    with rig.scratch() as folder:
        assert Job(folder / "whole").run(SETTINGS) == [0, 0], rig.said(folder / "whole", 0)
        for kind, point in itertools.product(KINDS, POINTS) if full else SMALL:
            name = f"{kind} in {point}"
            trials[name], seconds = _died(
                folder / name.replace(" ", "-"), Trouble(kind, point), folder / "whole", LATEST[full]
            )
            slowest = max(slowest, seconds)
        for kind in KINDS if full else ():
            trials[f"{kind} under torchrun"], seconds = _restarted(folder / f"torchrun-{kind}", kind, folder / "whole")
            recovered = max(recovered, seconds)
    if full:
        return outcome(trials, f"ended after {slowest:.2f}s, restarted by torchrun after {recovered:.1f}s")
    return outcome(trials, f"ended after {slowest:.2f}s")


def _restarted(folder: Path, kind: str, whole: Path) -> tuple[str | None, float]:
    """Under torchrun itself. The seconds from the death to the restarted ranks are torchrun's, and those of loading."""
    mark = Path(f"{folder}.died")
    ended = under_torchrun.launch(folder, SETTINGS, Trouble(kind, mark=str(mark)))
    seconds = ended.starts[-1] - mark.stat().st_mtime
    wrong = first_wrong(
        (f"torchrun ends with 0 after one restart: {ended}", lambda: ended.code == 0 and len(ended.starts) == 2),
        (f"restarted after {seconds:.0f} s", lambda: seconds <= RECOVERED),
        ("it is the same run to the bit", lambda: on_two.same(folder, whole)),
    )
    return wrong, seconds


def _died(folder: Path, trouble: Trouble, whole: Path, latest: float) -> tuple[str | None, float]:
    job = Job(folder).start(SETTINGS, before=trouble)
    job.ranks[trouble.rank].join(rig.LONGEST)
    began = time.monotonic()
    job.ranks[0].join(latest)
    seconds = time.monotonic() - began
    codes = job.codes(0.0)
    told = job.statuses()[0]
    wrong = first_wrong(
        (f"exit codes {codes}", lambda: codes == [LOST, KINDS[trouble.kind]]),
        (f"after {seconds:.1f} s", lambda: seconds <= latest),
        (f"a restart may help: {told}", lambda: told["code"] == LOST and told["restartable"]),
        (f"the rank is named: {told.get('reason')}", lambda: "rank 1" in told["reason"]),
        ("a restart comes to the end", lambda: job.run(SETTINGS, attempt=1) == [0, 0]),
        ("it is the same run to the bit", lambda: on_two.same(folder, whole)),
    )
    job.end()
    return wrong, seconds
