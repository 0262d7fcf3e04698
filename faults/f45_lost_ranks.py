"""A rank that is gone while nothing tells the others: its connections stay open, or its host is another one."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import on_two, rig
from faults.job import HALVED, Job
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from faults.shortened import Shortened
from faults.trouble import POINTS, Trouble
from halfstep import peers

ID = "F45"
WHAT = "a lost rank is detected in any collective within 15 s and named; a briefly stopped one is not lost"
MODES = {False: ("fsdp",), True: ("ddp", "fsdp")}
LATEST = {False: 45.0, True: 15.0}
"""Seconds; the small form runs beside other tests, on cores that are busy."""
SHORT = {"peers.SETTLED": 0.2, "train.peer_watch.GRACE": 1.0}
STOPPED = {False: (2.5, 1), True: (60.0, 2)}
"""Seconds that a rank is stopped for, and how often."""
SILENT = {"train.watchdog.SILENT": 4.0, "train.watchdog.HEARTBEAT": 0.5}
SETTINGS: dict[str, Any] = {**HALVED, "train.steps": 20, "world.timeout": 120.0}
LOST, STEP = 76, 7


@dataclass(frozen=True)
class Elsewhere:
    """Ranks that cannot see each other's processes, as on two hosts; and the trouble of one."""

    trouble: Trouble

    def __call__(self) -> None:
        name = f"host-{os.environ['RANK']}"
        peers.compute_host_id = lambda: name
        # Both names are imported by others already.
        from halfstep.train import process_group, status

        process_group.compute_host_id = peers.compute_host_id
        status.socket.gethostname = peers.compute_host_id  # type: ignore[attr-defined]
        self.trouble()


def run(full: bool) -> Outcome:
    trials, slowest = {}, 0.0
    with rig.scratch() as folder:
        whole = {mode: folder / f"whole-{mode}" for mode in MODES[full] if full}
        for mode, path in whole.items():
            assert Job(path).run({**SETTINGS, "world.mode": mode}) == [0, 0], rig.said(path, 0)
        for mode in MODES[full]:
            for point in POINTS if full else ("backward",):
                trouble = Trouble("linger", point, STEP)
                before = Shortened(SHORT, trouble) if not full else trouble
                name = f"{mode}, {point}"
                trials[name], seconds = _lost(folder / name.replace(", ", "-"), mode, before, LATEST[full], whole)
                slowest = max(slowest, seconds)
        seconds, times = STOPPED[full]
        for number in range(times):
            short = SHORT if not full else {}
            trials[f"stopped for {seconds:g} s, {number}"] = _stopped(folder / f"stopped-{number}", short, seconds)
        if full:
            trials["on another host"], _ = _lost(
                folder / "elsewhere",
                "ddp",
                Shortened(SILENT, Elsewhere(Trouble("stop", "forward", STEP))),
                60.0,
                whole,
            )
    return outcome(trials, f"ended after {slowest:.1f}s")


def _lost(folder: Path, mode: str, before: Any, latest: float, whole: dict[str, Path]) -> tuple[str | None, float]:
    settings = {**SETTINGS, "world.mode": mode}
    job = Job(folder).start(settings, before=before)
    rig.wait_for(lambda: job.ranks[0].exitcode is not None or rig.last_step(folder) >= STEP - 1)
    code, seconds = job.ended(0, latest + rig.LONGEST / 6)
    told = job.statuses()[0]
    job.end()
    wrong = first_wrong(
        (f"exit code {code}", lambda: code == LOST),
        (f"after {seconds:.1f} s", lambda: seconds <= latest),
        (f"the rank is named: {told.get('reason')}", lambda: told["reason"].startswith("rank 1 is gone: ")),
        ("a restart may help", lambda: told["restartable"]),
        ("a restart comes to the end", lambda: not whole or job.run(settings, attempt=1) == [0, 0]),
        ("it is the same run to the bit", lambda: not whole or on_two.same(folder, whole[mode])),
    )
    return wrong, seconds


def _stopped(folder: Path, short: dict[str, float], seconds: float) -> str | None:
    """Stop a rank and continue it."""
    job = Job(folder).start({**SETTINGS, "train.steps": 60}, before=Shortened(short))
    begun = rig.wait_for(lambda: job.ranks[0].exitcode is not None or rig.last_step(folder) >= STEP)
    job.send(1, signal.SIGSTOP)
    time.sleep(seconds)
    job.send(1, signal.SIGCONT)
    codes = job.codes()
    return first_wrong(("it began", lambda: begun), (f"exit codes {codes}", lambda: codes == [0, 0]))
