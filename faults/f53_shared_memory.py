"""No room in the shared memory for data workers, and no thread or process more."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import rig
from faults.f04_bad_folders import Mounted, can_mount
from faults.judged import first_wrong, outcome
from faults.outcome import Outcome
from halfstep.out_of_memory import MORE_SHARED, MORE_THREADS

ID = "F53"
WHAT = "too little shared memory, and a limit of threads or processes, end with 81 and the command to run next"
OUT_OF_MEMORY = 81
SETTINGS: dict[str, Any] = {"train.steps": 6, "train.num_workers": 2}
SIZES, FULL_SIZES = (4, 48), (4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48)
"""Kilobytes of /dev/shm: too few for the locks of workers, and for their first batches."""
Before = Callable[[], None]


def run(full: bool) -> Outcome:
    trials: dict[str, str | None] = {}
    # Not in the shared memory, which is another one in the process.
    with tempfile.TemporaryDirectory() as folder:
        for name, (before, more) in _cases(full).items():
            trials[name] = _ended(Path(folder) / name.replace(" ", "-"), before, more)
    return outcome(trials, "81 with what to type")


def _cases(full: bool) -> dict[str, tuple[Before, str]]:
    cases: dict[str, tuple[Before, str]] = {
        "no thread": (_no_thread, MORE_THREADS),
        "no process": (_no_process, MORE_THREADS),
        "no lock": (_no_lock, MORE_SHARED),
    }
    if can_mount():
        for size in FULL_SIZES if full else SIZES:
            cases[f"{size} kB of shared memory"] = (Mounted("/dev/shm", f"size={size}k"), MORE_SHARED)
    return cases


def _ended(place: Path, before: Before, more: str) -> str | None:
    code = rig.ended(rig.start(place, SETTINGS, before=before))
    said = rig.said(place)
    return first_wrong(
        (f"exit code {code}: {said[-300:]}", lambda: code == OUT_OF_MEMORY),
        (f"what to raise: {said}", lambda: more in said),
        (f"the setting to type: {said}", lambda: "train.num_workers" in said),
        ("no traceback", lambda: "Traceback" not in said),
    )


def _no_thread() -> None:
    """Let the system start no thread more, once workers are asked for."""
    from halfstep.data import worker_processes

    def refused(*given: Any, **more: Any) -> None:
        raise RuntimeError("can't start new thread")

    begin = worker_processes.WorkerInitializer.__init__

    def then(self: Any, workers: int) -> None:
        begin(self, workers)
        # The queue of a worker has a thread; torch starts it with the first keys.
        threading.Thread.start = refused  # type: ignore[method-assign]

    worker_processes.WorkerInitializer.__init__ = then  # type: ignore[method-assign]


def _no_process() -> None:
    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    os.fork = refused


def _no_lock() -> None:
    from multiprocessing import synchronize

    def refused(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    synchronize.SemLock.__init__ = refused  # type: ignore[method-assign]
