"""A rank that waits for others that do not come, or for a server that is not there, and is asked to stop."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import rig
from faults.job import HALVED, Job
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.train import process_group

ID = "F47"
WHAT = "SIGTERM immediately ends a rank that waits for the others with 75, and the other waiting ranks too"
EACH = {False: 1, True: 5}
LATEST = {False: 20.0, True: 3.0}
SIGNALS = {False: ("SIGTERM",), True: ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")}
NOT_BEGUN, FEW = 75, 3


@dataclass(frozen=True)
class Marked:
    """Make a file when a function of the rendezvous is called for the second time: it waits by then."""

    function: str
    mark: str

    def __call__(self) -> None:
        self.__dict__["calls"] = 0
        function: Callable[..., Any] = getattr(process_group, self.function)

        def marked(*given: Any) -> Any:
            self.__dict__["calls"] += 1
            if self.function == "_wait_for_ranks" or self.__dict__["calls"] == 2:
                Path(self.mark).touch()
            return function(*given)

        setattr(process_group, self.function, marked)


def run(full: bool) -> Outcome:
    trials, slowest = {}, 0.0
    with rig.scratch() as folder:
        for name in SIGNALS[full]:
            for number in range(EACH[full]):
                for waits, trial in {"for the others": _alone, "for the server": _unserved}.items():
                    own = folder / f"{name}-{number}-{waits.replace(' ', '-')}"
                    trials[f"{name} {number}, {waits}"], seconds = trial(own, signal.Signals[name], LATEST[full])
                    slowest = max(slowest, seconds)
    return outcome(trials, f"ended after {slowest:.2f}s")


def _alone(folder: Path, number: signal.Signals, latest: float) -> tuple[str | None, float]:
    """Two of three ranks; one of them gets the signal."""
    job, mark = Job(folder, FEW), Path(f"{folder}.waits")
    job.start(HALVED, only=(0, 2), before=Marked("_wait_for_ranks", str(mark)))
    return _asked(job, mark, number, latest)


def _unserved(folder: Path, number: signal.Signals, latest: float) -> tuple[str | None, float]:
    """Rank 1, and nobody listens at the address of rank 0."""
    job, mark = Job(folder, FEW), Path(f"{folder}.waits")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, and not listening
        job.port = held.getsockname()[1]
        job.start(HALVED, only=(1,), before=Marked("_explain_unreachable", str(mark)))
        return _asked(job, mark, number, latest)


def _asked(job: Job, mark: Path, number: signal.Signals, latest: float) -> tuple[str | None, float]:
    begun = rig.wait_for(mark.exists)
    time.sleep(0.3)
    began = time.monotonic()
    job.send(len(job.ranks) - 1, number)
    codes = job.codes(latest)
    seconds = time.monotonic() - began
    wrong = first_wrong(
        ("it waits", lambda: begun),
        (f"exit codes {codes} after {seconds:.1f} s", lambda: set(codes) == {NOT_BEGUN}),
        ("nothing is made", lambda: not job.folder.exists()),
    )
    return wrong, seconds
