"""Tell whether a run goes on, and how it ended, from its status file and its journal."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.files import read_json
from halfstep.report.plain import fields, text
from halfstep.report.recorded import Recorded

RUNNING, FINISHED, STOPPED, GAVE_UP, FAILED, KILLED = "running", "finished", "stopped", "given up", "failed", "killed"
_ENDS = {
    "finished": FINISHED,
    "early_stopping": FINISHED,
    "stopped": STOPPED,
    "interrupted": STOPPED,
    "gave_up": GAVE_UP,
}
_STATUS = "status.rank-00000.json"


class RunState(NamedTuple):
    """The state of a run in one word, and why."""

    word: str
    why: str

    @property
    def is_over(self) -> bool:
        """Return whether nothing will be added to the run unless it is started again."""
        return self.word != RUNNING


def status_of(run: Path) -> dict[str, Any]:
    """Return the status of rank 0; empty where there is none."""
    return fields(read_json(run / _STATUS))


def state_of(run: Path, recorded: Recorded) -> RunState:
    """Return the state of a run."""
    status = status_of(run)
    if recorded.end:
        reason = text(recorded.end.get("reason"))
        return RunState(_ENDS.get(reason, FAILED), text(recorded.end.get("error")) or reason.replace("_", " "))
    if status.get("state") == "running":
        if _is_alive(status):
            return RunState(RUNNING, text(status.get("phase")))
        return RunState(KILLED, "its process is gone, and wrote no end")
    return RunState(FAILED, text(status.get("reason")) or "it wrote no end")


def _is_alive(status: Mapping[str, Any]) -> bool:
    """Return whether the process of a status may run; one of another host is taken for running."""
    if status.get("host") != socket.gethostname() or type(status.get("pid")) is not int:
        return True
    import psutil

    try:
        return bool(psutil.Process(status["pid"]).status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, OverflowError, ValueError):
        return False
