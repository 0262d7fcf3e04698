"""A process that reads samples dies of the signal that asks the run to stop."""

from __future__ import annotations

import signal

from halfstep.data.worker_processes import WorkerInitializer

WHAT = "SIGTERM kills the data workers"
ROWS = ("F33",)


def apply() -> None:
    begin = WorkerInitializer.__call__

    def dying(self: WorkerInitializer, worker: int) -> None:
        begin(self, worker)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    WorkerInitializer.__call__ = dying  # type: ignore[method-assign]
